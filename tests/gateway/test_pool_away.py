"""A pool that is full, away or slow: agents are served all the same, and their steps arrive later, in order."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.kit import Running, await_ready, running_gateway, told, tree, until
from tests.gateway.rollout import PATIENCE_S, Rollout, chat, in_front, uid_of, user
from tests.pool.kit import group, prompts
from tests.pool.servers import ServedPool, serving

from headrace import DataPool
from headrace.pool import remote
from headrace.pool.connect import connect
from headrace.pool.errors import InternalError
from headrace.pool.operation import Operation


@pytest.fixture
def rollout(rollout: Rollout) -> Rollout:
    rollout.reply = lambda asked: f"answer {len(rollout.orders)}"
    return rollout


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with ServedPool(tmp_path_factory.mktemp("served") / "pool") as found:
        yield found


@pytest.fixture
def served(common: ServedPool) -> ServedPool:
    """A pool in a process that may be killed and started again; every test leaves it running."""
    return common


@contextmanager
def away_from(served: ServedPool, rollout: Rollout, folder: Path, **settings: Any) -> Iterator[Running]:
    """A gateway on a pool in another process, that notices soon when it is gone."""
    with (
        connect(served.address, retry_s=0.05) as pool,
        running_gateway(pool, rollout.address, folder, **settings) as gateway,
    ):
        yield gateway


def gauge(gateway: Running, name: str) -> float:
    """One of the numbers that can be read without the pool."""
    text = gateway.get("/metrics").text
    return float(re.findall(rf"^headrace_gateway_{name} (\S+)$", text, re.M)[0])


def counter(gateway: Running, name: str) -> dict[str, float]:
    """A counter's samples by their labels."""
    text = gateway.get("/metrics").text
    return {labels: float(n) for labels, n in re.findall(rf"^headrace_gateway_{name}_total{{(.*)}} (\S+)$", text, re.M)}


def health(gateway: Running) -> str:
    return str(told(gateway.get("/health"))["status"])


def talk(gateway: Running, base: str, turns: int, messages: list[Any] | None = None) -> list[Any]:
    """A conversation; its messages, the last one a user's."""
    messages = messages or [user("hi")]
    for turn in range(turns):
        answer = told(chat(gateway, base, messages))["choices"][0]["message"]
        messages = [*messages, answer, user(f"turn {turn}")]
    return messages


# -- full or closed ----------------------------------------------------------------------------------------------------


def test_a_pool_without_room_for_another_group_says_when_to_come_back(rollout: Rollout, folder: Path) -> None:
    with DataPool() as pool, in_front(rollout, folder, pool) as gateway:
        pool.configure(max_queue_size=1, overflow="reject")
        base = gateway.init()["base_url"]
        refused = gateway.post("/init_trajectory")
        assert refused.status_code == 503
        assert "max_queue_size" in refused.json()["detail"]
        assert int(refused.headers["retry-after"]) >= 1
        talk(gateway, base, 2)
        assert gateway.complete(uid_of(base)) == {"status": "ok", "steps": 2}
        assert pool.fetch_batch(1, timeout=60) is not None
        gateway.init()


def test_steps_that_cannot_be_kept_are_counted_and_agents_are_served(rollout: Rollout, folder: Path) -> None:
    with DataPool() as pool, in_front(rollout, folder, pool) as gateway:
        base = gateway.init()["base_url"]
        messages = talk(gateway, base, 1)
        pool.shutdown()
        messages = talk(gateway, base, 2, messages)
        assert health(gateway) == "degraded"
        assert sum(counter(gateway, "lost").values()) == 2
        pool.reopen()
        talk(gateway, base, 1, messages)
        assert health(gateway) == "ok"
        steps = gateway.steps(uid_of(base))
        assert [step.step_index for step in steps] == [0, 1]
        assert steps[1].prompt_ids.tolist() == rollout.orders[-1]["prompt"]


def test_a_full_outbox_is_counted_and_said_and_agents_are_served(
    rollout: Rollout, folder: Path, served: ServedPool
) -> None:
    with away_from(served, rollout, folder, outbox_mb=0.003) as gateway:
        base = gateway.init()["base_url"]
        served.kill()
        assert len(talk(gateway, base, 12)) == 25
        lost = counter(gateway, "lost")
        assert set(lost) == {'channel="train",reason="outbox_full"'}
        kept = gauge(gateway, "outbox_calls")
        assert kept > 0
        assert sum(lost.values()) + kept == 12
        assert gauge(gateway, "outbox_bytes") <= 3000
        assert health(gateway) == "degraded"
        served.start()
        until(lambda: gauge(gateway, "outbox_calls") == 0)
        told(chat(gateway, base, "once more"))
        until(lambda: gauge(gateway, "outbox_calls") == 0)
        assert health(gateway) == "ok"
        steps = gateway.steps(uid_of(base))
        prompts = [order["prompt"] for order in rollout.orders]
        assert [step.step_index for step in steps] == list(range(int(kept) + 1))
        assert [step.prompt_ids.tolist() for step in steps[:-1]] == prompts[: int(kept)]
        assert steps[-1].prompt_ids.tolist() == prompts[-1]


