"""Flows that handle tokens themselves: every step is what was sampled, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.engine.kit import Client
from tests.flows.conftest import Made
from tests.gateway.kit import Evidence, Running, tokens, tree

from headrace.data.errors import InvalidInput
from headrace.files import checked, read
from headrace.flows import AgentConfig, AgentFailed, AgentFlowBase, GatewayClient, Handle, Task, register
from headrace.flows.flow import FLOWS
from headrace.flows.gateway_client import GatewayRefused
from headrace.tokens import load_renderer

#: A conversation in which the user asks again, until it is told to end.
ASKING = """
from headrace.flows import AgentFlowBase, MultiStepFlow, register

@register("asking")
class Asking(MultiStepFlow):
    def __init__(self, gateway, *, again="Again.", **options):
        super().__init__(gateway, **options)
        self.again = again

    async def observe(self, task, answer):
        assert answer.message["role"] == "assistant"
        return None if answer.turn == 2 else [{"role": "user", "content": self.again}]

class Endless(Asking):
    async def observe(self, task, answer):
        return [{"role": "user", "content": self.again}]

class Unfinished(MultiStepFlow):
    pass

class Narrow(AgentFlowBase):
    def __init__(self, gateway):
        super().__init__(gateway)

    async def play(self, task, handle): ...

