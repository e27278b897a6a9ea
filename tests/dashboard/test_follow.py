"""The index follows a pool: what is submitted, rewarded, leased, consumed and dropped, and what changed is read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace import DataPool, Step
from headrace.dashboard.follow import PoolFollower, record_of
from headrace.dashboard.index import TrajectoryIndex
from headrace.dashboard.records import TrajectoryQuery
from headrace.dashboard.source import JournalFolder, RunningPool
from headrace.pool.config import DEFAULT_CHANNEL
from headrace.pool.errors import PoolUnreachable
from headrace.pool.readonly import JournalView


def submit(pool: DataPool, group: int, *, rollouts: int = 2, steps: int = 2, ended: bool = True) -> None:
    """A group whose trajectories have some steps each; rollout r earns r at its end."""
    pool.submit_steps(
        [
            Step(
                prompt_ids=[1, 2, *range(10, 10 + 4 * index)],
                response_ids=[7, 8],
                rollout_log_probs=[-0.5, -1.0],
                trajectory_uid=f"g{group}-{rollout}",
                prompt_uid=f"g{group}",
                step_index=index,
                reward=float(rollout) if ended and index == steps - 1 else None,
                is_last=ended and index == steps - 1,
                policy_version=3,
                tags=("odd",) if group % 2 else (),
            )
            for rollout in range(rollouts)
            for index in range(steps)
        ]
    )


class Counting(RunningPool):
    """Counts what is asked."""

    def __init__(self, pool: DataPool) -> None:
        super().__init__(pool, "counted")
        self.asked: Counter[str] = Counter()

    def steps(self, channel: str, cursor: str, limit: int) -> dict[str, Any]:
        self.asked[cursor.partition("-")[0]] += 1
        return super().steps(channel, cursor, limit)


def sweep(follower: PoolFollower) -> None:
    for _ in follower.sweep():
        pass


def states(index: TrajectoryIndex) -> dict[str, str]:
    return {row.uid: row.state for row in index.page(TrajectoryQuery(limit=500)).rows}


def test_rows_say_what_the_trajectories_themselves_say() -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool:
        for group in range(5):
            submit(pool, group, ended=group != 4)
        index = TrajectoryIndex()
        sweep(PoolFollower(RunningPool(pool, "here"), index))
        assert len(index) == 10
        for row in index.page(TrajectoryQuery(limit=500)).rows:
            assert row == record_of(pool.trajectory(row.uid))
        assert index.page(TrajectoryQuery(tag="odd")).total == 4


def test_only_groups_that_changed_are_read_again() -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool:
        for group in range(4):
            submit(pool, group, ended=False)
        source, index = Counting(pool), TrajectoryIndex()
        follower = PoolFollower(source, index)
        sweep(follower)
        assert source.asked == {"0": 1}  # all four at once
        source.asked.clear()
        sweep(follower)
        assert not source.asked
        pool.reward("g2-0", 0.25)
        pool.reward("g0-0", 0.25)
        sweep(follower)
        assert source.asked == {"0": 1, "2": 1}
        found = index.get(DEFAULT_CHANNEL, "g2-0")
        assert found is not None
        assert found.reward == 0.25


def test_what_leaves_the_pool_is_kept_with_what_became_of_it() -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool:
        for group in range(3):
            submit(pool, group)
        index = TrajectoryIndex()
        follower = PoolFollower(RunningPool(pool, "here"), index)
        sweep(follower)
        batch = pool.fetch_batch(1, lease_s=60.0)
        assert batch is not None
        sweep(follower)
        assert Counter(states(index).values()) == {"queued": 4, "leased": 2}
        batch.ack()
        submit(pool, 3, ended=False)
        sweep(follower)
        pool.fail("g3-0", "it crashed")
        sweep(follower)
        assert {name: states(index)[name] for name in ("g0-0", "g0-1")} == {"g0-0": "consumed", "g0-1": "consumed"}
        assert (states(index)["g3-0"], states(index)["g3-1"]) == ("failed", "queued")
        assert follower.group_row(DEFAULT_CHANNEL, "g0") is None
        assert follower.group_row(DEFAULT_CHANNEL, "g1") is not None


def begin(pool: DataPool, uid: str, prompt: str) -> None:
    """A group of one trajectory, which is complete."""
    said: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2], "rollout_log_probs": [-0.5]}
    pool.submit_steps([Step(**said, trajectory_uid=uid, prompt_uid=prompt, is_last=True, reward=1.0)])


def test_two_groups_of_one_prompt_are_followed_each_by_itself() -> None:
    with DataPool() as pool:
        index = TrajectoryIndex()
        follower = PoolFollower(RunningPool(pool, "here"), index)
        begin(pool, "first", "p")
        sweep(follower)
        batch = pool.fetch_batch(1, lease_s=60.0)
        assert batch is not None
        begin(pool, "second", "p")
        sweep(follower)
        assert states(index) == {"first": "leased", "second": "queued"}
        batch.nack()
        batch = pool.fetch_batch(1, lease_s=60.0)
        assert batch is not None
        sweep(follower)  # which reads the first again, and not the second
        assert states(index) == {"first": "leased", "second": "queued"}
        batch.ack()
        sweep(follower)
        assert states(index) == {"first": "consumed", "second": "queued"}
        row = follower.group_row(DEFAULT_CHANNEL, "p")
        assert row is not None
        assert row["state"] == "ready"
        assert pool.fetch_batch(1) is not None
        sweep(follower)
        assert states(index) == {"first": "consumed", "second": "consumed"}
        assert follower.group_row(DEFAULT_CHANNEL, "p") is None


class Failing(RunningPool):
    """Fails to answer what is named in `fails`, once each."""

    def __init__(self, pool: DataPool, fails: set[str]) -> None:
        super().__init__(pool, "failing")
        self.fails = fails

    def _fail(self, name: str) -> None:
        if name in self.fails:
            self.fails.remove(name)
            raise PoolUnreachable(f"{name} cannot be asked for")

    def steps(self, channel: str, cursor: str, limit: int) -> dict[str, Any]:
        self._fail("steps")
        return super().steps(channel, cursor, limit)

    def states(self, channel: str, uids: list[str]) -> list[dict[str, Any]]:
        self._fail("states")
        return super().states(channel, uids)


def test_a_sweep_that_fails_loses_nothing_for_the_next() -> None:
    with DataPool() as pool:
        source, index = Failing(pool, set()), TrajectoryIndex()
        follower = PoolFollower(source, index)
        begin(pool, "known", "p")
        sweep(follower)
        begin(pool, "new", "q")
        source.fails = {"steps"}
        with pytest.raises(PoolUnreachable):
            sweep(follower)
        assert pool.fetch_batch(2) is not None  # both leave, and one of them was never read
        source.fails = {"states"}
        with pytest.raises(PoolUnreachable):
            sweep(follower)
        sweep(follower)
        assert states(index) == {"known": "consumed"}


def test_a_trajectory_that_left_its_group_is_asked_for_until_it_is_known_what_became_of_it() -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool:
        submit(pool, 0, ended=False)
        source, index = Failing(pool, {"states"}), TrajectoryIndex()
        follower = PoolFollower(source, index)
        sweep(follower)
        pool.fail("g0-0", "it crashed")
        with pytest.raises(PoolUnreachable):
            sweep(follower)
        sweep(follower)
        assert states(index) == {"g0-0": "failed", "g0-1": "queued"}


def test_a_journal_is_read_while_a_pool_writes_it_with_what_was_consumed(tmp_path: Path) -> None:
    with DataPool(tmp_path / "journal", defaults={"n_rollouts": 2}) as pool:
        for group in range(3):
            submit(pool, group)
        batch = pool.fetch_batch(1, lease_s=60.0)
        assert batch is not None
        batch.ack()
        source = JournalFolder(tmp_path / "journal", clock=lambda: 0.0)
        index = TrajectoryIndex()
        follower = PoolFollower(source, index)
        sweep(follower)
        assert Counter(states(index).values()) == {"queued": 4, "consumed": 2}
        submit(pool, 3)
        sweep(follower)
        assert len(index) == 8
        source.close()


def test_a_trajectory_of_a_journal_is_read_while_what_was_read_before_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export reads in another thread: it must not end because the journal grew, and was read again, meanwhile."""
    with DataPool(tmp_path / "journal") as pool:
        submit(pool, 0)
        source = JournalFolder(tmp_path / "journal", clock=lambda: 0.0)
        submit(pool, 1)
        close, found = JournalView.close, list[str]()

        def closing(view: JournalView) -> None:
            close(view)
            found.append(source.trajectory("train", "g0-0").uid)

        with monkeypatch.context() as patched:
            patched.setattr(JournalView, "close", closing)
            source.refresh()
        assert found == ["g0-0"]
        source.close()
