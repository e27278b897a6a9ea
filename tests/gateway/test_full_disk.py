"""A pool in the gateway's own process whose disk is full: a call waits for room, and is refused if none comes. What was
answered is kept."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.gateway.kit import Running, told, until
from tests.gateway.rollout import Rollout, chat, error_of, events_of, in_front, uid_of

from headrace import DataPool
from headrace.gateway import recorder
from headrace.pool.errors import DiskFull


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DataPool]:
    with DataPool(tmp_path) as found:
        yield found


@pytest.fixture
def gateway(rollout: Rollout, folder: Path, pool: DataPool) -> Iterator[Running]:
    with in_front(rollout, folder, pool) as running:
        yield running


def fill(pool: DataPool) -> None:
    """No room for another step."""
    assert pool._journal is not None
    pool._journal.quota_bytes = 0


def make_room(pool: DataPool) -> None:
    assert pool._journal is not None
    pool._journal.quota_bytes = None


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_whose_step_cannot_be_kept_is_refused_and_the_next_one_goes_on(
    gateway: Running, pool: DataPool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "DISK_FULL_WAIT_S", 0.0)
    base = gateway.init()["base_url"]
    first = told(chat(gateway, base, "hi"))
    fill(pool)
    history = [{"role": "user", "content": "hi"}, first["choices"][0]["message"], {"role": "user", "content": "more"}]
    refused = chat(gateway, base, history, stream=stream)
    if stream:
        last = events_of(refused.text)[-1]
        assert last["error"]["code"] == "disk_full"
    else:
        assert error_of(refused, 503)["code"] == "disk_full"
        assert int(refused.headers["retry-after"]) >= 1
    assert "steps cannot be kept" in gateway.get("/health").text
    make_room(pool)
    told(chat(gateway, base, history))
    gateway.complete(uid_of(base), reward=1.0)
    steps = gateway.steps(uid_of(base))
    assert [step.step_index for step in steps] == [0, 1]
    assert steps[1].prompt_ids.tolist()[: len(steps[0].prompt_ids)] == steps[0].prompt_ids.tolist()
    assert steps[1].reward == 1.0
    assert told(gateway.get("/health")) == {"status": "ok"}


def test_a_deletion_that_found_no_room_is_ended_when_it_is_asked_for_again(
    gateway: Running, pool: DataPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise DiskFull("no room for a snapshot")

    base = gateway.init()["base_url"]
    told(chat(gateway, base, "hi"))
    path = f"/trajectories/{uid_of(base)}"
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_compact", full)
        assert gateway.http.delete(path).status_code == 503
    assert pool._unerased
    assert told(gateway.http.delete(path)) == {"status": "ok"}
    assert not pool._unerased


def test_a_call_waits_for_room(gateway: Running, pool: DataPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "DISK_FULL_WAIT_S", 120.0)
    base = gateway.init()["base_url"]
    fill(pool)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(chat, gateway, base, "hi")
        until(lambda: "steps cannot be kept" in gateway.get("/health").text)
        assert not waiting.done()
        make_room(pool)
        told(waiting.result(120))
    assert len(gateway.steps(uid_of(base))) == 1
