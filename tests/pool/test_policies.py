"""The policies against plain lists: for any channel, which groups a batch takes and which must go."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pool.journal.kit import check_rules, dump
from tests.pool.kit import step, trajectory

from headrace import Step
from headrace.data import HeadraceError
from headrace.pool import policies
from headrace.pool.apply import apply
from headrace.pool.config import ChannelConfig, Limits
from headrace.pool.errors import PoolFull
from headrace.pool.operation import Change, MustWait
from headrace.pool.operations.consume import ExtendLease, FetchBatch, NackLease
from headrace.pool.operations.control import ForgetTrajectory, SetVersion, ShutDown, configure, curate
from headrace.pool.operations.produce import MarkComplete, OpenTrajectory
from headrace.pool.operations.score import SetReward
from headrace.pool.operations.submit import submit_steps
from headrace.pool.state import State


@dataclass
class Planned:
    """A channel driven by hand: plans are made at a given time, and applied."""

    config: dict[str, Any]
    now: float = 0.0
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.state = State(ChannelConfig(**self.config), Limits())

    @property
    def channel(self) -> Any:
        return self.state.channel("train")

    def run(self, operation: Change[Any]) -> Any:
        plan = operation.plan(self.state, self.now)
        apply(self.state, plan.facts, plan.block)
        return plan.after() if plan.after is not None else plan.reply

    def submit(self, steps: list[Step]) -> None:
        self.run(submit_steps(steps))

    def fetch(self, size: int, **options: Any) -> Any:
        return self.run(FetchBatch(size, **options))

    def settle(self) -> list[Any]:
        """The facts that are due, each applied before the next is asked for."""
        found = []
        for fact in policies.due(self.channel, self.now):
            found.append(fact)
            apply(self.state, [fact], None)
        self.state.sweep()
        return found


@dataclass
class Made:
    """One group as a plain value: how many of its trajectories are complete, how many are not, and its version."""

    complete: int
    open: int
    version: int

    def steps(self, name: str) -> list[Step]:
        done = [
            one for i in range(self.complete) for one in trajectory(f"{name}/{i}", 1, name, policy_version=self.version)
        ]
        return done + [step(f"{name}/open{i}", 0, name, policy_version=self.version) for i in range(self.open)]


GROUPS = st.lists(st.builds(Made, st.integers(0, 3), st.integers(0, 1), st.integers(0, 4)), max_size=8).map(
    lambda made: [one for one in made if one.complete + one.open]
)


def filled(groups: list[Made], **config: Any) -> Planned:
    planned = Planned(config)
    for at, made in enumerate(groups):
        planned.submit(made.steps(f"g{at}"))
    return planned


# -- order ------------------------------------------------------------------------------------------------------------


@given(
    groups=GROUPS,
    need=st.integers(1, 3),
    lowered=st.none() | st.integers(1, 4),
    size=st.integers(1, 6),
    newest=st.booleans(),
)
def test_a_batch_takes_the_oldest_or_the_newest_that_are_ready(
    groups: list[Made], need: int, lowered: int | None, size: int, newest: bool
) -> None:
    planned = filled(groups, n_rollouts=need)
    wanted = min(need, lowered) if lowered is not None else need
    ready = [at for at, made in enumerate(groups) if made.complete >= wanted]
    expected = ready[::-1][:size] if newest else ready[:size]
    assert policies.pick(planned.channel, size, lowered, "latest" if newest else "fifo") == (expected, [])
    assert list(policies.ready_groups(planned.channel, lowered)) == ready


@given(groups=GROUPS, need=st.integers(1, 3), data=st.data())
def test_a_group_that_was_out_and_came_back_stands_where_it_stood(
    groups: list[Made], need: int, data: st.DataObject
) -> None:
    planned = filled(groups, n_rollouts=need)
    ready = [at for at, made in enumerate(groups) if made.complete >= need]
    for _ in range(data.draw(st.integers(0, 3))):
        size = data.draw(st.integers(1, max(1, len(ready))))
        if size <= len(ready):
            lease = planned.fetch(size, lease_s=5, order=data.draw(st.sampled_from(["fifo", "latest"]))).lease
            planned.run(NackLease(lease))
    assert policies.pick(planned.channel, 100, None, "fifo") == (ready, [])


@given(complete=st.integers(0, 5), unfinished=st.integers(0, 3), need=st.integers(1, 4))
def test_surplus_is_what_is_not_complete_and_what_is_beyond_the_need(complete: int, unfinished: int, need: int) -> None:
    made = Made(complete, unfinished, 0)
    if not complete + unfinished:
        return
    planned = filled([made], n_rollouts=need)
    left = set(policies.surplus(planned.channel, planned.channel.groups[0]))
    kept = {f"g0/{i}" for i in range(min(complete, need))}
    assert left == {one.trajectory_uid for one in made.steps("g0")} - kept


@given(
    history=st.lists(st.integers(0, 4), max_size=6),
    fresh=st.integers(0, 6),
    size=st.integers(1, 8),
    share=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
    limit=st.none() | st.integers(0, 4),
)
def test_a_mixed_batch_has_at_most_its_share_of_replays_the_least_used_first(
    history: list[int], fresh: int, size: int, share: float, limit: int | None
) -> None:
    planned = filled([Made(1, 0, version) for version in history], history_size=10, replay_share=share)
    if history:
        planned.fetch(len(history))
    for at in range(fresh):
        planned.submit(trajectory(f"fresh{at}", 1, policy_version=4))
    planned.run(SetVersion(4))
    taken, replayed = policies.pick(planned.channel, size, None, "mixed", limit)
    usable = [at for at, version in enumerate(history) if limit is None or version >= 4 - limit]
    assert len(replayed) == min(int(size * share), len(usable))
    assert replayed == usable[::-1][: len(replayed)]
    assert taken == list(range(len(history), len(history) + min(fresh, size - len(replayed))))


# -- what must go -----------------------------------------------------------------------------------------------------


@given(groups=GROUPS, most=st.integers(1, 5), leased=st.integers(0, 3))
def test_a_channel_holds_so_many_groups_and_the_oldest_that_are_not_out_make_room(
    groups: list[Made], most: int, leased: int
) -> None:
    planned = filled(groups, max_queue_size=100)
    ready = [at for at, made in enumerate(groups) if made.complete]
    out = ready[: min(leased, len(ready))]
    if out:
        planned.fetch(len(out), lease_s=100)
    planned.run(configure(max_queue_size=most))
    dropped = [seq for fact in planned.settle() for seq in fact.groups]
    waiting = [at for at in range(len(groups)) if at not in out]
    assert dropped == waiting[: max(0, len(groups) - most)]
    assert len(planned.channel.groups) <= max(most, len(out))
    check_rules(planned.state)


@given(groups=GROUPS, most=st.integers(1, 4))
def test_a_channel_that_rejects_is_never_over_its_size_and_drops_nothing(groups: list[Made], most: int) -> None:
    planned = Planned({"max_queue_size": most, "overflow": "reject"})
    for at, made in enumerate(groups):
        if at < most:
            planned.submit(made.steps(f"g{at}"))
        else:
            with pytest.raises(PoolFull):
                planned.submit(made.steps(f"g{at}"))
        assert planned.settle() == []
    assert sorted(planned.channel.groups) == list(range(min(most, len(groups))))


@given(groups=GROUPS, version=st.integers(0, 8), limit=st.integers(0, 4))
def test_exactly_the_groups_whose_oldest_step_is_too_old_are_stale(
    groups: list[Made], version: int, limit: int
) -> None:
    planned = filled(groups, max_staleness=limit)
    planned.run(SetVersion(version))
    dropped = [seq for fact in planned.settle() for seq in fact.groups]
    assert dropped == [at for at, made in enumerate(groups) if made.version < version - limit]
    assert planned.settle() == []


@given(
    groups=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 30)), min_size=1, max_size=6),
    partial=st.booleans(),
    now=st.integers(30, 60),
)
def test_exactly_the_incomplete_groups_without_news_time_out(
    groups: list[tuple[int, int, int]], partial: bool, now: int
) -> None:
    planned = Planned({"n_rollouts": 2, "group_timeout_s": 20.0, "on_timeout": "partial" if partial else "drop"})
    made = []
    for complete, unfinished, at in sorted(groups, key=lambda one: one[2]):
        if complete + unfinished:
            planned.now = float(at)
            planned.submit(Made(complete, unfinished, 0).steps(f"g{len(made)}"))
            made.append((complete, at))
    planned.now = float(now)
    facts = planned.settle()
    overdue = [seq for seq, (complete, at) in enumerate(made) if complete < 2 and at + 20 <= now]
    trimmed = [seq for seq in overdue if partial and made[seq][0]]
    assert sorted(seq for fact in facts if type(fact).__name__ == "Trimmed" for seq in fact.groups) == trimmed
    assert sorted(seq for fact in facts if type(fact).__name__ == "Dropped" for seq in fact.groups) == [
        seq for seq in overdue if seq not in trimmed
    ]
    check_rules(planned.state)


@given(
    leases=st.lists(st.tuples(st.integers(1, 20), st.none() | st.integers(1, 20)), max_size=6), now=st.integers(0, 30)
)
def test_exactly_the_leases_whose_last_deadline_passed_come_back(
    leases: list[tuple[int, int | None]], now: int
) -> None:
    planned = filled([Made(1, 0, 0) for _ in leases])
    deadlines = {}
    for seconds, extended in leases:
        lease = planned.fetch(1, lease_s=seconds).lease
        if extended is not None:
            planned.run(ExtendLease(lease, extended))
        deadlines[lease] = extended or seconds
    planned.now = float(now)
    assert sorted(fact.lease for fact in planned.settle()) == sorted(k for k, at in deadlines.items() if at <= now)
    check_rules(planned.state)
    left = [at for at in deadlines.values() if at > now]
    if left:
        assert planned.channel.deadline() <= min(left), "who waits would sleep past it"


@given(groups=GROUPS)
def test_nothing_is_due_where_nothing_was_asked_for(groups: list[Made]) -> None:
    planned = filled(groups)
    planned.now = 1e9
    assert policies.next_due(planned.channel, planned.now) is None
    assert planned.channel.deadline() is None


# -- plans are only plans ---------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(groups=GROUPS, again=st.lists(st.integers(0, 20), max_size=5), data=st.data())
def test_making_a_plan_changes_nothing(groups: list[Made], again: list[int], data: st.DataObject) -> None:
    planned = filled(groups, n_rollouts=2, history_size=3)
    known = [one for at, made in enumerate(groups) for one in made.steps(f"g{at}")]
    if any(made.complete >= 2 for made in groups):
        planned.fetch(1, lease_s=10)
    before = dump(planned.state)
    steps = [known[at % len(known)] for at in again if known]
    steps += [step("new", 1), step("new", 0), step("g0/0", 3, "g0"), step("g0/0", 1, "g0", last=True)]
    operations: tuple[Change[Any], ...] = (
        submit_steps(data.draw(st.permutations(steps))),
        FetchBatch(1, n_rollouts=1, lease_s=5),
        FetchBatch(1, order="latest", unit="step"),
        FetchBatch(2, order="mixed", max_staleness=0),
        OpenTrajectory("g0/0", "other", metadata={"a": 1}, n_rollouts=2),
        SetReward("g0/0", 1.0),
        MarkComplete("g0/open0", 1.0),
        SetVersion(9),
        ShutDown(),
        curate("g0/0", 0, trainable=False),
        ForgetTrajectory("g0/0"),
        NackLease("train-0"),
    )
    for operation in operations:
        with suppress(MustWait, HeadraceError):  # a refusal must change nothing either
            operation.plan(planned.state, planned.now)
        assert dump(planned.state) == before
