"""The plan of a run: what is started, with which words, and what the parts are told. Nothing is started here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.data.errors import InvalidInput
from headrace.files import checked
from headrace.flows.rollout_config import RolloutConfig
from headrace.rewards.config import RewardConfig
from headrace.run.cluster import actor_name
from headrace.run.config import RunConfig
from headrace.run.plan import plan, server_command
from headrace.run.services import ENVIRONMENT_FILE, RunPlan, RunPorts
from headrace.trainer.config import TrainerConfig

Changed = Callable[..., tuple[RunConfig, Path]]


def planned(changed: Changed, ports: RunPorts | None = None, *, resume: bool = False, **sections: Any) -> RunPlan:
    config, base = changed(**sections)
    return plan(config, base, base / "RUN", ports or RunPorts((8001,), 8100), resume=resume)


def test_a_run_has_a_process_for_each_part_and_every_file_can_be_read(changed: Changed, tmp_path: Path) -> None:
    found = planned(changed)
    assert [service.name for service in found.services] == ["engine", "gateway", "reward", "trainer", "rollouter"]
    trainer = checked(TrainerConfig, found.files["trainer.yaml"], "trainer.yaml")
    assert (trainer.pool.batch_size, trainer.pool.n_rollouts, trainer.steps) == (8, 8, 30)
    rollout = checked(RolloutConfig, found.files["rollout.yaml"], "rollout.yaml")
    assert (rollout.rollout.batch_size, rollout.rollout.steps, rollout.rollout.scored) == (8, 30, True)
    reward = checked(RewardConfig, found.files["reward.yaml"], "reward.yaml")
    assert Path(reward.functions[0].use.rpartition(":")[0]).is_absolute()


def test_the_pool_is_journalled_below_the_run_and_waits_for_rewards(changed: Changed, tmp_path: Path) -> None:
    line = planned(changed).named("gateway").line()
    assert f"--journal {tmp_path}/RUN/journal" in line
    assert "--channel train:n_rollouts=8,require_reward=true --channel val:n_rollouts=1,require_reward=true" in line


def test_the_pools_memory_is_bounded_where_the_run_says_so(changed: Changed) -> None:
    assert "--pool-memory-mb" not in planned(changed).named("gateway").line()
    assert (
        "--pool-memory-mb 256.0 --channel" in planned(changed, gateway={"pool_memory_mb": 256}).named("gateway").line()
    )


def test_without_a_reward_nobody_scores_and_nothing_waits_for_it(changed: Changed) -> None:
    found = planned(changed, reward=None)
    assert "reward" not in [service.name for service in found.services]
    assert "require_reward=false" in found.named("gateway").line()
    assert found.files["rollout.yaml"]["rollout"]["scored"] is False


def test_an_environment_takes_the_rollouters_place(changed: Changed) -> None:
    sections: dict[str, Any] = {"agent": {"env": "my_env.py"}, "data": None, "reward": None, "evaluate": None}
    found = planned(changed, **sections)
    assert [service.name for service in found.services] == ["engine", "gateway", "trainer", "environment"]
    assert "--serve-channel train" in found.named("gateway").line()


def test_an_environment_calls_through_the_gateway_which_does_not_record_it(changed: Changed, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"agent": {"env": "my_env.py"}, "data": None, "reward": None, "evaluate": None}
    found = planned(changed, RunPorts((8001, 8002), 8100), servers={"count": 2}, **sections)
    env, servers = found.files["env.yaml"]["env"], found.files["env.yaml"]["openai"]
    assert len(servers) == 2, "as many items at a time as with the servers themselves"
    for server in servers:
        assert (server["base_url"], server["server_type"]) == ("http://127.0.0.1:8100/v1", "gateway")
        assert server["record"] is False
    kept = [Path(env[name]) for name in ("metrics_path", "spool_dir", "data_dir_to_save_evals")]
    assert all(path.is_relative_to(tmp_path / "RUN") for path in kept)
    assert "steps_per_eval" not in env


def test_where_the_run_evaluates_an_environment_does_not(changed: Changed) -> None:
    sections: dict[str, Any] = {"agent": {"env": "my_env.py"}, "data": None, "reward": None, "evaluate": {"every": 5}}
    assert planned(changed, **sections).files["env.yaml"]["env"]["steps_per_eval"] == 0


def test_several_servers_have_a_port_each_and_are_all_the_gateways(changed: Changed) -> None:
    found = planned(changed, RunPorts((8001, 8002), 8100), servers={"start": "headrace engine", "count": 2})
    assert [service.name for service in found.services[:2]] == ["engine", "engine-2"]
    assert "--vllm-addresses http://127.0.0.1:8001,http://127.0.0.1:8002" in found.named("gateway").line()


def test_servers_that_run_are_not_started(changed: Changed) -> None:
    found = planned(changed, RunPorts((), 8100), servers={"addresses": ["http://gpu:9000/v1"]})
    assert found.services[0].name == "gateway"
    assert "--vllm-addresses http://gpu:9000 " in found.named("gateway").line()


@pytest.mark.parametrize(
    ("start", "said", "env"),
    [
        ("headrace engine --threads 2", "engine --model M --host 127.0.0.1 --port 7 ", {}),
        ("vllm serve --dtype half", "vllm serve M --host 127.0.0.1 --port 7 ", {"VLLM_SERVER_DEV_MODE": "1"}),
        (
            "vllm serve --enable-lora --max-lora-rank 16",
            "vllm serve M --host 127.0.0.1 --port 7 ",
            {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
        ),
        ("bash serve.sh {model} {port}", "bash serve.sh M 7", {}),
    ],
)
def test_a_server_is_started_by_the_words_that_are_given(start: str, said: str, env: dict[str, str]) -> None:
    command, added = server_command(start, "M", 7)
    assert said in " ".join(command)
    assert added == env


def test_a_trainer_that_begins_again_resumes_and_a_resumed_one_is_told_once(changed: Changed) -> None:
    assert planned(changed).named("trainer").again == ("--resume",)
    resumed = planned(changed, resume=True).named("trainer")
    assert (resumed.command[-1], resumed.again) == ("--resume", ())


def test_calls_are_not_played_before_the_trainer_has_published(changed: Changed) -> None:
    assert planned(changed).named("rollouter").after["trainer"] == "ready"


def test_on_ray_pool_reward_and_rollout_workers_are_actors_and_the_gateway_is_a_process(changed: Changed) -> None:
    place = {
        "ray": "127.0.0.1:6379",
        "shared_folder": True,
        "pool": {"node": "10.0.0.2"},
        "reward": {"resources": {"scoring": 1}, "num_cpus": 2},
        "rollout": {"workers": 3, "spread": True},
    }
    found = planned(changed, where=place)
    names = [service.name for service in found.services]
    assert names == ["engine", "pool", "gateway", "reward", "trainer", "rollouter"]
    name = actor_name("pool", Path(found.files["trainer.yaml"]["run"]).parent)
    assert found.pool == f"ray-actor://{name}?namespace=default&address=127.0.0.1%3A6379"
    assert found.pool == found.files["trainer.yaml"]["pool"]["address"]
    pool, reward, gateway = (found.named(part).line() for part in ("pool", "reward", "gateway"))
    assert f"pool start --attach --name {name} --ray-address 127.0.0.1:6379" in pool
    assert "--shared-journal --node 10.0.0.2" in pool
    assert "RUN/journal" in pool
    assert "require_reward=true" in pool
    assert f"--pool '{found.pool}'" in reward
    assert "--num-cpus 2 --resource scoring=1" in reward
    assert f"--pool-address '{found.pool}'" in gateway
    assert "RUN/outbox" in gateway
    assert "--channel" not in gateway
    assert found.named("gateway").after == {"pool": "ready"}
    rollout = checked(RolloutConfig, found.files["rollout.yaml"], "rollout.yaml")
    assert rollout.gateway.address == found.gateway
    assert rollout.workers is not None
    assert (rollout.workers.count, rollout.workers.placement.spread) == (3, True)


def test_on_ray_the_gateway_listens_where_nodes_reach_it(changed: Changed) -> None:
    found = planned(changed, where={"ray": "auto", "host": "10.0.0.7"})
    assert found.gateway == "http://10.0.0.7:8100"
    assert "--host 10.0.0.7" in found.named("gateway").line()
    assert found.servers == ("http://127.0.0.1:8001",)


def test_on_ray_an_environment_is_a_process_that_feeds_the_actor_through_the_gateway(changed: Changed) -> None:
    found = planned(changed, where={"ray": "auto"}, agent={"env": "my_env.py"}, data=None, reward=None)
    assert [service.name for service in found.services] == ["engine", "pool", "gateway", "trainer", "environment"]
    gateway = found.named("gateway").line()
    assert f"--pool-address '{found.pool}'" in gateway
    assert "--serve-channel train" in gateway
    assert found.files[ENVIRONMENT_FILE]["env"]["rollout_server_url"] == found.gateway


def test_each_runs_actors_have_names_of_their_own(tmp_path: Path) -> None:
    assert actor_name("pool", tmp_path / "a") == actor_name("pool", tmp_path / "a")
    assert actor_name("pool", tmp_path / "a") != actor_name("pool", tmp_path / "b")


def test_a_pool_is_placed_only_where_its_journal_can_be_seen(changed: Changed) -> None:
    with pytest.raises(InvalidInput, match=r"where.shared_folder: true"):
        changed(where={"ray": "auto", "pool": {"spread": True}})


def test_by_rays_client_the_pool_cannot_stay_here(changed: Changed) -> None:
    with pytest.raises(InvalidInput, match=r"this machine is no node.*where.shared_folder: true.*HOST:6379"):
        changed(where={"ray": "ray://127.0.0.1:10001"})
    found = planned(changed, where={"ray": "ray://127.0.0.1:10001", "shared_folder": True})
    assert "--ray-address ray://127.0.0.1:10001" in found.named("pool").line()


def test_what_is_only_tried_keeps_its_pool_where_its_folder_is(changed: Changed) -> None:
    config, _ = changed(where={"ray": "auto", "shared_folder": True, "pool": {"num_cpus": 2, "spread": True}})
    assert config.where.beside().pool.flags() == []
    assert not config.where.beside().shared_folder


def test_what_is_no_cluster_is_refused(changed: Changed) -> None:
    with pytest.raises(InvalidInput, match=r"'local' is no cluster; it is auto, HOST:PORT"):
        changed(where={"ray": "local"})


def test_on_ray_the_trainer_may_be_workers_which_stay_where_the_servers_are(changed: Changed) -> None:
    train = {"workers": 2, "gpus": 1, "resources": {"learning": 1}}
    where = {"ray": "auto", "shared_folder": True, "train": train}
    flags = "--workers 2 --gpus-per-worker 1 --cpus-per-worker 1 --max-failures 3 --resource learning=1"
    found = planned(changed, where=where)
    assert f"{flags} --here --ray-address auto --namespace default" in found.named("trainer").line()
    found = planned(changed, RunPorts((), 8100), servers={"addresses": ["http://10.0.0.9:8001"]}, where=where)
    assert f"{flags} --ray-address auto" in found.named("trainer").line()
    assert "--workers" not in planned(changed, where={"ray": "auto"}).named("trainer").line()


def test_workers_that_train_need_a_folder_that_all_of_them_see(changed: Changed) -> None:
    with pytest.raises(InvalidInput, match=r"where.train has workers .* set where.shared_folder: true"):
        changed(where={"ray": "auto", "train": {"workers": 2}})
    changed(where={"ray": "auto", "train": {"workers": 2, "here": True}})
