"""Tries of a named call in two gateways that know nothing of each other: the pool takes one step, and all tries get its
answer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from tests.gateway.kit import Running, running_gateway, told
from tests.gateway.rollout import PATIENCE_S, Rollout, Say, error_of, events_of, user
from tests.pool.servers import serving as serving_pool

from headrace import DataPool, connect

BODY = {"model": "m", "messages": [user("hi")]}
NAMED = {"Idempotency-Key": "the only one"}


@contextmanager
def two_gateways(rollout: Rollout, folder: Path, *, remote: bool) -> Iterator[tuple[Running, Running, DataPool]]:
    with ExitStack() as stack, DataPool() as pool:
        address = stack.enter_context(serving_pool(pool)) if remote else None
        pools = [stack.enter_context(connect(address)) if address is not None else pool for _ in range(2)]
        first, second = [
            stack.enter_context(running_gateway(one, rollout.address, folder, open=True, ack="pool")) for one in pools
        ]
        yield first, second, pool


def post(gateway: Running, *, stream: bool) -> httpx.Response:
    url = f"{gateway.address}/t/p/v1/chat/completions"
    return httpx.post(url, json=BODY | {"stream": stream}, headers=NAMED, timeout=PATIENCE_S, trust_env=False)


def text_of(answer: httpx.Response, *, stream: bool) -> str:
    if not stream:
        return str(told(answer)["choices"][0]["message"]["content"])
    deltas = [choice["delta"] for event in events_of(answer.text) for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize("remote", [False, True], ids=["embedded", "http"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_later_of_two_tries_is_told_to_ask_again_and_gets_what_the_other_got(
    rollout: Rollout, folder: Path, threads: ThreadPoolExecutor, remote: bool, stream: bool
) -> None:
    first_gate, second_gate = rollout.gate(), rollout.gate()
    rollout.script += [Say("one", at=first_gate), Say("two", at=second_gate)]
    with two_gateways(rollout, folder, remote=remote) as (here, there, pool):
        first = threads.submit(post, here, stream=stream)
        first_gate.reached()
        second = threads.submit(post, there, stream=stream)
        second_gate.reached()
        second_gate.open()
        assert text_of(second.result(PATIENCE_S), stream=stream) == "two"
        first_gate.open()
        late = first.result(PATIENCE_S)
        if stream:
            assert '"answered_elsewhere"' in late.text
        else:
            assert error_of(late, 503)["code"] == "answered_elsewhere"
            assert int(late.headers["retry-after"]) >= 1
        for gateway in (here, there):
            assert text_of(post(gateway, stream=stream), stream=stream) == "two"
        (step,) = pool.trajectory("t").steps
        assert step.call_id is not None
        assert len(rollout.orders) == 2
        metrics = here.get("/metrics").text
        assert "headrace_gateway_lost_total{" not in metrics


def test_the_same_name_in_another_trajectory_is_another_call(rollout: Rollout, folder: Path) -> None:
    rollout.script += ["one", "two"]
    with DataPool() as pool, running_gateway(pool, rollout.address, folder, open=True) as gateway:
        urls = [f"{gateway.address}/{uid}/p/v1/chat/completions" for uid in ("a", "b")]
        given = {"json": BODY, "headers": NAMED, "timeout": PATIENCE_S, "trust_env": False}
        answers = [told(httpx.post(url, **given)) for url in urls]
        assert [answer["choices"][0]["message"]["content"] for answer in answers] == ["one", "two"]
        assert answers[0]["id"] != answers[1]["id"]
        assert told(httpx.post(urls[0], **given))["id"] == answers[0]["id"]
