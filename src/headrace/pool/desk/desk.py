"""The desk's state, and what facts do to it. Nothing here decides, and nothing knows the clock.

It holds that every group taken is in exactly one place: queued, buffered, out under a lease, or counted as served,
moved to a channel, dead or cleared; and that the bytes of those that are still here are on the shelf.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from heapq import heappush
from typing import Any

import msgspec

from headrace.data.scored.piece import Piece
from headrace.pool.desk.batching import Added, Batching, DeadLetter
from headrace.pool.desk.facts import Entry
from headrace.pool.desk.shelf import Held, Shelf
from headrace.pool.desk.types import EnvRegistration, Posted, Registration

#: What is remembered, so that a call whose answer was lost can be sent again: posts, and what is asked for more rarely.
KEYS_KEPT = 65_536
REQUESTS_KEPT = 1024
#: Why groups are dropped whose bytes the journal lost; every other reason is that they fit no batch.
DAMAGED = "damaged"
#: In place of the sequences in a buffer, for a group that went into the queue.
RECEIVED = -1


class Lease(msgspec.Struct, gc=False):
    id: str
    deadline: float
    request: str
    groups: tuple[int, ...]
    counted: bool = True  # in the step; not any more once a registration set the step anew


class Desk:
    def __init__(self, memory_bytes: int) -> None:
        self.shelf = Shelf(memory_bytes)
        self.serving: str | None = None
        self.next_number = 0
        self.next_lease = 0
        self.counts: Counter[str] = Counter()  # posted, served, moved, cleared
        self.dead: Counter[str] = Counter()
        self.ended: OrderedDict[str, str] = OrderedDict()  # leases that were acknowledged or given back
        self.returned: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # the groups of those that were given back
        self.duplicates = 0  # since the pool was opened: a retry is not worth a line in the journal
        self.answers: list[Posted] = []  # to the post that was applied last
        self._begin()

    def _begin(self) -> None:
        self.registration: Registration | None = None
        self.uuids: OrderedDict[str, None] = OrderedDict()
        self.started = False
        self.step = 0
        self.environments: dict[int, tuple[EnvRegistration, str]] = {}  # with their names
        self.joined: OrderedDict[str, int] = OrderedDict()  # environments by the request that they came with
        self.names: Counter[str] = Counter()
        self.heard: OrderedDict[int, float] = OrderedDict()  # connected environments, the longest silent first
        self.silent: dict[int, float] = {}  # those of which that was too long, since when
        self.batching = Batching()
        self.leases: dict[str, Lease] = {}
        self.requests: dict[str, Lease] = {}
        self.deadlines: list[tuple[float, str]] = []
        self.keys: OrderedDict[str, int] = OrderedDict()
        self.latest: Held | None = None
        self.unfit: set[int] = set()  # groups that no channel can take, as far as anybody tried
        self.repeated: set[int] = set()  # groups that were out before
        self.misfits: Counter[str] = Counter()  # groups that fitted no batch, by why
        self.dubious = False  # something has happened since the last look for groups that can never be served
        self._unservable: dict[int, DeadLetter] = {}  # what that look found
        self._judge_anew()

    def _judge_anew(self) -> None:
        """What fits a batch may have changed: sizes that did not may, and who posted them is held no longer."""
        self.condemned: set[int] = set()  # sizes of which groups that were queued were found to fit no batch
        self.in_vain: dict[int, int] = {}  # sequences that no batch will hold, by environment, since its last that may
        self.misfit = ""  # why the last of them did not fit

    @property
    def untouched(self) -> bool:
        return not (self.uuids or self.next_number or self.next_lease or self.counts or self.serving)

    def deadline(self) -> float | None:
        """When the clock alone will change something here."""
        return self.deadlines[0][0] if self.deadlines else None

    def move_deadlines(self, seconds: float) -> None:
        """Moves all that waits for a time: the clock was set forward by as much."""
        for lease in self.leases.values():
            lease.deadline += seconds
        self.deadlines = [(at + seconds, lease) for at, lease in self.deadlines]
        self.heard = OrderedDict((env, at + seconds) for env, at in self.heard.items())
        self.silent = {env: at + seconds for env, at in self.silent.items()}

    # -- trainers and environments -------------------------------------------------------------------------------------

    def register(self, uuid: str, registration: Registration | None, step: int | None) -> None:
        _remember(self.uuids, uuid, None, REQUESTS_KEPT)
        if registration is not None:
            self.registration = registration
            self.dubious = True
            self._judge_anew()
        if step is not None:
            self.step = step
            for lease in self.leases.values():
                lease.counted = False

    def join(self, env: int, registration: EnvRegistration, name: str, request: str, at: float) -> None:
        self.environments[env] = (registration, name)
        self.names[registration.desired_name] += 1
        if request:
            _remember(self.joined, request, env, REQUESTS_KEPT)
        self.batching.connect(
            env,
            group_size=registration.group_size,
            max_token_length=registration.max_token_length,
            weight=registration.weight,
            min_allocation=registration.min_batch_allocation,
        )
        self.heard[env] = at
        self.dubious = True
        self._judge_anew()

    def leave(self, env: int) -> None:
        self.batching.disconnect(env)
        self.heard.pop(env, None)
        self.silent.pop(env, None)
        self.dubious = True

    def hear(self, env: int | None, at: float) -> None:
        """A connected environment called: it is silent no longer."""
        if env is None or (env not in self.heard and env not in self.silent):
            return
        if self.silent.pop(env, None) is not None:
            self.batching.silence(env, False)
        self.heard[env] = max(at, self.heard.get(env, at))
        self.heard.move_to_end(env)

    def silence(self, since: float) -> None:
        """Leaves out of the weights whoever has not called since."""
        while self.heard:
            env, heard = next(iter(self.heard.items()))
            if heard >= since:
                return
            self.silent[env] = self.heard.pop(env)
            self.batching.silence(env)

    # -- groups --------------------------------------------------------------------------------------------------------

    def take(self, entry: Entry, piece: Piece, at: float) -> Posted:
        self.shelf.put(entry.number, piece)
        added = self.batching.add(entry.number, entry.env, entry.sequences)
        self.next_number = max(self.next_number, entry.number + 1)
        self.counts["posted"] += 1
        if added.entered:
            self.latest = self.shelf.held(added.entered[-1])
            if entry.env is not None and any(self.batching.size(one) not in self.condemned for one in added.entered):
                self.in_vain.pop(entry.env, None)
        if entry.key:
            seen = added.buffer_size if added.status == "buffered" else RECEIVED
            _remember(self.keys, key_of(entry.env, entry.key), seen, KEYS_KEPT)
        self.hear(entry.env, at)
        self.dubious = True
        return _answer(added)

    def seen(self, env: int | None, key: str) -> Posted | None:
        """The answer to a group that was posted before under the key."""
        found = self.keys.get(key_of(env, key))
        if found is None:
            return None
        return Posted("received", 0, True) if found == RECEIVED else Posted("buffered", found, True)

    def forget_keys(self, keys: Iterable[tuple[int | None, str]]) -> None:
        for env, key in keys:
            self.keys.pop(key_of(env, key), None)

    def unservable(self) -> dict[int, DeadLetter]:
        """Groups that are here and that no batch will ever hold, each with why; looked for once after a change."""
        if self.dubious:
            size = self.registration.batch_size if self.registration is not None else None
            self._unservable = {} if size is None else self.batching.dead_letters(size, self.condemned)
            self.dubious = False
        return self._unservable

    def drop(self, numbers: Iterable[int], kind: str, reason: str) -> None:
        if kind != DAMAGED:
            self._condemn([number for number in numbers if self.batching.knows(number)], kind, reason)
        self.dead[kind] += self._forget(numbers)

    def _condemn(self, numbers: list[int], kind: str, reason: str) -> None:
        self.misfits[kind] += len(numbers)
        for number in numbers:
            size, env = self.batching.size(number), self.batching.env(number)
            if self.batching.is_queued(number):
                self.condemned.add(size)
            if env is not None:
                self.in_vain[env] = self.in_vain.get(env, 0) + size
        self.misfit = reason

    def move(self, numbers: Iterable[int]) -> None:
        self.counts["moved"] += self._forget(numbers)

    def _forget(self, numbers: Iterable[int]) -> int:
        self.dubious = True
        known = [number for number in numbers if self.batching.knows(number)]
        self.batching.forget(known)
        self.unfit.difference_update(known)
        self.repeated.difference_update(known)
        for number in known:
            self.shelf.drop(number)
        return len(known)

    # -- batches -------------------------------------------------------------------------------------------------------

    def hand_out(self, lease: Lease) -> None:
        self.batching.hand_out(lease.groups)
        for number in lease.groups:
            self.condemned.discard(self.batching.size(number))
            if (env := self.batching.env(number)) is not None:
                self.in_vain.pop(env, None)
        self.started = self.dubious = True
        self.step += 1
        self.restore_lease(lease)

    def restore_lease(self, lease: Lease) -> None:
        self.leases[lease.id] = lease
        if lease.request:
            self.requests[lease.request] = lease
        heappush(self.deadlines, (lease.deadline, lease.id))
        self.next_lease = max(self.next_lease, int(lease.id.rpartition("-")[2]) + 1)

    def ack(self, lease: Lease) -> None:
        self._end(lease, "acked")
        self.counts["served"] += self._forget(lease.groups)

    def give_back(self, lease: Lease) -> None:
        self._end(lease, "returned")
        back = [number for number in lease.groups if self.batching.is_out(number)]
        self.batching.give_back(back)
        self.repeated.update(back)
        _remember(self.returned, lease.id, tuple(back), REQUESTS_KEPT)
        if lease.counted:
            self.step -= 1
        self.dubious = True

    def receive(self, lease_id: str) -> None:
        """The batch of a lease that was given back had arrived: what nobody else has of it is gone, and it was a step
        if anything is."""
        waiting = [number for number in self.returned.pop(lease_id) if self.batching.is_queued(number)]
        _remember(self.ended, lease_id, "acked", REQUESTS_KEPT)
        if waiting:
            self.step += 1
            self.counts["served"] += self._forget(waiting)

    def free(self, number: int) -> None:
        """Takes a group out of a lease whose end was lost."""
        for lease in self.leases.values():
            if number in lease.groups:
                lease.groups = tuple(other for other in lease.groups if other != number)
        self.batching.give_back([number])

    def _end(self, lease: Lease, how: str) -> None:
        del self.leases[lease.id]
        if self.requests.get(lease.request) is lease:
            del self.requests[lease.request]
        _remember(self.ended, lease.id, how, REQUESTS_KEPT)

    # -- the end -------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets everything but what the desk is for; numbers and leases are not given twice."""
        self.counts["cleared"] += len(self.batching.numbers())
        for lease in self.leases.values():
            _remember(self.ended, lease.id, "returned", REQUESTS_KEPT)
        self.returned.clear()
        self.shelf.clear()
        self._begin()

    def lost(self) -> list[int]:
        """Groups whose bytes are not here: a repair left them out."""
        return [number for number in self.batching.numbers() if number not in self.shelf]

    def tally(self) -> tuple[int, int, int]:
        """Groups posted, served, and here."""
        return self.counts["posted"], self.counts["served"], len(self.shelf)

    def settle(self, posted: int, served: int, live: int) -> tuple[int, int]:
        """Sets the ledger by its tally behind a hole in the journal, and by what is here. How many groups were lost,
        and how many at least are here again though they had gone."""
        here = sum(self.batching.places().values())
        gone = sum(self.counts[name] for name in ("served", "moved", "cleared")) + sum(self.dead.values())
        missing = posted - here - gone
        given = min(max(0, missing), max(0, served - self.counts["served"]))
        lost = max(0, missing - given)
        self.counts["served"] += given
        if lost:
            self.dead["damaged"] += lost
        self.counts["posted"] = posted - min(0, missing)
        return lost, max(0, here - live)

    def let_go(self) -> None:
        """Frees what it holds, in memory and on the disk."""
        self.shelf.clear()
        self.latest = None

    @property
    def balanced(self) -> bool:
        gone = sum(self.counts[name] for name in ("served", "moved", "cleared")) + sum(self.dead.values())
        return self.counts["posted"] == len(self.shelf) + gone

    def stats(self) -> dict[str, Any]:
        places = self.batching.places()
        return {
            **places,
            "balanced": self.balanced,
            "posted": self.counts["posted"],
            "served": self.counts["served"],
            "moved": self.counts["moved"],
            "cleared": self.counts["cleared"],
            "dead_letters": dict(self.dead),
            "duplicates": self.duplicates,
            "step": self.step,
            "environments": len(self.environments),
            "leases": len(self.leases),
            "memory_bytes": self.shelf.memory,
            "spilled_bytes": self.shelf.spilled,
            "serving": self.serving,
        }


def key_of(env: int | None, key: str) -> str:
    return f"{'' if env is None else env}:{key}"


def _answer(added: Added) -> Posted:
    return Posted(added.status, added.buffer_size)


def _remember(memory: OrderedDict[str, Any], name: str, value: Any, most: int) -> None:
    memory[name] = value
    while len(memory) > most:
        memory.popitem(last=False)
