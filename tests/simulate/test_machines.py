"""What takes time: a server shares itself among its calls, a process takes one thing after the other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.simulate.machines import CpuQueue, SharedServer


def ends(server: SharedServer[str], arrivals: list[tuple[float, float, str]]) -> dict[str, float]:
    """When each call ends, of (arrival, tokens, name)."""
    found: dict[str, float] = {}
    left = sorted(arrivals)
    while left or server.calls:
        end = server.next_end()
        if left and (end is None or left[0][0] <= end):
            at, tokens, name = left.pop(0)
            server.add(0.0, tokens, name, at)
        else:
            assert end is not None
            found[server.end_one(end)] = end
    return found


def test_a_call_alone_gets_a_token_at_the_server_s_own_pace() -> None:
    assert ends(SharedServer(0.01, 0.002, 8), [(1.0, 100, "one")]) == {"one": pytest.approx(1 + 100 * 0.012)}


def test_calls_beside_each_other_slow_each_other() -> None:
    found = ends(SharedServer(0.01, 0.002, 8), [(0.0, 100, "short"), (0.0, 200, "long")])
    assert found == {"short": pytest.approx(100 * 0.014), "long": pytest.approx(100 * 0.014 + 100 * 0.012)}


def test_a_call_beyond_the_batch_waits_for_one_to_end() -> None:
    found = ends(SharedServer(0.01, 0.0, 1), [(0.0, 100, "first"), (0.0, 100, "second")])
    assert found == {"first": pytest.approx(1.0), "second": pytest.approx(2.0)}


def test_nothing_is_sampled_while_a_prompt_is_computed_or_weights_are_exchanged() -> None:
    server: SharedServer[str] = SharedServer(0.01, 0.0, 8)
    server.add(0.5, 100, "one", 0.0)
    assert server.next_end() == pytest.approx(1.5)
    server.hold(2.0, 1.0)
    assert server.next_end() == pytest.approx(2.5)
    server.hold(1.0, 1.5)  # that was over before
    assert server.next_end() == pytest.approx(2.5)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.integers(1, 500)), min_size=1, max_size=30),
    st.integers(1, 8),
)
def test_every_call_ends_once_and_no_sooner_than_alone(arrivals: list[tuple[float, int]], most: int) -> None:
    server: SharedServer[str] = SharedServer(0.01, 0.003, most)
    found = ends(server, [(at, tokens, str(n)) for n, (at, tokens) in enumerate(arrivals)])
    assert sorted(found) == sorted(str(n) for n in range(len(arrivals)))
    for n, (at, tokens) in enumerate(arrivals):
        assert found[str(n)] >= at + tokens * 0.013 - 1e-6
    # No more tokens than a full batch gets.
    assert max(found.values()) - min(at for at, _ in arrivals) >= (
        sum(tokens for _, tokens in arrivals) * (0.01 + 0.003 * most) / most - 1e-6
    )


def test_two_processes_take_two_things_at_once_and_the_third_waits() -> None:
    queue = CpuQueue(2)
    assert [queue.done_at(0.0, 1.0) for _ in range(3)] == [1.0, 1.0, 2.0]
    assert queue.done_at(5.0, 0.5) == 5.5
    assert queue.busy_s == 3.5
