"""Random calls against plain lists: what is where, in what order, and every number recomputed from scratch."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.pool.scored.naive import Line, Posted, env_queue_size, lines, queued
from tests.pool.scored.naive import packs as naive_packs

from headrace.data.errors import InvalidInput
from headrace.pool.scored import exact_fill
from headrace.pool.scored.batching import Batching
from headrace.pool.scored.subset_sums import endless_sums

ENVS = 4


class Machine(RuleBasedStateMachine):
    @initialize(batch_size=st.sampled_from([4, 6, 8, 12]))
    def begin(self, batch_size: int) -> None:
        self.batching, self.batch_size = Batching(), batch_size
        self.numbers, self.entries = count(), count()
        self.group_sizes: dict[int, int] = {}
        self.weights: dict[int, float] = {}  # of the connected
        self.shares: dict[int, float] = {}  # of the connected
        self.groups: dict[int, Posted] = {}
        self.claims: dict[int, int | None] = {}  # in whose name a group was posted that nobody had then
        self.entered: dict[int, int] = {}  # a queued or handed-out group's place in line
        self.out: list[list[int]] = []
        self.ever_served: set[int] = set()

    def line(self) -> list[Posted]:
        out = {number for batch in self.out for number in batch}
        return [self.groups[n] for n in sorted(self.entered, key=self.entered.__getitem__) if n not in out]

    def enter(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            assert number not in self.entered
            self.entered[number] = next(self.entries)

    @rule(
        env=st.integers(0, ENVS - 1),
        group_size=st.sampled_from([1, 2, 3, 4, 8]),
        weight=st.sampled_from([0.0, 1.0, 2.5]),
        share=st.sampled_from([None, None, 0.25, 0.5, 0.9]),
    )
    def connect(self, env: int, group_size: int, weight: float, share: float | None) -> None:
        entered = self.batching.connect(
            env, group_size=group_size, max_token_length=7, weight=weight, min_allocation=share
        )
        if env not in self.group_sizes:
            mine = [number for number, claim in self.claims.items() if claim == env]
            self.groups |= {n: replace(self.groups[n], env=env) for n in mine if n in self.groups}
        self.group_sizes[env], self.weights[env], self.shares[env] = group_size, 7 * weight, share or 0.0
        assert sum(self.groups[number].size for number in entered) % group_size == 0
        self.enter(entered)

    @precondition(lambda self: self.weights)
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        env = data.draw(st.sampled_from(sorted(self.weights)))
        self.batching.disconnect(env)
        del self.weights[env], self.shares[env]

    @rule(env=st.integers(0, ENVS - 1), times=st.integers(1, 6))
    def add_of_its_size(self, env: int, times: int) -> None:
        for _ in range(times):
            self.add(env, self.group_sizes.get(env, 2))

    @rule(env=st.sampled_from([None, *range(ENVS)]), size=st.integers(1, 9))
    def add(self, env: int | None, size: int) -> None:
        number = next(self.numbers)
        known = env if env in self.group_sizes else None
        self.groups[number] = Posted(number, known, size)
        if known is None:
            self.claims[number] = env
        added = self.batching.add(number, env, size)
        if known is None or size == self.group_sizes[known]:
            assert (added.status, added.entered) == ("received", (number,))
        else:
            assert added.status == "buffered"
            assert sum(self.groups[n].size for n in added.entered) in (0, self.group_sizes[known])
            assert all(self.groups[n].env == known for n in added.entered)
        self.enter(added.entered)
        if added.status == "buffered":
            waiting = [g.size for g in self.groups.values() if g.env == known and g.number not in self.entered]
            assert added.buffer_size == sum(waiting)

    @rule()
    def take(self) -> None:
        line = self.line()
        batch = self.batching.take(self.batch_size)
        if batch is None:
            self.check_that_none_was_ready([group for group in line if group.size <= self.batch_size])
            return
        places = {group.number: at for at, group in enumerate(line)}
        assert set(batch) <= set(places), "only queued groups are served"
        assert len(set(batch)) == len(batch)
        assert not set(batch) & self.ever_served
        assert sum(self.groups[number].size for number in batch) == self.batch_size
        left = [group for group in line if group.number not in batch]
        for number in batch:
            group = self.groups[number]
            equals = [places[g.number] for g in left if (g.env, g.size) == (group.env, group.size)]
            assert all(places[number] < other for other in equals), "oldest first among equals"
        self.out.append(batch)

    def check_that_none_was_ready(self, line: list[Posted]) -> None:
        sizes = [group.size for group in line]
        stuck = sum(sizes) >= 2 * self.batch_size
        if exact_fill.packs_fit(sizes, self.batch_size) and not stuck:
            assert naive_packs(line, self.batch_size) is None
        else:
            assert self.batch_size not in {sum(chosen) for chosen in self.choices(sizes)}

    def choices(self, sizes: list[int]) -> set[tuple[int, ...]]:
        """Every choice of these sizes that fits a batch."""
        found: set[tuple[int, ...]] = {()}
        for size in sorted(sizes):
            found |= {(*chosen, size) for chosen in found if sum(chosen) + size <= self.batch_size}
        return found

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.batching.give_back(self.out.pop(data.draw(st.integers(0, len(self.out) - 1))))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        batch = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.ever_served.update(batch)
        self.forget(batch)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def drop_one(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.groups)))
        self.out = [[n for n in batch if n != number] for batch in self.out]
        self.forget([number])

    @rule()
    def bury_the_dead(self) -> None:
        dead = self.batching.dead_letters(self.batch_size)
        assert all(number in self.groups for number in dead)
        assert {g.number for g in self.line() if g.size > self.batch_size} <= set(dead)
        self.forget(list(dead))

    def forget(self, numbers: list[int]) -> None:
        self.batching.forget(numbers)
        for number in numbers:
            del self.groups[number]
            self.entered.pop(number, None)

    @rule()
    def restart(self) -> None:
        state = self.batching.state()
        again = Batching.restored(json.loads(json.dumps(state)))
        assert again.state() == state
        assert again.pick(self.batch_size) == self.batching.pick(self.batch_size)
        self.batching = again

    @invariant()
    def the_queue_stands_in_order(self) -> None:
        numbers = [number for _, number, *_ in self.batching.state()["queued"]]
        assert numbers == [group.number for group in self.line()]
        assert len(self.batching) == len(numbers)

    @invariant()
    def the_numbers_are_those_of_a_recount(self) -> None:
        line, total = self.line(), sum(self.weights.values())
        minimums = {env: int(self.batch_size * share) for env, share in self.shares.items()}
        for env, group_size in self.group_sizes.items():
            status = self.batching.status(env, self.batch_size)
            assert status.max_group_size == max((group.size for group in line), default=1)
            assert status.self_queue_size == sum(g.size for g in line if g.env == env) // group_size
            assert status.queue_size == env_queue_size(line, env, group_size, minimums)
            assert status.unallocated_fraction == pytest.approx(1 - min(1, sum(self.shares.values())))
            if env in self.weights:
                assert status.env_weight == pytest.approx(max(0.01, self.weights[env] / total if total else 0))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40)


@given(lines([1, 2, 3, 4, 5, 6], longest=8), st.sampled_from([6, 8, 12]), st.sampled_from([2, 3, 4, 6]))
@settings(max_examples=50)
def test_while_data_keeps_coming_no_group_that_could_be_served_is_left(line: Line, batch_size: int, size: int) -> None:
    batching, numbers = queued(line), count(len(line))
    for _ in range(20 * len(line) + 20):
        batching.connect(9, group_size=size, max_token_length=1)
        for _ in range(batch_size):
            batching.add(next(numbers), 9, size)
        while (batch := batching.take(batch_size)) is not None:
            batching.forget(batch)
            if len(batching) <= batch_size:
                break
    left = [size for _, number, _, size, _ in batching.state()["queued"] if number < len(line)]
    for at, old in enumerate(left):
        others, reached = left[:at] + left[at + 1 :], endless_sums([size], batch_size)
        for other in others:
            reached |= reached << other
        assert not reached >> (batch_size - old) & 1, f"{old} could be served with {others} and groups of {size}"


def test_a_batch_given_back_is_the_next_batch_again() -> None:
    batching = queued([(0, 2), (1, 4), (0, 2), (1, 4), (1, 4)])
    first, second = batching.take(8), batching.take(4)
    assert first is not None
    assert second is not None
    batching.give_back(second)
    batching.give_back(first)
    assert [batching.take(8), batching.take(4)] == [first, second]


def test_what_was_delivered_cannot_be_given_back() -> None:
    batching = queued([(0, 4)])
    batching.forget(batching.take(4) or [])
    with pytest.raises(InvalidInput, match=r"groups \[0\] are not here"):
        batching.give_back([0])


def test_what_was_not_handed_out_cannot_be_given_back() -> None:
    with pytest.raises(InvalidInput, match=r"groups \[0\] were not handed out"):
        queued([(0, 4)]).give_back([0])


def test_what_is_out_or_buffered_cannot_be_handed_out() -> None:
    batching = queued([(0, 4)])
    batching.add(1, 0, 3)
    batching.take(4)
    with pytest.raises(InvalidInput, match=r"groups \[0, 1\] are not queued"):
        batching.hand_out([0, 1])
