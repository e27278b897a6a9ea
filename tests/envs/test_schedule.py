"""The schedule's rules, as they are stated in words, over all kinds of states."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headrace.envs.schedule import (
    EnvLoad,
    Rules,
    Status,
    crossed,
    finished,
    held,
    may_start,
    workers,
)
from headrace.envs.types import EvalHandlingEnum

sizes = st.integers(1, 64)
counts = st.integers(0, 500)
rules = st.builds(
    Rules,
    group_size=sizes,
    batch_size=sizes,
    max_batches_offpolicy=st.integers(1, 8),
    total_steps=counts,
    max_workers=st.integers(0, 64),
    eval_handling=st.sampled_from(EvalHandlingEnum),
    eval_limit_ratio=st.floats(0, 1),
)
statuses = st.builds(Status, current_step=counts, queue_size=counts, self_queue_size=counts)
loads = st.builds(EnvLoad, running=counts, coming=counts, evaluating=st.booleans())


@given(rules, statuses, loads)
def test_work_is_held_while_more_sequences_wait_than_the_batches_allowed(
    rules: Rules, status: Status, load: EnvLoad
) -> None:
    sequences = (status.queue_size + load.coming) * rules.group_size
    assert held(rules, status, load) == (sequences > rules.max_batches_offpolicy * rules.batch_size)


@given(rules, statuses, loads)
def test_what_is_started_one_by_one_passes_the_threshold_by_less_than_a_group_and_one(
    rules: Rules, status: Status, load: EnvLoad
) -> None:
    before = load
    while may_start(rules, status, load):
        load = replace(load, running=load.running + 1, coming=load.coming + 1)
    if load != before:
        sequences = (status.queue_size + load.coming - 1) * rules.group_size
        assert sequences <= rules.max_batches_offpolicy * rules.batch_size
        assert load.running <= rules.max_workers


@given(rules, statuses, loads, counts)
def test_less_in_the_queue_never_holds_what_more_did_not(
    rules: Rules, status: Status, load: EnvLoad, less: int
) -> None:
    shorter = Status(current_step=status.current_step, queue_size=max(0, status.queue_size - less))
    assert not (held(rules, shorter, load) and not held(rules, status, load))


@given(rules, statuses, loads, st.floats(0.01, 1))
def test_a_minimum_allocation_is_filled_whatever_others_have_queued(
    rules: Rules, status: Status, load: EnvLoad, share: float
) -> None:
    ours = replace(rules, min_batch_allocation=share)
    sequences = (status.self_queue_size + load.coming) * rules.group_size
    filled = sequences > share * rules.max_batches_offpolicy * rules.batch_size
    assert held(ours, status, load) == (held(rules, status, load) and filled)


@given(rules, statuses, loads)
def test_nothing_starts_before_the_batch_size_is_known(rules: Rules, status: Status, load: EnvLoad) -> None:
    assert held(replace(rules, batch_size=-1), status, load)


@given(rules)
def test_an_evaluation_stops_limits_or_leaves_the_workers_as_its_mode_says(rules: Rules) -> None:
    allowed = {
        EvalHandlingEnum.STOP_TRAIN: 0,
        EvalHandlingEnum.LIMIT_TRAIN: int(rules.max_workers * rules.eval_limit_ratio),
        EvalHandlingEnum.NONE: rules.max_workers,
    }
    assert workers(rules, evaluating=True) == allowed[rules.eval_handling]
    assert workers(rules, evaluating=False) == rules.max_workers


@given(rules, statuses)
def test_the_end_is_when_steps_taken_and_batches_waiting_are_more_than_all_steps(rules: Rules, status: Status) -> None:
    batches = status.queue_size * rules.group_size // rules.batch_size
    assert finished(rules, status) == (status.current_step + batches > rules.total_steps)


@given(counts, counts, st.integers(1, 50))
def test_every_multiple_between_two_steps_is_crossed(before: int, more: int, every: int) -> None:
    passed = [step for step in range(before + 1, before + more + 1) if step % every == 0]
    assert crossed(before, before + more, every) == (passed[-1] if passed else None)
    assert crossed(before, before + more, 0) is None


@given(rules, statuses)
def test_an_environment_is_done_once_the_trainer_is(rules: Rules, status: Status) -> None:
    assert finished(rules, msgspec.structs.replace(status, ended_at=status.current_step))
