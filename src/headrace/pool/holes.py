"""What a repair's holes ask for: facts about steps that were lost, and a ledger that is set right.

In a journal that is whole, none of this does anything.
"""

from __future__ import annotations

from headrace.data.block import StepHead
from headrace.pool.channel import Channel
from headrace.pool.entities import GroupState


def fits(channel: Channel, head: StepHead) -> bool:
    """Whether a step that was taken can stand here: what it builds on is there, and its place is free."""
    trajectory = channel.trajectories.get(head.trajectory_uid)
    if trajectory is None:
        return head.base < 0
    records = trajectory.tree.records
    return head.step_index not in records and (head.base < 0 or head.base in records)


def lose(channel: Channel, steps: int) -> None:
    channel.ledger.submitted += steps
    channel.ledger.dropped["damaged"] += steps


def end_leases_of(channel: Channel, group: GroupState) -> None:
    """Ends leases whose end was lost: what comes next says that the group is free."""
    for lease in list(channel.leases.values()):
        if group in lease.groups or any(trajectory.group is group for trajectory, _ in lease.steps):
            channel.give_back(lease)


def counted(channel: Channel) -> tuple[int, int]:
    """Steps queued and leased, by what is there."""
    groups = channel.groups.values()
    return sum(group.queued for group in groups), sum(group.leased for group in groups)


def settle(channel: Channel, submitted: int, consumed: int, live: int) -> tuple[int, int]:
    """Sets the ledger by what it said behind a hole, and by what is there. How many steps were lost, and how many at
    least are queued again though they had gone: nothing says any more which."""
    ledger = channel.ledger
    ledger.queued, ledger.leased = counted(channel)
    here = ledger.queued + ledger.leased
    missing = submitted - here - ledger.consumed - ledger.quarantined - sum(ledger.dropped.values())
    given = min(max(0, missing), max(0, consumed - ledger.consumed))
    lost = max(0, missing - given)
    ledger.consumed += given
    if lost:
        ledger.dropped["damaged"] += lost
    ledger.submitted = submitted - min(0, missing)
    return lost, max(0, here - live)


def recount(channel: Channel, queued: int, leased: int) -> int:
    """Sets the ledger by what is there; how many steps of it were lost."""
    ledger = channel.ledger
    lost = ledger.queued + ledger.leased - queued - leased
    ledger.queued, ledger.leased = queued, leased
    if lost > 0:
        ledger.dropped["damaged"] += lost
    else:
        ledger.submitted -= lost  # their arrival was lost, they were not
    return lost
