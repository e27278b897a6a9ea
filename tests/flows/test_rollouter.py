"""Rollouts of a dataset through a real gateway: complete, each once, whoever fails, pauses or is stopped."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engine.kit import Client
from tests.flows.rollouts import Run, failing
from tests.gateway.kit import Running, await_ready, running_gateway, serving, told, until

from headrace import DataPool, Step
from headrace.data.errors import HeadraceError
from headrace.flows.gateway_client import GatewayRefused
from headrace.flows.rollout_state import RolloutStateFile
from headrace.flows.schedule_state import RolloutRules
from headrace.flows.task import Task
from headrace.gateway import Settings, create_app
from headrace.pool.batch import Batch


@pytest.fixture
def gateway(pool: DataPool, engine: Client, folder: Path) -> Iterator[Running]:
    """A gateway on an empty pool."""
    with running_gateway(pool, f"http://{engine.host}", folder) as found:
        yield found


def rules(**changes: Any) -> RolloutRules:
    given = {"rows": 4, "n_rollouts": 2, "batch_size": 2, "max_staleness": 9, "concurrency": 8, "retry_s": 0.0}
    return RolloutRules(**(given | changes))


def held(pool: DataPool, channel: str = "train") -> dict[str, list[dict[str, Any]]]:
    """The trajectories of a channel, by group."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in pool.list_trajectories(channel, limit=10_000)["items"]:
        found.setdefault(row["prompt_uid"], []).append(row)
    return found


def whole(pool: DataPool, groups: int, rollouts: int, channel: str = "train") -> None:
    """Exactly so many groups of so many complete rollouts, and nothing else."""
    found = held(pool, channel)
    assert len(found) == groups, found
    for of_group in found.values():
        assert [row["complete"] for row in of_group] == [True] * rollouts, of_group
    assert pool.stats()["balanced"]


def test_every_prompt_is_in_the_pool_with_all_of_its_rollouts(gateway: Running, pool: DataPool) -> None:
    run = Run(gateway, rules(val_rows=2, validate_every=1, val_rollouts=3))
    summary = run.finish()
    whole(pool, 4, 2)
    whole(pool, 2, 3, "val")
    assert (summary.finished, summary.accepted, summary.rollouts, summary.val_rollouts) == (True, 4, 8, 6)
    assert (summary.failed, summary.retried, summary.validated) == ({}, 0, [0])
    assert run.said[0] == "ready"
    sources = {
        step.metadata["data_source"]
        for uid in [row["trajectory_uid"] for of_group in held(pool, "val").values() for row in of_group]
        for step in pool.trajectory(uid).steps
    }
    assert sources == {"v"}


def test_one_that_fails_is_played_again_under_another_name(gateway: Running, pool: DataPool) -> None:
    async def before(task: Task) -> None:
        if task.row["question"] == "q 1" and task.attempt < 2:
            raise failing("exit_code")

    run = Run(gateway, rules(), before=before)
    summary = run.finish()
    whole(pool, 4, 2)
    assert (summary.failed, summary.retried, summary.lost) == ({"exit_code": 4}, 4, 0)
    again = [task for task in run.seen if task.row["question"] == "q 1"]
    assert len({task.prompt_uid for task in again}) == 1
    assert Counter(task.attempt for task in again) == {0: 2, 1: 2, 2: 2}
    failed = pool.list_trajectories("train", state="failed")["items"]
    assert {row["trajectory_uid"] for row in failed} == {task.trajectory_uid for task in again if task.attempt < 2}


def test_a_group_that_fails_for_good_is_replaced_and_leaves_nothing(gateway: Running, pool: DataPool) -> None:
    async def before(task: Task) -> None:
        if task.row["question"] == "q 0" and task.rollout == 0:
            raise failing()
        if task.row["question"] == "q 0" and task.rollout == 1:
            await asyncio.Event().wait()  # it is ended with its group

    run = Run(gateway, rules(steps=1, retries=1, concurrency=16, n_rollouts=3), before=before)
    summary = run.finish()
    assert (summary.accepted, summary.lost, summary.rollouts) == (2, 1, 6)
    assert summary.failed["crashed"] == 2
    whole(pool, 2, 3)
    questions = {task.row["question"] for task in run.seen}
    assert {"q 0", "q 1", "q 2"} == questions


