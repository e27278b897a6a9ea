"""The examples of clients run as they stand, and the pool then holds what they did."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.gateway.kit import Evidence, Running, tokens, tree
from tests.gateway.rollout import Rollout, in_front

from headrace import Step, connect

pytestmark = pytest.mark.system

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Examples that need no tools of the model: the trajectories of each.
TRAJECTORIES = {"gateway_http.py": 1, "gateway_curl.sh": 1, "gateway_openai.py": 1, "gateway_openai_async.py": 4}
#: The examples that ask until the model calls no tool.
LOOPS = ("openai_tools", "openai_responses", "langchain", "anthropic")


def run(name: str, gateway: Running) -> list[str]:
    """The lines that an example printed; it ends well and complains of nothing."""
    python = [sys.executable, "-W", "error::DeprecationWarning:__main__"]
    command = ["sh"] if name.endswith(".sh") else python
    done = subprocess.run(
        [*command, str(EXAMPLES / name), gateway.address], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def recorded(gateway: Running) -> list[list[Step]]:
    """The steps of every trajectory that the pool knows, each of which is complete."""
    rows = gateway.pool.list_trajectories()["items"]
    assert all(row["complete"] for row in rows)
    return [gateway.steps(row["trajectory_uid"]) for row in rows]


def test_openai(gateway: Running, evidence: Evidence) -> None:
    lines = run("gateway_openai.py", gateway)
    assert lines[2] == "{'status': 'ok', 'steps': 2}"
    (steps,) = recorded(gateway)
    evidence.holds(steps)
    assert tree(steps) == [None, 0]


def test_openai_async(gateway: Running, evidence: Evidence) -> None:
    assert len(run("gateway_openai_async.py", gateway)) == 4
    trajectories = recorded(gateway)
    evidence.holds([step for steps in trajectories for step in steps])
    assert len({steps[0].prompt_uid for steps in trajectories}) == 1
    assert [len(steps) for steps in trajectories] == [1] * 4
    batch = gateway.pool.fetch_batch(1, timeout=0)
    assert batch is not None
    assert len(batch.groups[0].rewards) == 4


def test_openai_with_tools(agency: Running, witness: Evidence) -> None:
    lines = run("gateway_openai_tools.py", agency)
    assert lines == ['add({"a": 2, "b": 3}) = 5', "answer: 'It is 5.'", "{'status': 'ok', 'steps': 2}"]
    (steps,) = recorded(agency)
    witness.holds(steps)
    assert tree(steps) == [None, 0]
    assert steps[-1].reward == 1.0


def test_langchain(agency: Running, witness: Evidence) -> None:
    lines = run("gateway_langchain.py", agency)
    assert lines == ["add({'a': 2, 'b': 3})", "answer: 'It is 5.'", "{'status': 'ok', 'steps': 2}"]
    (steps,) = recorded(agency)
    witness.holds(steps)
    assert tree(steps) == [None, 0]
    assert steps[-1].reward == 1.0


def test_openai_responses(agency: Running, witness: Evidence) -> None:
    lines = run("gateway_openai_responses.py", agency)
    assert lines == ['add({"a": 2, "b": 3}) = 5', "answer: 'It is 5.'", "{'status': 'ok', 'steps': 2}"]
    (steps,) = recorded(agency)
    witness.holds(steps)
    assert tree(steps) == [None, 0]
    assert steps[-1].reward == 1.0


def test_anthropic(agency: Running, witness: Evidence) -> None:
    lines = run("gateway_anthropic.py", agency)
    assert lines == ["add({'a': 2, 'b': 3}) = 5", "answer: 'It is 5.'", "{'status': 'ok', 'steps': 2}"]
    (steps,) = recorded(agency)
    witness.holds(steps)
    assert tree(steps) == [None, 0]
    assert steps[-1].reward == 1.0


def test_the_agents_sdk(rollout: Rollout, folder: Path) -> None:
    rollout.script += ['<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>', "It is 5."]
    with in_front(rollout, folder) as gateway:
        assert run("gateway_agents_sdk.py", gateway) == ["answer: 'It is 5.'", "{'status': 'ok', 'steps': 2}"]
        (steps,) = recorded(gateway)
    assert [step.prompt_ids.tolist() for step in steps] == [order["prompt"] for order in rollout.orders]
    assert tree(steps) == [None, 0]


def test_a_live_service(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder, open=True) as gateway:
        (said,) = run("gateway_live.py", gateway)
        assert "'status': 'ok'" in said
        (row,) = gateway.pool.list_trajectories()["items"]
        steps = gateway.steps(row["trajectory_uid"])
    assert tree(steps) == [None, 0]
    assert (steps[-1].reward, steps[-1].note) == (1.0, "thumbs up")


def test_curl_twice(gateway: Running, evidence: Evidence) -> None:
    for _ in range(2):
        *_, chat, response, message, done = map(json.loads, run("gateway_curl.sh", gateway))
        assert (chat["object"], response["object"], message["type"]) == ("chat.completion", "response", "message")
        assert done == {"status": "ok", "steps": 3}
    for steps in recorded(gateway):
        assert len({tuple(step.prompt_ids.tolist()) for step in steps}) == 1
    evidence.holds([step for steps in recorded(gateway) for step in steps])


def test_the_page_names_every_agent() -> None:
    page = (EXAMPLES.parent / "docs" / "agents.md").read_text()
    assert all(path.name in page for path in EXAMPLES.glob("gateway_*") if _is_agent(path))


def _is_agent(path: Path) -> bool:
    """Whether an example is an agent, and neither a flow that handles tokens nor a trainer nor an introduction."""
    return path.stem not in ("gateway_http", "gateway_trainer", "gateway_openai")


@pytest.mark.parametrize("name", [f"gateway_{name}.py" for name in LOOPS])
def test_a_model_that_calls_nothing_ends_the_loop(gateway: Running, evidence: Evidence, name: str) -> None:
    assert run(name, gateway)[-1] == "{'status': 'ok', 'steps': 1}"
    (steps,) = recorded(gateway)
    evidence.holds(steps)


def test_plain_http(gateway: Running, evidence: Evidence) -> None:
    lines = run("gateway_http.py", gateway)
    assert lines == ["first: {'accepted': 2}", "again: {'accepted': 0, 'duplicates': 2}"]
    (steps,) = recorded(gateway)
    evidence.holds(steps)
    assert tree(steps) == [None, 0]


def test_a_trainer_gets_what_agents_did(gateway: Running) -> None:
    run("gateway_openai.py", gateway)
    run("gateway_http.py", gateway)
    done = recorded(gateway)
    *sequences, last = run("gateway_trainer.py", gateway)
    assert [line.partition(", mean")[0] for line in sequences] == [
        f"{steps[0].prompt_uid[:12]}: {len(tokens(steps[-1]))} tokens, "
        f"{sum(len(step.response_ids) for step in steps)} of them sampled"
        for steps in done
    ]
    assert last.startswith("policy version 2 ledger {'submitted': 4, 'queued': 0, 'leased': 0, 'consumed': 4")
    assert gateway.get("/policy_version").json()["version"] == 2


@pytest.mark.long
@pytest.mark.slow
def test_examples_run_again_on_the_server_that_they_name(tmp_path: Path) -> None:
    """`headrace serve --engine tiny` as a stranger starts it, and the examples one after the other, twice."""
    with serving_tiny("--journal", tmp_path / "pool") as address, connect(address) as pool:
        gateway = Running(address, pool)
        for _ in range(2):
            for name in TRAJECTORIES:
                assert run(name, gateway)
            done = recorded(gateway)
            assert len(done) == sum(TRAJECTORIES.values())
            before = pool.stats()["ledger"]["consumed"]
            last = run("gateway_trainer.py", gateway)[-1]
            assert f"'consumed': {before + sum(map(len, done))}," in last
            assert recorded(gateway) == []
        gateway.http.close()


@contextmanager
def serving_tiny(*flags: str | Path) -> Iterator[str]:
    """The address of a `headrace serve --engine tiny` that is ready, and is ended with the block."""
    command = [sys.executable, "-m", "headrace", "serve", "--engine", "tiny", "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen([*command, *map(str, flags)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield next(line for line in process.stdout if b" ready on " in line).decode().split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=240)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("gateway_*")), ids=lambda path: path.name)
def test_an_example_fits_on_a_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 40
