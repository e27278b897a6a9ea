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
from headrace.run.config import RunConfig
from headrace.run.plan import plan, server_command
from headrace.run.services import RunPlan, RunPorts
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
    assert found.files["env.yaml"]["openai"][0]["base_url"] == "http://127.0.0.1:8001/v1"


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


def test_on_ray_pool_and_reward_are_actors_that_are_ended_and_the_gateway_is_a_process(changed: Changed) -> None:
    bounds = {"prompt_length": 64, "response_length": 8}
    found = planned(changed, where={"ray": "10.0.0.1:6379"}, gateway=bounds)
    assert [service.name for service in found.services] == [
        "engine",
        "pool",
        "gateway",
        "reward",
        "trainer",
        "rollouter",
    ]
    address = "ray-actor://headrace-RUN?namespace=default&address=10.0.0.1%3A6379"
    assert found.pool == found.files["trainer.yaml"]["pool"]["address"] == address
    assert found.named("pool").undo[-1] == address
    assert "--name headrace-RUN-reward --ray-address 10.0.0.1:6379" in found.named("reward").line()
    assert "--data-pool-name headrace-RUN --ray-address 10.0.0.1:6379" in found.named("gateway").line()
    assert found.named("gateway").after == {"pool": "ready"}
    assert found.files["rollout.yaml"]["gateway"] == {"address": found.gateway}


def test_on_ray_the_gateways_bounds_are_asked_for(changed: Changed) -> None:
    with pytest.raises(InvalidInput, match=r"set gateway.prompt_length and gateway.response_length"):
        changed(where={"ray": "auto"})
