"""What an author may override is what the parts call."""

from __future__ import annotations

from typing import Any

from tests.envs.api import Api
from tests.envs.kit import SERVER, CountingEnv, config, items_of, running

from headrace.envs import BaseEnvConfig
from headrace.envs.server import VLLMServer


class Overriding(CountingEnv):
    """Notes every call, and does as the base does."""

    def __init__(self, config: BaseEnvConfig, most: int | None = None) -> None:
        super().__init__(config, most)
        self.called: list[str] = []

    async def env_manager(self) -> None:
        self.called.append("env_manager")
        await super().env_manager()

    async def add_train_workers(self) -> None:
        self.called.append("add_train_workers")
        await super().add_train_workers()

    async def handle_env(self, item_uuid: str) -> Any:
        self.called.append("handle_env")
        return await super().handle_env(item_uuid)

    async def collect_trajectories(self, item: Any) -> Any:
        self.called.append("collect_trajectories")
        return await super().collect_trajectories(item)

    async def postprocess_histories(self, trajectories: Any) -> Any:
        self.called.append("postprocess_histories")
        return {**trajectories, "scores": [7.0, 8.0]}

    async def handle_send_to_api(self, *args: Any, **options: Any) -> None:
        self.called.append("handle_send_to_api")
        await super().handle_send_to_api(*args, **options)

    async def add_rollouts_for_wandb(self, *args: Any, **options: Any) -> None:
        self.called.append("add_rollouts_for_wandb")
        await super().add_rollouts_for_wandb(*args, **options)

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        self.called.append("create_rollout_table")
        return await super().create_rollout_table(wandb_metrics)

    async def cleanup(self) -> None:
        self.called.append("cleanup")


async def test_every_method_of_an_items_way_is_called_in_its_order(api: Api) -> None:
    env = Overriding(config(api, max_num_workers=1), most=1)
    async with running(env):
        await api.until(lambda: len(api.received) == 1)
    assert [name for name in env.called if name != "add_train_workers"] == [
        "env_manager",
        "handle_env",
        "collect_trajectories",
        "postprocess_histories",
        "handle_send_to_api",
        "add_rollouts_for_wandb",
        "cleanup",
        "create_rollout_table",
    ]
    assert env.called.index("add_train_workers") == 1
    assert api.received[0]["scores"] == [7.0, 8.0]


async def test_work_that_is_never_begun_is_never_done(api: Api) -> None:
    class Idle(CountingEnv):
        asked = 0

        async def add_train_workers(self) -> None:
            self.asked += 1

    env = Idle(config(api))
    async with running(env):
        await api.until(lambda: env.asked >= 3)
    assert (env.next, api.received) == (0, [])


async def test_an_environment_may_send_other_groups_than_it_was_given(api: Api) -> None:
    class Odd(CountingEnv):
        async def handle_send_to_api(self, scored_data: Any, item: Any = None, **options: Any) -> None:
            if item % 2:
                await super().handle_send_to_api(scored_data, item, **options)

    async with running(Odd(config(api), most=4)):
        await api.until(lambda: len(api.received) == 2)
    assert sorted(items_of(api.received)) == [1, 3]


def test_the_class_of_servers_is_the_environments() -> None:
    class Mine(VLLMServer):
        pass

    class Own(CountingEnv):
        server_cls = Mine

    assert isinstance(Own(BaseEnvConfig()).server.servers[0], Mine)
    assert SERVER.server_type != "vllm"
