"""The containers that a channel is built from: groups by age, groups that make room, hand-outs that may be asked for
again, trajectories expected late, and what waits for a reward."""

from __future__ import annotations

import uuid
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import ItemsView, Iterable, Iterator, ValuesView
from itertools import chain, islice
from typing import Generic, TypeVar

from sortedcontainers import SortedDict

from headrace.pool.groups import GroupState, Lease

Item = TypeVar("Item")

#: Discarded numbers that an `AgeOrderedSet` keeps before it sweeps: fewer are not worth the pass over the list.
DEAD_ENTRIES_KEPT = 1024
#: Seconds for which a trajectory is expected late where groups have no timeout of their own.
LATE_WINDOW_S = 600.0
#: Seconds for which every hand-out without a lease is remembered, however many there are: who lost the answer has asked
#: again by then. One that does not come is missed after 50 s, and asked for again for 30 s (`headrace.pool.remote`).
RETRY_S = 90.0
#: Seconds after which no such hand-out is: its consumer is gone, and its groups take memory and a place in snapshots.
REPLY_KEPT_S = 600.0
#: Hand-outs without a lease that are remembered of all consumers for longer than `RETRY_S`.
REPLIES_KEPT = 1024


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


class RememberedReplies:
    """Hand-outs by the requests that asked for them, oldest first: so that a lost answer can be asked for again.

    One under a lease is remembered for as long as that lasts. For one without, whose groups are kept for nothing else,
    it is the time that counts: `RETRY_S` in any case, and up to `REPLY_KEPT_S` where it is among the `kept` newest of
    its consumer and the `most` newest of all. With a `kept` of 0 it is not remembered at all. The consumer is what
    stands before a request's last slash; requests without one are of one consumer.

    What is forgotten depends on the time alone, and not on when it was looked for: a recovery, which looks at other
    moments, comes to the same. Looking costs the same however many there are.
    """

    def __init__(self, most: int = REPLIES_KEPT) -> None:
        self._most = most
        self._replies: dict[str, Lease] = {}
        # Of those without a lease: all, those of each consumer, when each was handed out that was younger than
        # `RETRY_S` when it was last looked for, and how many of them hold a group, by the group's identity.
        self._unleased: OrderedDict[str, Lease] = OrderedDict()
        self._by_consumer: dict[str, OrderedDict[str, Lease]] = {}
        self._young: deque[tuple[float, str]] = deque()
        self._holding: Counter[int] = Counter()
        self._to_look_at: dict[str, None] = {}  # consumers that may have too many
        self._kept = -1  # what was asked for last

    def __bool__(self) -> bool:
        return bool(self._replies)

    def __contains__(self, request: str) -> bool:
        return request in self._replies

    def __getitem__(self, request: str) -> Lease:
        return self._replies[request]

    def items(self) -> ItemsView[str, Lease]:
        return self._replies.items()

    def values(self) -> ValuesView[Lease]:
        return self._replies.values()

    def holds(self, group: GroupState) -> bool:
        """Whether a group is part of a hand-out without a lease."""
        return id(group) in self._holding

    def add(self, reply: Lease, at: float, *, leased: bool) -> list[GroupState]:
        """Remembers what was handed out `at` that time. Answers the groups of what its request was given before: only
        releases that forgot by number alone wrote down two hand-outs to one request."""
        before = self._replies.get(reply.request)
        let_go = self.discard(before) if before is not None else []
        reply.at = at
        self._replies[reply.request] = reply
        if not leased:
            consumer = _consumer(reply.request)
            self._unleased[reply.request] = reply
            self._by_consumer.setdefault(consumer, OrderedDict())[reply.request] = reply
            self._young.append((at, consumer))
            self._to_look_at[consumer] = None
            self._holding.update(map(id, reply.all_groups()))
        return let_go

    def discard(self, reply: Lease) -> list[GroupState]:
        """Forgets a hand-out, where it is remembered; answers the groups that were kept for it."""
        request = reply.request
        if self._replies.get(request) is not reply:
            return []
        del self._replies[request]
        if self._unleased.pop(request, None) is None:
            return []
        consumer = _consumer(request)
        del self._by_consumer[consumer][request]
        if not self._by_consumer[consumer]:
            del self._by_consumer[consumer]
        groups = reply.all_groups()
        for group in groups:
            self._holding[id(group)] -= 1
            if not self._holding[id(group)]:
                del self._holding[id(group)]
        return groups

    def expire(self, now: float, kept: int) -> list[GroupState]:
        """Forgets what need not be remembered at that time; answers the groups that were kept for it."""
        if not self._unleased:
            return []
        consumers, self._to_look_at = self._to_look_at, {}
        while self._young and now - self._young[0][0] >= RETRY_S:
            consumers[self._young.popleft()[1]] = None
        if kept != self._kept:
            self._kept, consumers = kept, dict.fromkeys(self._by_consumer)
        too_many = len(self._unleased) - self._most
        found: list[Lease] = []
        for place, reply in enumerate(self._unleased.values()):
            if now - reply.at < (RETRY_S if place < too_many else REPLY_KEPT_S):
                break
            found.append(reply)
        for consumer in consumers:
            replies = self._by_consumer.get(consumer) or OrderedDict()
            for reply in islice(replies.values(), max(0, len(replies) - kept)):
                if kept and now - reply.at < RETRY_S:
                    break
                found.append(reply)
        return [group for reply in found for group in self.discard(reply)]

    def postpone(self, seconds: float) -> None:
        """Moves their times: the clock was set forward by as much."""
        for reply in self._replies.values():
            reply.at += seconds
        self._young = deque((at + seconds, consumer) for at, consumer in self._young)

    def clear(self) -> None:
        """Forgets all of them."""
        for reply in list(self._replies.values()):
            self.discard(reply)


def _consumer(request: str) -> str:
    return request.rpartition("/")[0]


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