# -- away --------------------------------------------------------------------------------------------------------------


def test_while_the_pool_is_away_agents_are_served_and_steps_arrive_in_order(
    rollout: Rollout, folder: Path, served: ServedPool
) -> None:
    with away_from(served, rollout, folder) as gateway:
        base = gateway.init()["base_url"]
        messages = talk(gateway, base, 2)
        until(lambda: gauge(gateway, "outbox_calls") == 0)
        assert len(gateway.steps(uid_of(base))) == 2
        served.kill()
        messages = talk(gateway, base, 3, messages)
        told(chat(gateway, base, messages, stream=False))
        assert chat(gateway, base, messages, stream=True).text.endswith("data: [DONE]\n\n")
        until(lambda: health(gateway) == "degraded")
        assert gauge(gateway, "degraded") == 1
        served.start()
        until(lambda: gauge(gateway, "outbox_calls") == 0)
        assert health(gateway) == "ok"
        steps = gateway.steps(uid_of(base))
        assert [step.prompt_ids.tolist() for step in steps] == [order["prompt"] for order in rollout.orders]
        assert tree(steps) == [None, 0, 1, 2, 3, 4, 4]
        assert gateway.complete(uid_of(base), reward=1.0) == {"status": "ok", "steps": 7}


def test_after_a_pool_was_set_back_no_prompt_is_put_together_from_another_branch(
    rollout: Rollout, folder: Path, tmp_path: Path
) -> None:
    """Its machine lost what was not on disk yet, and the gateway has seen it there."""
    before = tmp_path / "before"
    with ServedPool(tmp_path / "pool") as served, away_from(served, rollout, folder) as gateway:
        arrived = lambda: gauge(gateway, "outbox_calls") == 0  # noqa: E731
        base = gateway.init()["base_url"]
        messages = talk(gateway, base, 1)
        until(arrived)
        served.kill()
        shutil.copytree(served.journal, before)
        served.start()
        messages = talk(gateway, base, 1, messages)
        until(arrived)
        served.kill()
        shutil.rmtree(served.journal)
        before.rename(served.journal)
        served.start()
        talk(gateway, base, 1, [user("another agent's, " * 40)])
        until(arrived)
        talk(gateway, base, 1, messages)
        until(arrived)
        orders = [order["prompt"] for order in rollout.orders]
        steps = gateway.steps(uid_of(base))
        assert [step.prompt_ids.tolist() for step in steps] == [orders[0], orders[2], orders[3]]


def test_a_history_that_nobody_here_knows_is_served_while_the_pool_is_away(
    rollout: Rollout, folder: Path, served: ServedPool
) -> None:
    """A compaction that keeps an answer needs nothing from the pool: it is a branch."""
    with away_from(served, rollout, folder) as gateway:
        base = gateway.init()["base_url"]
        talk(gateway, base, 1)
        served.kill()
        rewritten = [user("so far"), {"role": "assistant", "content": "never said"}, user("go on")]
        told(chat(gateway, base, rewritten))
        told(gateway.post(f"{base}/v1/completions", {"prompt": "something else"}))
        served.start()
        until(lambda: gauge(gateway, "outbox_calls") == 0)
        assert tree(gateway.steps(uid_of(base))) == [None, None, None]


def test_what_needs_the_pool_says_when_to_come_back(rollout: Rollout, folder: Path, served: ServedPool) -> None:
    with away_from(served, rollout, folder) as gateway:
        base = gateway.init()["base_url"]
        served.kill()
        for answer in (
            gateway.post("/init_trajectory"),
            gateway.post(f"{base}/v1/complete_trajectory"),
            gateway.get("/stats"),
            chat(gateway, f"{gateway.address}/other/p", "hi"),
        ):
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["retry-after"]) >= 1
        assert gateway.get("/health").status_code == gateway.get("/ready").status_code == 200
        served.start()
        assert gateway.complete(uid_of(base)) == {"status": "ok", "steps": 0}


