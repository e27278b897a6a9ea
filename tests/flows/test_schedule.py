"""Which rollout begins next: the bound of staleness, retries, validation, and a state that outlives its process."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.flows.simulation import Simulation

from headrace.data.errors import InvalidInput
from headrace.flows.schedule import RolloutSchedule
from headrace.flows.schedule_state import LostGroup, RolloutRules, RolloutStart, ScheduleState


def rules(**changes: object) -> RolloutRules:
    given: dict[str, object] = {"rows": 12, "n_rollouts": 2, "batch_size": 2, "max_staleness": 1, "concurrency": 8}
    return RolloutRules(**(given | changes))  # type: ignore[arg-type]


def fresh(using: RolloutRules, version: int = 0) -> RolloutSchedule:
    schedule = RolloutSchedule(using, ScheduleState("r", using.rows, using.val_rows))
    schedule.version_is(version)
    return schedule


def random_rules(seed: int, **changes: object) -> RolloutRules:
    draw = random.Random(seed)
    batch = draw.randint(1, 4)
    return rules(
        rows=batch * draw.randint(2, 8),
        batch_size=batch,
        n_rollouts=draw.randint(1, 3),
        max_staleness=draw.randint(0, 3),
        concurrency=draw.randint(1, 24),
        **changes,
    )


# -- staleness ---------------------------------------------------------------------------------------------------------


def test_staleness_never_exceeds_its_bound_under_random_delays() -> None:
    reached = 0
    for seed in range(2000):
        run = Simulation(random_rules(seed), seed, failing=0.1 if seed % 3 == 0 else 0.0).run()
        assert max(run.staleness, default=0) <= run.rules.max_staleness, seed
        reached += max(run.staleness, default=0) == run.rules.max_staleness > 0
        assert run.most_running <= run.rules.concurrency
    assert reached > 700  # the bound is used, and not merely kept


def test_nor_where_rewards_come_late() -> None:
    for seed in range(500):
        run = Simulation(random_rules(seed, scored=True), seed).run()
        assert max(run.staleness) <= run.rules.max_staleness, seed


def test_nor_where_the_pool_drops_groups_and_each_is_replaced() -> None:
    dropped = 0
    for seed in range(400):
        using = random_rules(seed, steps=1 + seed % 9, until_trained=True, scored=bool(seed % 2))
        run = Simulation(using, seed, failing=0.05, drops=0.1, kills=0.02 if seed % 5 == 0 else 0.0).run()
        assert max(run.staleness) <= run.rules.max_staleness, seed
        assert len(run.staleness) == run.rules.groups == run.schedule.state.accepted, seed  # every step has its batch
        dropped += len(run.dropped)
    assert dropped > 400


def test_a_schedule_that_never_learned_of_drops_would_wait_for_ever() -> None:
    class Deaf(RolloutSchedule):
        def dropped(self, number: int, reason: str) -> None:
            pass

    with pytest.raises(AssertionError, match="it never ended"):
        Simulation(rules(steps=8, max_staleness=0, until_trained=True), 1, drops=0.2, kind=Deaf).run()


def test_todays_version_alone_would_not_hold_the_bound() -> None:
    class Plain(RolloutSchedule):
        @property
        def capacity(self) -> int:
            ahead = self.rules.max_staleness + self.state.version + 1
            return ahead * self.rules.batch_size - self.state.accepted - self._open_train

    broken = 0
    for seed in range(200):
        run = Simulation(random_rules(seed), seed, kind=Plain).run()
        broken += max(run.staleness) > run.rules.max_staleness
    assert broken > 20


def test_a_trainers_death_costs_no_more_than_the_batches_in_its_hands() -> None:
    """One that it learns from and one ahead of that: for each it may be a version more. Were the versions that it spent
    on what it has to learn from again taken for used groups, it would be all since its checkpoint, for ever."""

    class Forgetful(RolloutSchedule):
        def waiting_is(self, groups: int) -> None:
            pass

    def over(kind: type[RolloutSchedule]) -> list[int]:
        runs = []
        for seed in range(30):
            using = random_rules(seed, steps=40)
            runs.append(Simulation(using, seed, crashes=0.004, checkpoint_every=1 + seed % 7, kind=kind).run())
        return [max(run.staleness_since, default=0) - run.rules.max_staleness for run in runs]

    assert sum(found > 2 for found in over(RolloutSchedule)) <= 2  # where it died again before the rollouter looked
    assert sum(found > 2 for found in over(Forgetful)) > 10


def test_every_prompt_is_trained_on_once_where_nothing_fails() -> None:
    for seed in range(200):
        run = Simulation(random_rules(seed, shuffle=bool(seed % 2)), seed).run()
        assert len(run.staleness) == run.rules.rows
        assert set(run.played().values()) == {1}
        assert len(run.played()) == run.rules.rows * run.rules.n_rollouts


def test_versions_are_counted_from_the_first_one() -> None:
    schedule = fresh(rules(), version=40)
    assert schedule.capacity == 4
    schedule.version_is(41)
    assert schedule.capacity == 6


def test_capacity_is_that_of_the_oldest_group_that_runs() -> None:
    schedule = fresh(rules(rows=100, n_rollouts=1, concurrency=100))
    slow, *quick = schedule.next(0.0)
    for start in quick:
        schedule.accepted(start)
    schedule.version_is(5)
    assert schedule.capacity == 0
    schedule.accepted(slow)
    assert schedule.capacity == (1 + 5 + 1) * 2 - 4


# -- killed ------------------------------------------------------------------------------------------------------------


def test_a_killed_schedule_goes_on_and_plays_every_rollout_once() -> None:
    kills = 0
    for seed in range(300):
        run = Simulation(random_rules(seed, scored=bool(seed % 2)), seed, failing=0.05, kills=0.05).run()
        played = run.played()
        assert set(played.values()) == {1}, seed
        state = run.schedule.state
        assert state.accepted * run.rules.n_rollouts == len(played), seed
        assert max(run.staleness, default=0) <= run.rules.max_staleness, seed
        kills += run._life
    assert kills > 300


def test_a_state_of_other_data_is_refused() -> None:
    with pytest.raises(InvalidInput, match="of data with 5 rows, and there are 12 now"):
        RolloutSchedule(rules(), ScheduleState("r", 5))


# -- retries -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=200), st.integers(0, 3))
def test_each_rollout_has_its_own_retries_and_no_attempt_is_played_twice(
    ends: list[tuple[int, bool]], retries: int
) -> None:
    schedule = fresh(rules(rows=6, retries=retries, max_failed_groups=99))
    now, running, failures = 0.0, list[RolloutStart](), dict[tuple[int, int], int]()
    seen = set[str]()
    for which, fails in ends:
        now += 1000.0
        for start in schedule.next(now):
            assert start.trajectory_uid not in seen
            seen.add(start.trajectory_uid)
            running.append(start)
        if not running:
            break
        start = running.pop(which % len(running))
        key = start.group, start.rollout
        assert start.attempt == failures.get(key, 0) <= retries
        if not fails:
            schedule.accepted(start)
            continue
        failures[key] = failures.get(key, 0) + 1
        lost = schedule.failed(start, "crashed", now)
        assert (lost is not None) == (failures[key] > retries)
        for other in lost.running if lost is not None else ():
            running.remove(other)
            schedule.failed(other, "group", now, charged=False)
        assert schedule.running == len(running) <= 8


def test_a_retry_waits_a_while_and_goes_before_younger_groups() -> None:
    schedule = fresh(rules(concurrency=2, n_rollouts=1, retry_s=1.0))
    first, second = schedule.next(0.0)
    schedule.failed(first, "hung", 10.0)
    assert schedule.wakes_at == 11.0
    [third] = schedule.next(10.5)
    schedule.accepted(second)
    schedule.accepted(third)
    again, fourth = schedule.next(11.0)
    assert (again.prompt_uid, again.attempt) == (first.prompt_uid, 1)
    assert again.trajectory_uid != first.trajectory_uid
    schedule.failed(again, "hung", 12.0)
    assert schedule.wakes_at == 14.0  # twice as long
    assert fourth.group == 3


def test_what_was_not_the_agents_doing_is_not_charged() -> None:
    schedule = fresh(rules(concurrency=1, n_rollouts=1, retries=0))
    for attempt in range(10):
        [start] = schedule.next(0.0)
        assert start.attempt == attempt
        assert schedule.failed(start, "gateway", 0.0, charged=False) is None
    schedule.accepted(schedule.next(0.0)[0])
    assert schedule.state.accepted == 1


def test_a_group_that_fails_for_good_is_replaced() -> None:
    schedule = fresh(rules(concurrency=2, retries=0, rows=3, batch_size=1, max_staleness=0, steps=1))
    one, other = schedule.next(0.0)
    schedule.accepted(one)
    assert schedule.failed(other, "crashed", 0.0) == LostGroup(running=[], complete=[one])
    replaced = schedule.next(0.0)
    assert {start.row for start in replaced} == {1}
    for start in replaced:
        schedule.accepted(start)
    assert schedule.finished
    assert (schedule.state.accepted, schedule.state.lost) == (1, 1)


def test_or_counts_with_what_is_complete_of_it() -> None:
    schedule = fresh(rules(concurrency=2, retries=0, rows=1, batch_size=1, failed_groups="partial"))
    one, other = schedule.next(0.0)
    assert schedule.failed(other, "crashed", 0.0) is None
    assert not schedule.finished
    schedule.accepted(one)
    assert schedule.finished
    assert schedule.state.accepted == 1


def test_an_agent_that_always_fails_is_given_up() -> None:
    schedule = fresh(rules(n_rollouts=1, retries=0, max_failed_groups=3, concurrency=1))
    for _ in range(3):
        assert not schedule.hopeless
        schedule.failed(schedule.next(0.0)[0], "exit_code", 0.0)
    assert schedule.hopeless


def test_a_trajectory_whose_reward_failed_is_played_again() -> None:
    schedule = fresh(rules(scored=True, rows=1, batch_size=1, retry_s=0.0))
    for start in schedule.next(0.0):
        schedule.accepted(start)
    [(number, (one, other))] = schedule.awaits_scores().items()
    schedule.failed(one, "reward", 0.0)
    assert schedule.awaits_scores() == {}
    [again] = schedule.next(0.0)
    assert (again.rollout, again.attempt) == (one.rollout, 1)
    schedule.accepted(again)
    schedule.scored(number)
    assert schedule.finished
    assert other.attempt == 0


def test_a_group_that_the_pool_dropped_counts_no_longer() -> None:
    schedule = fresh(rules(rows=9, batch_size=1, max_staleness=0, steps=2, n_rollouts=2))
    for start in schedule.next(0.0):
        schedule.accepted(start)
    [(number, held)] = schedule.in_pool().items()
    assert [start.trajectory_uid for start in held] == ["r-train-0-0-0-0", "r-train-0-0-1-0"]
    assert schedule.next(0.0) == []
    schedule.dropped(number, "stale")
    state = schedule.state
    assert (state.accepted, state.rollouts, state.dropped, schedule.changed) == (0, 0, {"stale": 1}, True)
    assert {start.row for start in schedule.next(0.0)} == {1}
    schedule.dropped(number, "stale")  # it is known
    assert state.dropped == {"stale": 1}


def test_a_group_that_was_used_is_asked_for_no_more() -> None:
    schedule = fresh(rules(rows=9, batch_size=1, max_staleness=0, steps=1, n_rollouts=1, until_trained=True))
    for start in schedule.next(0.0):
        schedule.accepted(start)
    assert not schedule.finished
    schedule.taken(0)
    assert schedule.in_pool() == {}
    assert schedule.finished


# -- validation --------------------------------------------------------------------------------------------------------


def test_validation_comes_with_the_first_version_and_every_so_many() -> None:
    schedule = fresh(rules(val_rows=2, validate_every=2, steps=4, rows=3, concurrency=100), version=10)
    rounds = []
    for version in range(10, 15):
        schedule.version_is(version)
        starts = schedule.next(0.0)
        rounds.append([start.prompt_uid for start in starts if start.channel == "val"])
        assert [start.channel for start in starts] == sorted((start.channel for start in starts), reverse=True)
        for start in starts:
            schedule.accepted(start)
    assert rounds == [["r-val-10-0", "r-val-10-1"], [], ["r-val-12-0", "r-val-12-1"], [], ["r-val-14-0", "r-val-14-1"]]
    assert schedule.finished
    assert schedule.state.validated == [10, 12, 14]


def test_validation_waits_for_no_capacity_and_takes_none() -> None:
    schedule = fresh(rules(val_rows=3, validate_every=1, batch_size=1, max_staleness=0, n_rollouts=1, concurrency=100))
    starts = schedule.next(0.0)
    assert [start.channel for start in starts] == ["val"] * 3 + ["train"]


def test_a_round_under_way_is_not_begun_again() -> None:
    schedule = fresh(rules(val_rows=1, validate_every=1, concurrency=1))
    [val] = schedule.next(0.0)
    schedule.version_is(3)
    assert schedule.next(0.0) == []
    schedule.accepted(val)
    [next_val] = schedule.next(0.0)
    assert next_val.prompt_uid == "r-val-3-0"


def test_rounds_end_where_rows_fail_for_good() -> None:
    schedule = fresh(rules(val_rows=1, validate_every=1, retries=0, concurrency=1))
    schedule.failed(schedule.next(0.0)[0], "crashed", 0.0)
    assert schedule.state.validated == [0]
    assert schedule.next(0.0)[0].channel == "train"


def test_without_rows_to_learn_from_only_the_validation_is_played() -> None:
    schedule = fresh(rules(rows=0, val_rows=2, validate_every=100, concurrency=100))
    for start in schedule.next(0.0):
        assert start.channel == "val"
        schedule.accepted(start)
    schedule.version_is(50)
    assert schedule.finished
    assert schedule.state.validated == [0]


# -- data --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 30), st.integers(1, 3), st.booleans(), st.integers(0, 3))
def test_each_pass_plays_every_row_once(rows: int, epochs: int, shuffle: bool, seed: int) -> None:
    schedule = fresh(
        rules(rows=rows, epochs=epochs, shuffle=shuffle, seed=seed, n_rollouts=1, max_staleness=999, concurrency=999)
    )
    starts = schedule.next(0.0)
    found = [start.row for start in starts]
    for epoch in range(epochs):
        assert sorted(found[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    assert len({start.prompt_uid for start in starts}) == len(starts) == rows * epochs


def test_steps_take_as_many_passes_as_they_need() -> None:
    schedule = fresh(rules(rows=2, batch_size=3, steps=2, max_staleness=5, n_rollouts=1, concurrency=100))
    assert len(schedule.next(0.0)) == 6


def test_nothing_begins_while_it_is_held_or_the_version_is_unknown() -> None:
    using = rules()
    schedule = RolloutSchedule(using, ScheduleState("r", using.rows))
    assert schedule.next(0.0) == []
    schedule.version_is(0)
    schedule.held = True
    assert schedule.next(0.0) == []
    schedule.held = False
    assert schedule.next(0.0)


def test_the_state_survives_its_encoding() -> None:
    schedule = fresh(rules(val_rows=1, validate_every=1))
    started = schedule.next(0.0)
    schedule.failed(started[1], "hung", 0.0)
    state = msgspec.json.decode(msgspec.json.encode(schedule.state), type=ScheduleState)
    assert state == schedule.state


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rows": 0}, "there are no rows to play"),
        ({"concurrency": 0}, "concurrency is 0; it must be at least 1"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"steps": 0}, "steps is 0"),
        ({"validate_every": 1}, "no rows to validate on"),
    ],
)
def test_rules_that_could_not_work_are_refused(wrong: dict[str, int], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        rules(**wrong)
