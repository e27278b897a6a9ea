"""Which server takes a request, without any server."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.upstream.fleet import LeastBusy, RoundRobin, Sticky


class Candidate:
    def __init__(self, address: str, in_flight: int = 0) -> None:
        self.address, self.in_flight = address, in_flight


def candidates(count: int) -> list[Candidate]:
    return [Candidate(f"http://host{at}:8001") for at in range(count)]


@given(st.integers(1, 8), st.integers(0, 50))
def test_round_robin_gives_every_server_as_much_as_any_other(servers: int, orders: int) -> None:
    balance, known = RoundRobin(), candidates(servers)
    taken = Counter(balance.pick(known).address for _ in range(orders))
    counts = [taken[server.address] for server in known]
    assert max(counts) - min(counts) <= 1


def test_round_robin_goes_on_when_servers_leave_and_come_back() -> None:
    balance, known = RoundRobin(), candidates(3)
    assert [balance.pick(known).address for _ in range(2)] == [known[0].address, known[1].address]
    assert balance.pick(known[:1]) is known[0]
    assert balance.pick(known) is known[1]


@given(st.text(min_size=1), st.integers(1, 8))
def test_sticky_keeps_a_trajectory_at_one_server(uid: str, servers: int) -> None:
    known = candidates(servers)
    first = Sticky().pick(known, uid)
    assert Sticky().pick(known, uid) is first
    assert Sticky().pick(known[::-1], uid) is first


@given(st.integers(2, 8), st.data())
def test_a_server_that_leaves_moves_only_its_own_trajectories(servers: int, data: st.DataObject) -> None:
    known = candidates(servers)
    gone = data.draw(st.sampled_from(known))
    left = [server for server in known if server is not gone]
    for number in range(40):
        before = Sticky().pick(known, f"trajectory-{number}")
        if before is not gone:
            assert Sticky().pick(left, f"trajectory-{number}") is before


def test_sticky_spreads_trajectories_over_all_servers() -> None:
    known = candidates(4)
    taken = Counter(Sticky().pick(known, f"trajectory-{number}").address for number in range(1000))
    assert all(taken[server.address] > 150 for server in known)


def test_sticky_without_anything_to_keep_together_goes_round() -> None:
    balance, known = Sticky(), candidates(2)
    assert [balance.pick(known, "").address for _ in range(3)] == [known[0].address, known[1].address, known[0].address]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_least_busy_never_picks_one_that_is_busier_than_another(in_flight: list[int]) -> None:
    known = [Candidate(f"http://host{at}", busy) for at, busy in enumerate(in_flight)]
    assert LeastBusy().pick(known).in_flight == min(in_flight)


def test_least_busy_goes_round_among_equals() -> None:
    balance, known = LeastBusy(), candidates(3)
    assert {balance.pick(known).address for _ in range(3)} == {server.address for server in known}