def test_with_ack_pool_the_last_byte_waits_for_the_pool_itself(
    rollout: Rollout, folder: Path, served: ServedPool
) -> None:
    with away_from(served, rollout, folder, ack="pool") as gateway, ThreadPoolExecutor(2) as threads:
        base = gateway.init()["base_url"]
        told(chat(gateway, base, "hi"))
        assert gauge(gateway, "outbox_calls") == 0
        served.kill()
        url = f"{base}/v1/chat/completions"
        calls = [
            threads.submit(httpx.post, url, json={"messages": [user("x")], "stream": s}, timeout=240, trust_env=False)
            for s in (False, True)
        ]
        until(lambda: gauge(gateway, "outbox_calls") == 2)
        assert not any(call.done() for call in calls)
        served.start()
        assert [call.result(240).status_code for call in calls] == [200, 200]
        assert len(gateway.steps(uid_of(base))) == 3


# -- in between --------------------------------------------------------------------------------------------------------


def test_a_step_that_the_pool_fails_at_is_counted_and_the_others_arrive(
    rollout: Rollout, folder: Path, served: ServedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with away_from(served, rollout, folder) as gateway:
        bases = [gateway.init()["base_url"] for _ in range(3)]
        bad = uid_of(bases[1])
        execute_async = gateway.pool.execute_async

        async def failing(operation: Operation[Any], *rest: Any, **options: Any) -> Any:
            steps = operation.steps()
            if steps is not None and bad in {head.trajectory_uid for head in steps.heads}:
                raise InternalError("the pool failed at this call")
            return await execute_async(operation, *rest, **options)

        monkeypatch.setattr(gateway.pool, "execute_async", failing)
        served.kill()  # so that they wait, and travel together
        for base in bases:
            talk(gateway, base, 1)
        assert gauge(gateway, "outbox_calls") == 3
        served.start()
        until(lambda: gauge(gateway, "outbox_calls") == 0)
        assert counter(gateway, "lost") == {'channel="train",reason="internal"': 1}
        told(chat(gateway, bases[0], "later"))
        until(lambda: gauge(gateway, "outbox_calls") == 0)
        assert [len(gateway.steps(uid_of(base))) for base in bases] == [2, 0, 1]


def test_a_long_fetch_through_a_gateway_is_relayed_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PIECE_S", 0.05)
    asked: list[str] = []
    with (
        DataPool() as pool,
        serving(pool) as address,
        connect(address) as behind,
        running_gateway(behind, "http://127.0.0.1:1", folder, until_ready=False) as gateway,
        connect(gateway.address) as trainer,
        ThreadPoolExecutor(1) as threads,
    ):
        execute_async = pool.execute_async

        async def counted(operation: Operation[Any], *rest: Any, **options: Any) -> Any:
            asked.append(operation.name)
            return await execute_async(operation, *rest, **options)

        monkeypatch.setattr(pool, "execute_async", counted)
        waiting = threads.submit(trainer.fetch_batch, 1, timeout=PATIENCE_S)
        until(lambda: asked.count("fetch") >= 3 or waiting.done())
        pool.submit_steps(group("p"))
        assert prompts(waiting.result(PATIENCE_S)) == ["p"]


# -- a pool that is away at the start ----------------------------------------------------------------------------------


def test_a_gateway_that_starts_before_its_pool_says_so_and_takes_calls_once_it_is_there(
    served: ServedPool, rollout: Rollout, folder: Path
) -> None:
    with connect(served.address) as pool:
        pool.set_version(7)
    served.kill()
    with (
        connect(served.address, retry_s=0.05) as pool,
        running_gateway(pool, rollout.address, folder, until_ready=False, serve_channel="served") as gateway,
    ):
        until(lambda: health(gateway) == "degraded")
        for said in (told(gateway.get("/health"))["detail"], gateway.get("/ready").json()["detail"]):
            assert f"waiting for the pool at {served.address}" in said
        assert gateway.get("/ready").status_code == 503
        assert gateway.post("/init_trajectory").status_code == 503
        served.start()
        await_ready(gateway.address)
        assert health(gateway) == "ok"
        base = gateway.init()["base_url"]
        talk(gateway, base, 2)
        until(lambda: len(gateway.steps(uid_of(base))) == 2)
        assert {step.policy_version for step in gateway.steps(uid_of(base))} == {7}


def test_a_pool_that_does_not_take_the_key_ends_the_start(rollout: Rollout, folder: Path) -> None:
    with (
        DataPool() as held,
        serving(held, key="right") as address,
        connect(address, key="wrong", retry_s=0.05) as pool,
        running_gateway(pool, rollout.address, folder, until_ready=False) as gateway,
    ):
        until(lambda: gateway.app.state.gateway.failure is not None)
        refused = gateway.get("/ready")
        assert refused.status_code == 503
        assert "key" in refused.json()["detail"]
