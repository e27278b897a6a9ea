"""`Batch`: what `fetch_batch` hands out."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

from headrace.data.sequence import Sequence
from headrace.data.step import Step
from headrace.data.trajectory import Group
from headrace.pool.errors import LeaseLost
from headrace.pool.wire import PackedGroups, decode_groups, encode_groups


class Batch:
    """Groups for a trainer. Under a lease, `ack()` after they are safely used, or `nack()` to give them back.

    A Batch from an awaitable call has awaitable `ack`, `nack` and `extend`.
    """

    def __init__(
        self, groups: Seq[Group], channel: str, lease_id: str | None, deadline: float | None, calls: Any
    ) -> None:
        self._groups = groups
        self.channel = channel
        self.lease_id = lease_id
        self.deadline = deadline
        self._calls = calls

    def __len__(self) -> int:
        return len(self._groups)

    def __repr__(self) -> str:
        lease = f", lease_id={self.lease_id!r}" if self.lease_id else ""
        return f"Batch({len(self)} groups, {len(self.steps)} steps, channel={self.channel!r}{lease})"

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        return tuple(self._groups)

    @cached_property
    def steps(self) -> list[Step]:
        """Every trainable or curated step, group by group; quarantined ones are left out."""
        if isinstance(self._groups, PackedGroups):
            return self._groups.steps()
        return [step for group in self._groups for step in group.steps]

    def sequences(self) -> list[Sequence]:
        """What to train on: a Sequence for each root-to-leaf path; every sampled token is a target in exactly one."""
        return [sequence for group in self.groups for sequence in group.sequences()]

    def ack(self) -> Any:
        """The groups were used: they are consumed for good."""
        return self._held().ack(self.lease_id, channel=self.channel)

    def nack(self) -> Any:
        """The groups go back to their old place at once."""
        return self._held().nack(self.lease_id, channel=self.channel)

    def extend(self, lease_s: float) -> Any:
        """The lease ends `lease_s` seconds from now; returns the new deadline."""
        return self._held().extend(self.lease_id, lease_s, channel=self.channel)

    def _held(self) -> Any:
        if self.lease_id is None:
            raise LeaseLost("this batch was consumed when it was handed out; fetch with lease_s to acknowledge it")
        if self._calls is None:
            raise LeaseLost(f"this batch was copied away from its pool; end its lease with pool.ack({self.lease_id!r})")
        return self._calls

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (encode_groups(self.groups), self.channel, self.lease_id, self.deadline)


def _unpickle(packed: bytes, channel: str, lease_id: str | None, deadline: float | None) -> Batch:
    return Batch(decode_groups(packed), channel, lease_id, deadline, None)