def test_an_agent_that_always_fails_ends_it_with_the_reason(gateway: Running, tmp_path: Path) -> None:
    async def before(task: Task) -> None:
        raise failing("no_calls")

    with pytest.raises(HeadraceError, match=r"3 groups failed one after the other, most of all with 'no_calls'"):
        Run(gateway, rules(retries=0, max_failed_groups=3, concurrency=1), before=before).finish()


def test_a_bug_of_a_flow_is_a_failure_of_its_rollout_alone(gateway: Running, pool: DataPool) -> None:
    async def before(task: Task) -> None:
        if task.row["question"] == "q 2" and task.attempt == 0:
            raise ZeroDivisionError("a bug")

    summary = Run(gateway, rules(), before=before).finish()
    whole(pool, 4, 2)
    assert summary.failed == {"crashed": 2}


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancellation_ends_it_also_beside_news(gateway: Running, turns: int) -> None:
    """However many turns of the loop lie between the two; it waits for a rollout that is to begin again."""

    async def before(task: Task) -> None:
        if task.row["question"] == "q 0":
            raise failing()
        assert run.rollouter is not None
        while run.rollouter.schedule.wakes_at is None:
            await asyncio.sleep(0)
        for _ in range(1_000):  # until the rollouter waits
            await asyncio.sleep(0)
        run.rollouter.resume()
        for _ in range(turns):
            await asyncio.sleep(0)
        playing.cancel()
        await asyncio.Event().wait()

    run = Run(gateway, rules(rows=2, n_rollouts=1, retry_s=3600.0), before=before, drain_s=0.0)
    playing = asyncio.create_task(run.play())
    with pytest.raises(asyncio.CancelledError):
        await playing


def test_a_sync_holds_rollouts_and_none_of_them_fails(gateway: Running, pool: DataPool) -> None:
    begun = threading.Semaphore(0)

    async def before(task: Task) -> None:
        begun.release()

    run = Run(gateway, rules(rows=12, concurrency=4), before=before)
    with run.started() as beside:
        for version in range(1, 4):
            begun.acquire()
            told(gateway.post("/pause?mode=drain"))
            told(gateway.post("/policy_version", {"version": version}))
            told(gateway.post("/resume"))
        summary = beside.join()
    assert summary is not None
    assert summary.failed == {}
    whole(pool, 12, 2)


def test_it_follows_the_trainer_within_the_bound(gateway: Running, pool: DataPool) -> None:
    """A trainer takes two groups a version; what it gets was sampled at most one version before."""
    pool.configure("train", n_rollouts=2)
    with Run(gateway, rules(rows=10, max_staleness=1)).started() as beside:
        for version in range(5):
            until(lambda: pool.stats()["channels"]["train"]["groups"]["ready"] >= 2)
            batch = pool.fetch_batch(2, n_rollouts=2)
            assert batch is not None
            oldest = [
                step.policy_version or 0 for group in batch.groups for t in group.trajectories for step in t.steps
            ]
            assert len(oldest) == 4
            assert version - min(oldest) <= 1
            told(gateway.post("/policy_version", {"version": version + 1}))
        summary = beside.join()
    assert summary is not None
    assert (summary.accepted, summary.finished) == (10, True)
    assert summary.versions[0] == 0


