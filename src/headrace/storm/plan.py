"""What the storm does, and when: a seeded schedule of faults. The same seed and sizes give the same schedule.

A plan is a list of faults in their order; `pause_s` before each stands for time in which the system works. How long a
process takes to come back is the machine's to say, so moments are not planned, only their order and distances.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import msgspec

from headrace.data.errors import InvalidInput
from headrace.storm.network import NETWORK_FAULTS, NetworkFault

FaultKind = Literal["kill", "freeze", "network", "full_disk", "slow_disk", "descriptors", "memory", "clock", "restart"]
PoolKind = Literal["embedded", "http", "ray"]

#: How many there are of each kind is said by these names.
COUNTS: dict[FaultKind, str] = {
    "kill": "kills",
    "freeze": "freezes",
    "network": "network",
    "full_disk": "full_disks",
    "slow_disk": "slow_disks",
    "descriptors": "descriptors",
    "memory": "memory",
    "clock": "clocks",
    "restart": "restarts",
}

#: The longest pause before a fault, freeze, network fault, and lack of anything, in seconds.
MOST_PAUSE_S = 1.0
MOST_FREEZE_S = 4.0
MOST_NETWORK_S = 3.0
LEAST_LACK_S, MOST_LACK_S = 1.0, 4.0
#: By how many seconds a clock is wrong from then on; it is set right too.
CLOCK_JUMPS_S = (-86_400.0, -3_600.0, -10.0, 0.0, 10.0, 3_600.0, 86_400.0)
#: How often a kill does not wait until its process is ready again: a crash within a start.
CRASH_IN_START = 0.15
#: How often a process is killed, in proportion: what starts soon is killed more often.
WEIGHTS = {
    "worker": 3,
    "fork_server": 1,
    "gateway": 3,
    "pool": 3,
    "server": 3,
    "consumer": 4,
    "reward": 1,
    "api": 2,
    "node": 1,
    "learner": 2,
}
#: What a gateway with workers consists of beside itself.
OF_GATEWAY = ("worker", "fork_server")
#: Processes that others connect to, which may run out of descriptors and memory.
SERVING = ("worker", "gateway", "pool", "api")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything. `seconds` bounds the faults: those that are left then are left out (None: all are done).
    `patience_s` is the longest that a call, a start or the end may take before it counts as stuck. `learner`: with a
    trainer of a real model, which takes seconds to start."""

    kills: int = 1000
    freezes: int = 200
    network: int = 100
    full_disks: int = 20
    slow_disks: int = 20
    descriptors: int = 20
    memory: int = 20
    clocks: int = 20
    restarts: int = 20
    seconds: float | None = None
    agents: int = 8
    servers: int = 2
    workers: int = 2
    learner: bool = False
    patience_s: float = 300.0

    def __post_init__(self) -> None:
        for name in COUNTS.values():
            if getattr(self, name) < 0:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("agents", "servers", "workers"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be 1 or more")


#: What fits into two minutes on a free core. A machine that is busy with other things starts a process in minutes: that
#: is not stuck.
QUICK = Sizes(
    kills=24,
    freezes=6,
    network=10,
    full_disks=1,
    slow_disks=1,
    descriptors=1,
    memory=1,
    clocks=2,
    restarts=1,
    seconds=60,
    agents=4,
    patience_s=600,
)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: after `pause_s`, this happens to `target` (a process, or a link) and ends after `hold_s`. A `restart`
    is a SIGTERM, as an upgrade sends it; a `clock` is wrong by `ahead_s` from then on. Faults of several processes
    overlap; one that is killed again is ready before, unless `at_once`: then it may be in the middle of its start."""

    kind: FaultKind
    target: str
    pause_s: float
    hold_s: float = 0.0
    network: NetworkFault | None = None
    ahead_s: float = 0.0
    at_once: bool = False


def make_plan(seed: int, sizes: Sizes, targets: Sequence[str], links: Sequence[str], journal_owner: str) -> list[Fault]:
    """The faults of a run. `targets` are the processes that may be killed, `links` those that may fail, and
    `journal_owner` the process whose disk may be full, or slow."""
    chance = random.Random(f"storm-{seed}")
    deck = [kind for kind, name in COUNTS.items() for _ in range(getattr(sizes, name))]
    chance.shuffle(deck)
    weights = [WEIGHTS.get(name.rstrip("0123456789-"), 1) for name in targets]
    return [_fault(kind, chance, targets, weights, links, journal_owner) for kind in deck]


def _fault(
    kind: FaultKind,
    chance: random.Random,
    targets: Sequence[str],
    weights: Sequence[int],
    links: Sequence[str],
    journal_owner: str,
) -> Fault:
    pause_s = round(chance.random() * MOST_PAUSE_S, 3)
    [target] = chance.choices(targets, weights)
    match kind:
        case "kill":
            return Fault(kind=kind, target=target, pause_s=pause_s, at_once=chance.random() < CRASH_IN_START)
        case "restart":
            return Fault(kind=kind, target=target, pause_s=pause_s)
        case "freeze":
            return Fault(kind=kind, target=target, pause_s=pause_s, hold_s=round(chance.random() * MOST_FREEZE_S, 3))
        case "network":
            fault = chance.choice(NETWORK_FAULTS)
            hold_s = round(chance.random() * MOST_NETWORK_S, 3)
            return Fault(kind=kind, target=chance.choice(links), pause_s=pause_s, hold_s=hold_s, network=fault)
        case "clock":
            clocks = [name for name in targets if name not in OF_GATEWAY]  # whose clocks stay right
            jump_s = chance.choice(CLOCK_JUMPS_S)
            return Fault(kind=kind, target=chance.choice(clocks), pause_s=pause_s, ahead_s=jump_s)
        case "descriptors" | "memory":
            target = chance.choice([name for name in targets if name in SERVING])
        case "full_disk" | "slow_disk":
            target = journal_owner
    hold_s = round(chance.uniform(LEAST_LACK_S, MOST_LACK_S), 3)
    return Fault(kind=kind, target=target, pause_s=pause_s, hold_s=hold_s)
