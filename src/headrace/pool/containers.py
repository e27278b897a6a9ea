"""The containers that a channel is built from: groups by age, groups that make room, trajectories expected late, and
what waits for a reward."""

from __future__ import annotations

import uuid
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Generic, TypeVar

from sortedcontainers import SortedDict

from headrace.pool.groups import GroupState

Item = TypeVar("Item")

#: Discarded numbers that an `AgeOrderedSet` keeps before it sweeps: fewer are not worth the pass over the list.
DEAD_ENTRIES_KEPT = 1024
#: Seconds for which a trajectory is expected late where groups have no timeout of their own.
LATE_WINDOW_S = 600.0


class AgeOrderedSet:
    """A set of group numbers that iterates in rising order, for queues in which nearly all come at the end and go from
    the beginning.

    Adding the youngest and discarding any cost the same however many there are, and far less than in a balanced tree.
    A discarded number keeps its place in the list until half of the list is such; added again before that, it is simply
    alive again, in its old place.
    """

    __slots__ = ("_alive", "_first", "_seqs")

    def __init__(self) -> None:
        self._seqs: list[int] = []  # rising; the dead among them are not in `_alive`
        self._alive: set[int] = set()
        self._first = 0  # nothing before this position is alive

    def __len__(self) -> int:
        return len(self._alive)

    def __contains__(self, seq: int) -> bool:
        return seq in self._alive

    def __iter__(self) -> Iterator[int]:
        seqs, alive = self._seqs, self._alive
        at = self._first
        while at < len(seqs) and seqs[at] not in alive:
            at += 1
        self._first = at
        for position in range(at, len(seqs)):
            if seqs[position] in alive:
                yield seqs[position]

    def __reversed__(self) -> Iterator[int]:
        while self._seqs and self._seqs[-1] not in self._alive:
            self._seqs.pop()
        self._first = min(self._first, len(self._seqs))
        for position in range(len(self._seqs) - 1, self._first - 1, -1):
            if self._seqs[position] in self._alive:
                yield self._seqs[position]

    @property
    def first(self) -> int | None:
        """The oldest, None where there is none."""
        return next(iter(self), None)

    def add(self, seq: int) -> None:
        if seq in self._alive:
            return
        self._alive.add(seq)
        seqs = self._seqs
        if not seqs or seq > seqs[-1]:
            seqs.append(seq)
            return
        at = bisect_left(seqs, seq)
        if seqs[at] != seq:
            insort(seqs, seq, at)
        self._first = min(self._first, at)

    def discard(self, seq: int) -> None:
        self._alive.discard(seq)
        if len(self._seqs) > 2 * len(self._alive) + DEAD_ENTRIES_KEPT:
            self._seqs = [kept for kept in self._seqs if kept in self._alive]
            self._first = 0