def test_what_a_dead_trainer_had_is_used_before_more_begins(gateway: Running, pool: DataPool) -> None:
    """It had learned from five batches, which wait in the pool again: the versions spent on these let none in."""
    pool.configure("train", n_rollouts=2)
    run = Run(gateway, rules(rows=60, max_staleness=1))

    def publish(version: int) -> None:
        told(gateway.post("/policy_version", {"version": version}))
        until(lambda: run.rollouter is not None and run.rollouter.schedule.state.version == version)

    def fetch() -> Batch:
        until(lambda: pool.stats()["channels"]["train"]["groups"]["ready"] >= 2)
        batch = pool.fetch_batch(2, n_rollouts=2, lease_s=3600)
        assert batch is not None
        return batch

    with run.started() as beside:
        lost = []
        for version in range(5):
            lost.append(fetch())
            publish(version + 1)
        for batch in lost:
            batch.nack()
        for version in range(6, 10):
            publish(version)
            fetch().ack()
        publish(10)
        assert run.rollouter is not None
        assert run.rollouter.schedule.state.admitted <= (1 + 5 + 1) * 2
        beside.stop()
        beside.join()


def test_it_waits_where_the_trainer_does_not_come(gateway: Running, pool: DataPool) -> None:
    with Run(gateway, rules(rows=10, max_staleness=0)).started() as beside:
        until(lambda: pool.stats()["channels"].get("train", {}).get("groups", {}).get("ready") == 2)
        beside.stop()
        summary = beside.join()
    assert summary is not None
    assert (summary.finished, summary.accepted) == (False, 2)
    whole(pool, 2, 2)


def test_one_that_is_stopped_goes_on_where_it_was(gateway: Running, pool: DataPool, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    reached = threading.Event()

    async def before(task: Task) -> None:
        if task.row["question"] == "q 2":
            reached.set()
            await asyncio.Event().wait()

    with Run(gateway, rules(), before=before, state=state, drain_s=0.0).started() as beside:
        assert reached.wait(120)
        beside.stop()
        first = beside.join()
    assert first is not None
    assert not first.finished
    run = Run(gateway, rules(), state=state)
    second = run.finish()
    assert (second.finished, second.accepted, second.rollouts) == (True, 4, 8)
    whole(pool, 4, 2)
    assert max(task.attempt for task in run.seen) == 1  # those that were cut off, under their next name


@contextmanager
def first_save_alone() -> Iterator[None]:
    """Of what rollouters save, only the first is written, from just after their first groups were admitted: as if they
    were killed then."""
    kept: list[bytes] = []
    original = RolloutStateFile.write

    def write(self: RolloutStateFile, encoded: bytes) -> None:
        if not kept:
            kept.append(encoded)
            original(self, encoded)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutStateFile, "write", write)
        yield


