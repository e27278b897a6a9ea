"""A plan is made of a seed: the same again and again, another for another, and all of what was ordered in it."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace.data.errors import InvalidInput
from headrace.storm.plan import CLOCK_JUMPS_S, COUNTS, QUICK, Fault, Sizes, make_plan

TARGETS = ["gateway", "worker", "fork_server", "server-0", "server-1", "consumer-train", "reward"]
LINKS = ["agents", "to-server-0"]


def plan(seed: int, sizes: Sizes = QUICK) -> list[Fault]:
    return make_plan(seed, sizes, TARGETS, LINKS, "gateway")


def test_the_same_seed_gives_the_same_faults() -> None:
    assert plan(7) == plan(7)
    assert plan(7) != plan(8)


def test_all_that_was_ordered_is_in_the_plan() -> None:
    counts = {name: 10 + number for number, name in enumerate(COUNTS.values())}
    kinds = Counter(fault.kind for fault in plan(1, Sizes(**counts)))
    assert kinds == {kind: counts[name] for kind, name in COUNTS.items()}


def test_every_process_is_killed_and_every_link_fails_in_every_way() -> None:
    faults = plan(1, Sizes())
    assert {fault.target for fault in faults if fault.kind == "kill"} == set(TARGETS)
    assert {(fault.target, fault.network) for fault in faults if fault.kind == "network"} == {
        (link, kind) for link in LINKS for kind in ("drop", "delay", "duplicate", "reset")
    }
    assert {fault.target for fault in faults if fault.kind in ("full_disk", "slow_disk")} == {"gateway"}
    assert {fault.target for fault in faults if fault.kind in ("descriptors", "memory")} == {"gateway", "worker"}


def test_clocks_jump_both_ways_and_are_set_right_again() -> None:
    faults = [fault for fault in plan(1, Sizes(clocks=200)) if fault.kind == "clock"]
    assert {fault.ahead_s for fault in faults} == set(CLOCK_JUMPS_S)
    assert {fault.target for fault in faults} == set(TARGETS) - {"worker", "fork_server"}


@pytest.mark.parametrize(("name", "value"), [("kills", -1), ("agents", 0), ("workers", 0)])
def test_sizes_that_cannot_be_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(InvalidInput, match=name):
        Sizes(**{name: value})
