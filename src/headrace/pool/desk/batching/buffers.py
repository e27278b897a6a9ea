"""Buffers: groups of another size than their environment's, until some of them make it up.

First fit, then any combination, the oldest preferred: the exact fill of a batch as small as a group.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.pool.desk.batching import exact
from headrace.pool.desk.batching.queue import Env, Group, Queue


class Buffers:
    def __init__(self) -> None:
        self.by_env: dict[Env, Queue] = {}  # an empty buffer is gone

    def __iter__(self) -> Iterator[Group]:
        return (group for buffer in self.by_env.values() for group in buffer)

    def __contains__(self, group: Group) -> bool:
        return group.env in self.by_env and group in self.by_env[group.env]

    def add(self, group: Group) -> None:
        self.by_env.setdefault(group.env, Queue()).add(group)

    def remove(self, group: Group) -> None:
        self.by_env[group.env].remove(group)
        if not self.by_env[group.env]:
            del self.by_env[group.env]

    def sequences(self, env: Env) -> int:
        return self.by_env[env].sequences[env] if env in self.by_env else 0

    def match(self, env: Env, group_size: int) -> list[Group]:
        """The oldest groups that make up the group size, no longer buffered; none where none do."""
        if self.sequences(env) < group_size:
            return []
        lanes = [(size, lane) for size, lane in self.by_env[env].lanes[env].items() if size <= group_size]
        matched = exact.fill(group_size, [exact.Supply(lanes)]) or []
        for group in matched:
            self.remove(group)
        return matched