def test_what_is_complete_is_recognised_though_its_state_was_never_saved(
    gateway: Running, pool: DataPool, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    with first_save_alone():
        assert Run(gateway, rules(), state=state).finish().finished
    run = Run(gateway, rules(), state=state)
    summary = run.finish()
    assert (summary.accepted, summary.rollouts, summary.failed) == (4, 8, {})
    assert run.seen == []  # all were complete, and are taken as they are
    whole(pool, 4, 2)


def test_so_is_a_later_attempt_where_an_earlier_one_failed(gateway: Running, pool: DataPool, tmp_path: Path) -> None:
    """Asked for the attempt that failed, the pool would say that the group is lost."""

    async def before(task: Task) -> None:
        if (task.row["question"], task.rollout, task.attempt) == ("q 0", 0, 0):
            raise failing()

    def ready() -> bool:
        channel = pool.stats()["channels"].get("train")
        return channel is not None and channel["groups"]["ready"] == 1

    using = rules(rows=2, batch_size=1, max_staleness=0, until_trained=True)
    with first_save_alone(), Run(gateway, using, before=before, state=tmp_path / "state.json").started():
        until(ready)
    run = Run(gateway, using, state=tmp_path / "state.json")
    with run.started() as beside:
        for version in (1, 2):
            until(ready)
            assert pool.fetch_batch(1, n_rollouts=2, timeout=0) is not None
            told(gateway.post("/policy_version", {"version": version}))
        summary = beside.join()
    assert summary is not None
    assert (summary.accepted, summary.rollouts, summary.retried, summary.dropped) == (2, 4, 1, {})
    assert [task.row["question"] for task in run.seen] == ["q 1", "q 1"]


def test_a_group_runs_until_it_is_scored(gateway: Running, pool: DataPool) -> None:
    pool.configure("train", n_rollouts=2, require_reward=True)
    run = Run(gateway, rules(rows=2, batch_size=1, max_staleness=0, scored=True), reward=None)
    with run.started() as beside:
        until(lambda: [row["complete"] for row in pool.list_trajectories("train")["items"]] == [True] * 2)
        told(gateway.post("/policy_version", {"version": 1}))
        first, second = (row["trajectory_uid"] for row in pool.list_trajectories("train")["items"])
        pool.reward(first, 1.0)
        assert pool.fail(second, "reward: unavailable", quarantine=True).status == "ok"
        until(lambda: len(pool.list_trajectories("train", complete=True)["items"]) >= 2)
        assert len(run.seen) == 3  # the group of version 0 is not scored: there is no room for another
        again = run.seen[-1]
        assert (again.attempt, again.trajectory_uid) == (1, second[:-1] + "1")
        pool.reward(again.trajectory_uid, 0.0)
        assert pool.fetch_batch(1, n_rollouts=2) is not None  # the trainer uses it, and there is room
        until(lambda: len(pool.list_trajectories("train", complete=True)["items"]) == 2)
        for row in pool.list_trajectories("train")["items"]:
            if row["reward"] is None:
                pool.reward(row["trajectory_uid"], 0.5)
        summary = beside.join()
    assert summary is not None
    assert (summary.finished, summary.accepted, summary.failed) == (True, 2, {"reward": 1})
    assert summary.rollouts == 4


def test_a_group_that_cannot_be_scored_is_given_up_whole(gateway: Running, pool: DataPool) -> None:
    pool.configure("train", n_rollouts=2, require_reward=True)
    run = Run(gateway, rules(rows=2, batch_size=1, max_staleness=0, retries=0, scored=True), reward=None)
    with run.started() as beside:
        until(lambda: [row["complete"] for row in pool.list_trajectories("train")["items"]] == [True] * 2)
        first, second = (row["trajectory_uid"] for row in pool.list_trajectories("train")["items"])
        assert pool.fail(second, "reward: unavailable", quarantine=True).status == "ok"
        until(lambda: len(run.seen) == 4)  # the next prompt is played in its place
        until(lambda: first not in {row["trajectory_uid"] for row in pool.list_trajectories("train")["items"]})
        until(lambda: len(pool.list_trajectories("train", complete=True)["items"]) == 2)
        for row in pool.list_trajectories("train", complete=True)["items"]:
            pool.reward(row["trajectory_uid"], 0.5)
        summary = beside.join()
    assert summary is not None
    assert (summary.accepted, summary.lost, summary.failed) == (1, 1, {"reward": 1})
    assert summary.rollouts == 2
    whole(pool, 1, 2)


def test_a_group_that_the_pool_drops_is_replaced(gateway: Running, pool: DataPool) -> None:
    """Were it still counted, there would be no room for another, and the second and third step would never come."""
    pool.configure("train", n_rollouts=2)
    using = rules(rows=9, batch_size=1, max_staleness=0, steps=3, until_trained=True)
    with Run(gateway, using).started() as beside:
        for version in range(3):
            until(lambda: pool.stats()["channels"]["train"]["groups"]["ready"] == 1)
            if version > 0:
                crowd_out(pool, f"another-{version}")
                until(lambda: pool.stats()["channels"]["train"]["groups"]["ready"] == 1)
            assert pool.fetch_batch(1, n_rollouts=2, timeout=0) is not None
            told(gateway.post("/policy_version", {"version": version + 1}))
        summary = beside.join()
    assert summary is not None
    assert (summary.finished, summary.accepted, summary.rollouts) == (True, 3, 6)
    assert (summary.dropped, summary.lost, summary.failed) == ({"capacity": 2}, 0, {})
    assert pool.stats()["balanced"]


def crowd_out(pool: DataPool, uid: str) -> None:
    """Has the pool drop what it holds, for want of room."""
    pool.configure("train", max_queue_size=1)
    pool.submit_steps([Step(prompt_ids=[1], response_ids=[2], trajectory_uid=uid, step_index=0)])
    assert pool.stats()["channels"]["train"]["groups"]["ready"] == 0
    pool.configure("train", max_queue_size=100)
    pool.forget(uid)


def test_saving_costs_no_more_than_a_write_for_each_group(
    gateway: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    original = RolloutStateFile.write

    def counted(self: RolloutStateFile, encoded: bytes) -> None:
        writes.append(len(encoded))
        original(self, encoded)

    monkeypatch.setattr(RolloutStateFile, "write", counted)
    monkeypatch.setattr("headrace.flows.rollouter.SAVE_S", 3600.0)
    summary = Run(gateway, rules(rows=12, concurrency=1), state=tmp_path / "state.json").finish()
    assert summary.rollouts == 24
    assert len(writes) <= 12 + 2  # before each group, once for the first that ended, and at the end


def test_a_paused_rollouter_starts_nothing(gateway: Running, pool: DataPool) -> None:
    begun = threading.Semaphore(0)
    go_on = threading.Event()

    async def before(task: Task) -> None:
        begun.release()
        while not go_on.is_set():
            await asyncio.sleep(0.01)

    run = Run(gateway, rules(concurrency=1, n_rollouts=1), before=before)
    with run.started() as beside:
        assert begun.acquire(timeout=120)
        beside.call("pause")
        go_on.set()
        until(lambda: len(held(pool)) == 1 and next(iter(held(pool).values()))[0]["complete"])
        rollouter = run.rollouter
        assert rollouter is not None
        until(lambda: rollouter.schedule.running == 0)
        assert len(run.seen) == 1
        beside.call("resume")
        summary = beside.join()
    assert summary is not None
    assert summary.accepted == 4


def test_a_wrong_key_is_told_at_once(pool: DataPool, engine: Client, folder: Path) -> None:
    with running_gateway(pool, f"http://{engine.host}", folder, api_key="right", reward_key="paid") as gateway:
        with pytest.raises(GatewayRefused, match="401"):
            Run(gateway, rules(), key="wrong").finish()
        with pytest.raises(GatewayRefused, match="this needs the reward key"):
            Run(gateway, rules(), key="right").finish()
    assert held(pool) == {}


class Refusing:
    """A gateway that answers some of its routes, `asked`, with `status`, the first `times` that they are asked or for
    as long as `times` is None. `refused` is how often it did."""

    def __init__(self, app: Any, asked: str, status: int, times: int | None, *, active: bool = True) -> None:
        self.app, self.asked, self.status, self.times, self.active = app, asked, status, times, active
        self.refused = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        asked = f"{scope.get('method')} {scope.get('path')}"
        over = self.times is not None and self.refused >= self.times
        if not self.active or over or not asked.startswith(self.asked):
            await self.app(scope, receive, send)
            return
        self.refused += 1
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"busy"})


