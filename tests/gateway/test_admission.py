"""Which calls are taken, by what is under way: whatever comes, in whichever order."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.admission import (
    BODY_FACTOR,
    CALL_BYTES,
    LOOK_S,
    MAX_BEHIND_S,
    MIN_QUEUE_CALLS,
    SCARCE_STALL_S,
    STALLED_BYTES,
    Admission,
    AdmittedCall,
)
from headrace.gateway.errors import Refusal


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def bounds(calls: int = 4, size: int = 10 * CALL_BYTES, clock: Clock | None = None) -> tuple[Admission, Counter[str]]:
    refused: Counter[str] = Counter()
    found = Admission(
        max_calls=calls, max_bytes=size, refused=lambda why: refused.update([why]), clock=clock or Clock()
    )
    return found, refused


EVENTS = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "body", "answer"]), st.integers(0, CALL_BYTES)), max_size=60
)


@given(EVENTS)
@settings(deadline=None)
def test_whatever_comes_only_answers_go_over_the_bound_and_the_end_leaves_nothing(
    events: list[tuple[str, int]],
) -> None:
    admission, _ = bounds()
    refusals: list[tuple[int, float | None]] = []
    with ExitStack() as stack:
        running: list[tuple[ExitStack, AdmittedCall]] = []
        for what, size in events:
            before = admission.bytes
            try:
                if what == "begin":
                    own = stack.enter_context(ExitStack())
                    running.append((own, own.enter_context(admission.call())))
                elif running and what == "end":
                    running.pop(size % len(running))[0].close()
                elif running and what == "body":
                    running[size % len(running)][1].body(size)
                elif running:
                    running[size % len(running)][1].answer(size)
            except Refusal as refusal:
                refusals.append((refusal.status, refusal.retry_after))
                assert admission.bytes == before
            assert admission.calls == len(running) <= admission.max_calls
            if what != "answer":
                assert admission.bytes <= max(before, admission.max_bytes)
    assert (admission.calls, admission.bytes) == (0, 0)
    assert set(refusals) <= {(503, 1), (413, None)}


def test_each_bound_says_which_it_is() -> None:
    admission, refused = bounds(calls=2)
    with admission.call() as first, admission.call() as second:
        with pytest.raises(Refusal, match="2 calls are under way"), admission.call():
            pass
        first.body((admission.max_bytes - admission.bytes) // BODY_FACTOR)
        with pytest.raises(Refusal, match="--memory-mb") as found:
            second.body(CALL_BYTES // BODY_FACTOR)
        assert found.value.status == 503
    with admission.call() as alone, pytest.raises(Refusal) as found:
        alone.body(admission.largest_body + 1)
    assert found.value.status == 413
    with admission.call() as alone:
        alone.body(admission.largest_body)
    assert refused == {"calls": 1, "memory": 1}


async def test_a_loop_that_is_behind_takes_no_more_calls_until_it_is_not() -> None:
    clock = Clock()
    admission, refused = bounds(calls=2 * MIN_QUEUE_CALLS, size=1 << 30, clock=clock)
    admission.start()
    with ExitStack() as running:
        for _ in range(MIN_QUEUE_CALLS - 1):
            running.enter_context(admission.call())
        clock.now += LOOK_S + 2 * MAX_BEHIND_S
        running.enter_context(admission.call())  # so few calls are not why it is behind
        with pytest.raises(Refusal, match="behind"), admission.call():
            pass
        admission._look()  # as late as it is
        with pytest.raises(Refusal, match="behind"), admission.call():
            pass
        clock.now += LOOK_S
        admission._look()  # in time
        running.enter_context(admission.call())
    assert refused == {"behind": 2}
    admission.close()


async def test_where_bytes_are_scarce_those_who_do_not_read_are_let_go_the_longest_first() -> None:
    clock = Clock()
    admission, _ = bounds(size=4 * STALLED_BYTES, clock=clock)
    gone: list[str] = []

    async def waits(name: str) -> None:
        try:
            async with asyncio.timeout(3600) as limit:
                with admission.stall(limit):
                    await asyncio.Event().wait()
        except TimeoutError:
            gone.append(name)

    async with asyncio.TaskGroup() as group:
        waiting = []
        for name in ("first", "second", "third", "fourth"):
            waiting.append(group.create_task(waits(name)))
            await asyncio.sleep(0)
            clock.now += 1
        admission.release_stalled(clock.now)
        await asyncio.sleep(0)
        assert gone == [], "all of them read not long ago"
        clock.now += SCARCE_STALL_S
        admission.release_stalled(clock.now)
        await asyncio.wait(waiting[:1])
        assert gone == ["first"], "three of four are not scarce"
        assert admission.stalled == 3
        for task in waiting[1:]:
            task.cancel()
    assert (admission.bytes, admission.stalled) == (0, 0)