class EvictionQueue:
    """Which groups make room in a full channel: of the owner with the most groups, the oldest; but where more than half
    of its groups are empty, the oldest of those.

    An owner is what stands before the first slash of a group's prompt uid (a gateway's tenant), in a channel that is
    shared `by_owner`; in any other, all groups have one. So no owner loses groups to one that has more, announcements
    that never get a step displace half of what was sampled at most, and one that was just made stays for its agent.
    """

    def __init__(self, groups: Iterable[GroupState], *, by_owner: bool) -> None:
        self._by_owner = by_owner
        self._all: dict[str, AgeOrderedSet] = {}  # an owner without groups is gone
        self._empty: dict[str, AgeOrderedSet] = {}
        for group in groups:
            self.add(group)

    def add(self, group: GroupState) -> None:
        """Takes in a group that may be dropped."""
        owner = self._owner(group)
        self._all.setdefault(owner, AgeOrderedSet()).add(group.seq)
        if not group.queued:
            self._empty.setdefault(owner, AgeOrderedSet()).add(group.seq)

    def discard(self, group: GroupState) -> None:
        owner = self._owner(group)
        for sets in (self._all, self._empty):
            if owner in sets:
                sets[owner].discard(group.seq)
                if not sets[owner]:
                    del sets[owner]

    def filled(self, group: GroupState) -> None:
        """A group has a step now."""
        owner = self._owner(group)
        if owner in self._empty:
            self._empty[owner].discard(group.seq)
            if not self._empty[owner]:
                del self._empty[owner]

    def pick(self, count: int) -> list[int]:
        """The groups that make room, so many or as many as there are. Changes nothing."""
        left = {owner: len(groups) for owner, groups in self._all.items()}
        wanted: dict[str, int] = {}
        for _ in range(min(count, sum(left.values()))):
            largest = max(left, key=left.__getitem__)
            left[largest] -= 1
            wanted[largest] = wanted.get(largest, 0) + 1
        return [seq for owner, number in wanted.items() for seq in self._of(owner, number)]

    def _of(self, owner: str, count: int) -> list[int]:
        groups, empty = self._all[owner], self._empty.get(owner, ())
        too_many = max(0, len(empty) - len(groups) // 2)
        return list(islice(dict.fromkeys(chain(islice(empty, too_many), groups)), count))

    def _owner(self, group: GroupState) -> str:
        owner, slash, _ = group.uid.partition("/")
        return owner if self._by_owner and slash else ""


class ExpectedLate:
    """Trajectories that groups which are gone still waited for, by prompt.

    Such a trajectory is late when it comes, not the first of another group. It is expected for as long as its group
    would have been; then the prompt begins anew, or a rollout that never comes would cost every later epoch a group.
    """

    def __init__(self) -> None:
        self._expected: dict[str, tuple[int, float]] = {}  # by prompt_uid: how many, and since when; oldest first

    def __bool__(self) -> bool:
        return bool(self._expected)

    def __iter__(self) -> Iterator[tuple[str, int, float]]:
        for prompt, (missing, since) in self._expected.items():
            yield prompt, missing, since

    def expect(self, prompt: str, missing: int, since: float) -> None:
        """Notes that a prompt's group is gone and waited for so many more; none where `missing` is not positive."""
        self._expected.pop(prompt, None)
        if missing > 0:
            self._expected[prompt] = missing, since

    def count(self, prompt: str, now: float, window_s: float) -> int:
        """How many new trajectories of the prompt would be late: those expected for less than `window_s`."""
        missing, since = self._expected.get(prompt, (0, now))
        return missing if now - since < window_s else 0

    def arrived(self, prompt: str) -> None:
        """One of them came."""
        missing, since = self._expected.get(prompt, (0, 0.0))
        if missing > 1:
            self._expected[prompt] = missing - 1, since
        else:
            self._expected.pop(prompt, None)

    def cancel(self, prompt: str) -> None:
        """Expects none of the prompt any more."""
        self._expected.pop(prompt, None)

    def postpone(self, seconds: float) -> None:
        """Moves their times: the clock was set forward by as much."""
        self._expected = {prompt: (missing, since + seconds) for prompt, (missing, since) in self._expected.items()}

    def expire(self, now: float, window_s: float) -> None:
        """Cancels those that were expected for `window_s`."""
        for prompt in list(self._expected):
            if now - self._expected[prompt][1] < window_s:
                return
            del self._expected[prompt]


class UnscoredQueue(Generic[Item]):
    """What waits for a reward, in the order in which it came to wait; a page costs the same however many do.

    A cursor is the place of the last one that was seen. Places hold for one queue: a cursor of another one, from before
    the pool was opened, begins anew.
    """

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex[:12]
        self._next = 0
        self._places: dict[Item, int] = {}
        self._items: SortedDict = SortedDict()  # by place

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: Item) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items.values())

    def add(self, item: Item) -> bool:
        """Puts an item at the end; false where it is there already."""
        if item in self._places:
            return False
        self._places[item] = self._next
        self._items[self._next] = item
        self._next += 1
        return True

    def discard(self, item: Item) -> None:
        place = self._places.pop(item, None)
        if place is not None:
            del self._items[place]

    def page(self, after: str | None, limit: int) -> tuple[list[Item], str | None]:
        """So many items behind a cursor, and the cursor of the last one; the given one where there are none."""
        places = list(islice(self._items.irange(minimum=self._first(after)), limit))
        return [self._items[place] for place in places], f"{self._id}-{places[-1]}" if places else after

    def _first(self, after: str | None) -> int:
        id, _, place = (after or "").rpartition("-")
        return int(place) + 1 if id == self._id and place.isdecimal() else 0