@contextmanager
def refusing(
    pool: DataPool, engine: Client, folder: Path, asked: str, status: int, times: int | None = None, **options: Any
) -> Iterator[tuple[Running, Refusing]]:
    """A gateway that takes calls, behind `Refusing`."""
    settings = Settings(vllm_addresses=f"http://{engine.host}", tokenizer_path=str(folder))
    app = Refusing(create_app(pool, settings, drain_s=5), asked, status, times, **options)
    with serving(app) as address:
        await_ready(address)
        gateway = Running(address, pool)
        yield gateway, app
        gateway.http.close()


@pytest.mark.parametrize("status", [200, 429, 500, 503])
def test_a_failure_that_the_gateway_cannot_record_is_told_again(
    pool: DataPool, engine: Client, folder: Path, status: int
) -> None:
    """Were it not, its group would run for ever, and no other be admitted. A 200 that is no JSON is a proxy's."""

    async def before(task: Task) -> None:
        if task.row["question"] == "q 1" and task.rollout == 0 and task.attempt == 0:
            raise failing()

    with refusing(pool, engine, folder, "POST /fail_trajectory", status, times=3) as (gateway, front):
        summary = Run(gateway, rules(), before=before, patience_s=0.0).finish()
    assert front.refused == 3
    assert (summary.finished, summary.accepted, summary.retried) == (True, 4, 1)
    whole(pool, 4, 2)