NUMBER = 7
"""


@pytest.fixture
def evidence(engine: Client, gateway: Running) -> Evidence:
    return Evidence(engine)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """The names that a test registers are its own."""
    before = dict(FLOWS)
    yield
    FLOWS.clear()
    FLOWS.update(before)


@pytest.fixture
def asking(tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(ASKING)


async def test_a_single_turn_is_one_step_as_it_was_sampled(
    made: Made, gateway: Running, evidence: Evidence, task: Task
) -> None:
    await made(flow="single_turn", sampling={"max_tokens": 5, "temperature": 0.7}).run(task)
    found = gateway.pool.trajectory(task.trajectory_uid)
    evidence.holds(found.steps)
    assert (found.complete, len(found.steps), found.metadata["data_source"]) == (True, 1, "numbers")
    assert len(found.steps[0].response_ids) <= 5
    # What a trainer must know of the log-probs: they are of this temperature.
    assert found.steps[0].sampling["temperature"] == 0.7
    assert found.steps[0].metadata["log_probs"] == "processed"


async def test_a_validation_rollout_is_in_its_own_channel(made: Made, gateway: Running, task: Task) -> None:
    await made(flow="single_turn").run(replace(task, channel="val"))
    assert gateway.pool.trajectory(task.trajectory_uid).channel == "val"


@pytest.mark.usefixtures("asking")
async def test_each_prompt_of_a_conversation_begins_with_all_that_came_before(
    made: Made, gateway: Running, evidence: Evidence, task: Task, folder: Path
) -> None:
    options = {"_target_": "asking.py:Asking", "tokenizer": str(folder), "again": "And now?"}
    await made(flow=options, sampling={"max_tokens": 6, "seed": 0}).run(task)
    steps = gateway.steps(task.trajectory_uid)
    evidence.holds(steps)
    assert tree(steps) == [None, 0, 1]
    assert all(len(step.prompt_ids) > len(tokens(before)) for before, step in pairwise(steps))
    assert gateway.pool.trajectory(task.trajectory_uid).complete


@pytest.mark.usefixtures("asking")
@pytest.mark.parametrize(("sampling", "ends"), [({}, []), ({"stop_token_ids": [7]}, [7])])
async def test_an_answer_ends_with_its_turn_though_its_server_knows_no_such_end(
    made: Made, gateway: Running, task: Task, folder: Path, sampling: dict[str, Any], ends: list[int]
) -> None:
    flow = made(flow={"_target_": "asking.py:Asking", "tokenizer": str(folder)}, sampling={"max_tokens": 2, **sampling})
    await flow.run(task)
    expected = sorted({*load_renderer(folder).stop_ids, *ends})
    assert len(expected) > len(ends)
    assert [step.sampling["stop_token_ids"] for step in gateway.steps(task.trajectory_uid)] == [expected] * 3


@pytest.mark.usefixtures("asking")
async def test_a_conversation_ends_at_its_bound(made: Made, gateway: Running, task: Task, folder: Path) -> None:
    flow = {"_target_": "asking.py:Endless", "tokenizer": str(folder), "max_turns": 2}
    await made(flow=flow, sampling={"max_tokens": 2}).run(task)
    assert len(gateway.steps(task.trajectory_uid)) == 2


async def test_a_prompt_that_is_too_long_fails_its_rollout(made: Made, gateway: Running, task: Task) -> None:
    long = replace(task, row={"question": "word " * 100_000})
    with pytest.raises(AgentFailed) as caught:
        await made(flow="single_turn").run(long)
    assert caught.value.reason == "refused"
    (row,) = gateway.pool.list_trajectories(prompt_uid=task.prompt_uid, state="failed")["items"]
    assert row["reason"] == str(caught.value)


async def test_a_reward_that_nobody_can_compute_is_an_error_and_no_zero(
    made: Made, gateway: Running, task: Task
) -> None:
    with pytest.raises(GatewayRefused, match="reward worker"):
        await made(flow={"name": "single_turn", "score": True}).run(task)
    (row,) = gateway.pool.list_trajectories(prompt_uid=task.prompt_uid, state="failed")["items"]
    assert row["steps"] == 1


async def test_a_flow_of_ones_own_pays_what_play_returns(client: GatewayClient, gateway: Running, task: Task) -> None:
    class Paid(AgentFlowBase):
        async def play(self, task: Task, handle: Handle) -> float:
            sampled = await self.generate(task, handle, messages=task.messages, sampling={"max_tokens": 3})
            await self.submit_steps(task, handle, [sampled], metadata={"tool": "none"})
            return 0.75

    await Paid(client).run(task)
    found = gateway.pool.trajectory(task.trajectory_uid)
    assert (found.reward, found.steps[0].metadata["tool"]) == (0.75, "none")


async def test_a_flow_that_raises_fails_its_rollout(client: GatewayClient, gateway: Running, task: Task) -> None:
    class Broken(AgentFlowBase):
        async def play(self, task: Task, handle: Handle) -> None:
            raise KeyError("tool")

    with pytest.raises(AgentFailed) as caught:
        await Broken(client).run(task)
    assert (caught.value.reason, str(caught.value)) == ("crashed", "crashed: KeyError: 'tool'")


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("asking")
async def test_a_flow_of_a_yaml_file_is_found_by_its_target_and_then_by_its_name(
    client: GatewayClient, tmp_path: Path, folder: Path
) -> None:
    (tmp_path / "run.yaml").write_text(
        f"flow:\n  name: asking\n  _target_: asking.py:Asking\n  tokenizer: {folder}\n  timeout_s: 7\n"
    )
    flow = checked(AgentConfig, read(tmp_path / "run.yaml"), "run.yaml").made(client, tmp_path)
    assert (type(flow).__name__, flow.timeout_s) == ("Asking", 7)
    assert type(flow) is FLOWS["asking"]
    again = AgentConfig(flow={"name": "asking", "tokenizer": str(folder)}).made(client, tmp_path)
    assert type(again) is type(flow)


@pytest.mark.usefixtures("asking")
@pytest.mark.parametrize(
    ("flow", "words"),
    [
        ("single_turns", "there is no flow 'single_turns'; did you mean single_turn"),
        ({"again": "x"}, "give a name or a _target_"),
        ({"_target_": "asking.py:Nothing"}, "has no 'Nothing'"),
        ({"_target_": "asking.py:NUMBER"}, "no class of a flow"),
        ("asking.py:Unfinished", "lacks observe"),
        ({"_target_": "asking.py:Asking", "agian": "x"}, "has no option 'agian'; did you mean again"),
        ("asking.py:Asking", "cannot be made: .*tokenizer"),
        ("asking.py:Narrow", r"must take \*\*options"),
    ],
    ids=str,
)
async def test_a_flow_that_there_is_not_is_said(made: Made, flow: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        made(flow=flow)


def test_a_name_stands_for_one_flow() -> None:
    class Mine(AgentFlowBase):
        async def play(self, task: Task, handle: Handle) -> None: ...

    register("mine")(Mine)
    register("mine")(Mine)  # the same, imported again
    with pytest.raises(InvalidInput, match=r"'single_turn' is headrace\.flows\.turns\.SingleTurnFlow"):
        register("single_turn")(Mine)