def test_a_gateway_that_will_not_take_a_failure_ends_the_run(pool: DataPool, engine: Client, folder: Path) -> None:
    async def before(task: Task) -> None:
        if task.row["question"] == "q 1":
            raise failing()

    with (
        refusing(pool, engine, folder, "POST /fail_trajectory", 400) as (gateway, _),
        pytest.raises(GatewayRefused, match=r"/fail_trajectory/.* answered 400: busy"),
    ):
        Run(gateway, rules(), before=before).finish()


def test_a_group_that_cannot_be_removed_keeps_no_one_from_the_version(
    pool: DataPool, engine: Client, folder: Path
) -> None:
    pool.configure("train", n_rollouts=2, require_reward=True)
    using = rules(rows=3, batch_size=1, max_staleness=0, retries=0, scored=True)
    with refusing(pool, engine, folder, "DELETE /trajectories/", 500) as (gateway, front):
        run = Run(gateway, using, reward=None)
        with run.started():
            until(lambda: [row["complete"] for row in pool.list_trajectories("train")["items"]] == [True] * 2)
            first, second = (row["trajectory_uid"] for row in pool.list_trajectories("train")["items"])
            assert pool.fail(second, "reward: unavailable", quarantine=True).status == "ok"
            until(lambda: front.refused > 0)
            told(gateway.post("/policy_version", {"version": 1}))
            rollouter = run.rollouter
            assert rollouter is not None
            until(lambda: rollouter.schedule.state.version == 1)
            front.active = False
            until(lambda: first not in {row["trajectory_uid"] for row in pool.list_trajectories("train")["items"]})


def test_a_gateway_that_goes_away_costs_no_rollout_its_retries(engine: Client, folder: Path, tmp_path: Path) -> None:
    cut = threading.Event()
    back = threading.Event()

    async def before(task: Task) -> None:
        if task.row["question"] == "q 3" and task.attempt == 0:
            cut.set()
            while not back.is_set():
                await asyncio.sleep(0.01)
            raise failing()  # as an agent does whose connection is refused

    with DataPool(tmp_path / "journal") as pool:
        with running_gateway(pool, f"http://{engine.host}", folder) as first:
            port = int(first.address.rpartition(":")[2])
            run = Run(first, rules(retries=0), before=before)
            beside = run.started().__enter__()
            assert cut.wait(120)
        rollouter = run.rollouter
        assert rollouter is not None
        until(lambda: not rollouter._ready)
        back.set()
        with _at_port(pool, port, engine, folder):
            summary = beside.join()
        assert summary is not None
        assert (summary.finished, summary.accepted, summary.lost) == (True, 4, 0)
        whole(pool, 4, 2)


@pytest.mark.parametrize("asked", ["GET /policy_version", "POST /trajectories"])
def test_nor_does_one_that_goes_away_between_two_questions(
    pool: DataPool, engine: Client, folder: Path, asked: str
) -> None:
    """The watcher waits for no answer: it says that the gateway is away while the rollouts that this costs fail."""
    cut = asyncio.Event()

    async def before(task: Task) -> None:
        if task.row["question"] == "q 3" and task.attempt == 0:
            front.active = True
            cut.set()
            while front.refused < 2:
                await asyncio.sleep(0.01)
            front.active = False
            raise failing()
        await cut.wait()  # what is complete is asked for after that

    with refusing(pool, engine, folder, asked, 503, active=False) as (gateway, front):
        summary = Run(gateway, rules(retries=0, scored=True), before=before).finish()
    assert (summary.finished, summary.accepted, summary.lost) == (True, 4, 0)
    whole(pool, 4, 2)


def _at_port(pool: DataPool, port: int, engine: Client, folder: Path) -> AbstractContextManager[str]:
    """A gateway at a port where another one was."""
    settings = Settings(vllm_addresses=f"http://{engine.host}", tokenizer_path=str(folder))
    return serving(create_app(pool, settings, drain_s=5), port=port)
