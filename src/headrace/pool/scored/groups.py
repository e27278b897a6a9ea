"""`ScoredGroups`: the state of scored groups, changed by facts alone. Nothing here decides, or knows the clock.

Every group taken is in exactly one place: queued, buffered, out under a lease, or counted as served, moved to a
channel, dead or cleared; the bytes of those that are still here are in the piece store.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from heapq import heappush
from typing import Any

import msgspec

from headrace.data.scored.piece import Piece
from headrace.pool.groups import DAMAGED, reconcile
from headrace.pool.scored.batching import Batching, DeadLetter
from headrace.pool.scored.facts import MadeOf, PostedGroup
from headrace.pool.scored.piece_store import PieceStore, StoredPiece
from headrace.pool.scored.queue import Env
from headrace.pool.scored.types import EnvRegistration, Posted, Registration

#: Posts, by their keys, that are remembered so that one whose answer was lost can be sent again: some minutes' worth.
KEYS_REMEMBERED = 65_536
#: The same of registrations and of leases that ended, which are far fewer.
REQUESTS_REMEMBERED = 1024
#: Under a key, in place of the sequences in a buffer: the group went into the queue.
RECEIVED = -1
#: Reasons that are remembered as told, so that each is logged once; beyond so many all are forgotten.
REASONS_REMEMBERED = 256
#: Why a group is gone that held a trajectory which was to be forgotten.
FORGOTTEN = "forgotten"


class BatchLease(msgspec.Struct, gc=False):
    """A batch that is out: the numbers of its groups, until when, and the request that asked for it."""

    id: str
    deadline: float
    request: str
    groups: tuple[int, ...]
    counted: bool = True  # in the step, unless a registration set the step since


class ScoredGroups:
    """Who registered, which groups are here and where, which batches are out, and what is remembered for retries.

    `memory_bytes`: what the groups' bytes may take in memory. `reset` keeps what `__init__` sets, and begins the rest
    anew (`_begin`).
    """

    def __init__(self, memory_bytes: int) -> None:
        self.pieces = PieceStore(memory_bytes)
        self.serving: str | None = None  # the channel that serves from these groups, and they from its
        self.next_number = 0
        self.next_lease = 0
        self.counts: Counter[str] = Counter()  # posted, served, moved, cleared
        self.dead: Counter[str] = Counter()
        self.ended: OrderedDict[str, str] = OrderedDict()  # leases that were acknowledged or given back
        self.returned: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # the groups of those that were given back
        self.duplicates = 0  # since the pool was opened: a retry is not worth a line in the journal
        self.answers: list[Posted] = []  # to the post that was applied last
        self._reasons_told: set[str] = set()  # why groups were found to fit no channel
        self._begin()

    def _begin(self) -> None:
        self.registration: Registration | None = None
        self.uuids: OrderedDict[str, None] = OrderedDict()  # of registrations
        self.by_fetch = False  # that registration is of a consumer that only fetched
        self.started = False  # the trainer has asked for its first batch
        self.training_ended = False  # the trainer takes no more
        self.fetched: dict[str, None] = {}  # leases of the channel that is served and that count as steps
        self.step = 0  # batches handed out, less those that did not arrive, from the registration's first step on
        self.environments: dict[int, tuple[EnvRegistration, str]] = {}  # with their names
        self.joined: OrderedDict[str, int] = OrderedDict()  # environments by the request that they came with
        self.names: Counter[str] = Counter()  # environments by the name that they wanted
        self.heard: OrderedDict[int, float] = OrderedDict()  # connected environments, the longest silent first
        self.silent: dict[int, float] = {}  # those of which that was too long, since when
        self.batching = Batching()
        self.leases: dict[str, BatchLease] = {}
        self.requests: dict[str, BatchLease] = {}  # the same by the request that asked for them
        self.deadlines: list[tuple[float, str]] = []  # a heap; leases that ended stay in it until their time
        self.keys: OrderedDict[str, int] = OrderedDict()  # RECEIVED, or the sequences in the buffer, by `key_of`
        self.latest: StoredPiece | None = None  # the group that entered the queue last, also once it is gone
        # Of groups that came from a channel, what they were made of: of those that are here, and of the latest one.
        self.made_of: dict[int, MadeOf] = {}
        self.latest_of: MadeOf | None = None
        # Groups in line that were found to fit no channel, each with why; by environment, then by number.
        self.unmovable: dict[Env, dict[int, str]] = {}
        self.repeated: set[int] = set()  # groups that were out before
        self.misfits: Counter[str] = Counter()  # groups that fitted no batch, by why
        self.unchecked = False  # something has happened since the last look for groups that can never be served
        self._unservable: dict[int, DeadLetter] = {}  # what that look found
        self._forget_verdicts()

    def _forget_verdicts(self) -> None:
        """What fits a batch may have changed: sizes that did not fit may now, and who posted them need not pause."""
        self.condemned: set[int] = set()  # sizes of which groups that were queued were found to fit no batch
        # Sequences that no batch will hold, by environment, since the last that it posted and that may be served.
        self.unservable_sequences: dict[int, int] = {}
        self.misfit = ""  # why the last of them did not fit

    @property
    def untouched(self) -> bool:
        """Whether nothing ever happened here, so that a snapshot need not say so."""
        idle = not (self.uuids or self.next_number or self.next_lease or self.counts)
        return idle and self.registration is None and not self.serving

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

    @property
    def batch_size(self) -> int | None:
        """Sequences of a batch; of a trainer that takes whole groups, as many as its groups have at most. None before
        a trainer registered."""
        held = self.registration
        if held is None or held.batch_groups is None:
            return None if held is None else held.batch_size
        largest = max((size for size in self.batching.group_sizes), default=1)
        return max(held.batch_size, held.batch_groups * largest)

    @property
    def exact_size(self) -> int | None:
        """The sequences that a batch must have, None where nobody asks for exact ones."""
        held = self.registration
        return held.batch_size if held is not None and held.batch_groups is None else None

    def register(self, uuid: str, registration: Registration | None, step: int | None, *, by_fetch: bool) -> None:
        """Takes a trainer in; its settings and the step to count from, where these are to hold."""
        if uuid:
            _remember(self.uuids, uuid, None, REQUESTS_REMEMBERED)
        self.training_ended = False
        if registration is not None:
            self.registration, self.by_fetch = registration, by_fetch
            self.unchecked = True
            self._forget_verdicts()
        if step is not None:
            self.step = step
            self.fetched.clear()
            for lease in self.leases.values():
                lease.counted = False

    def end_training(self) -> None:
        """The trainer takes no more: environments are told, and others wait for the next one."""
        self.started, self.training_ended = False, True

    def count_fetch(self, lease: str) -> None:
        """Counts the step of a batch that was fetched from the channel that is served; under a lease, until that is
        returned."""
        self.step += 1
        self.started, self.training_ended = True, False
        if lease:
            self.fetched[lease] = None

    def settle_fetch(self, lease: str, *, arrived: bool) -> None:
        """Ends the lease of a fetched batch: where it came back, its step does not count."""
        if lease in self.fetched:
            del self.fetched[lease]
            if not arrived:
                self.step -= 1

    def join(self, env: int, registration: EnvRegistration, name: str, request: str, at: float) -> None:
        """Takes an environment in."""
        self.environments[env] = (registration, name)
        self.names[registration.desired_name] += 1
        if request:
            _remember(self.joined, request, env, REQUESTS_REMEMBERED)
        self.unmovable.pop(None, None)  # what was posted in its name is its own now
        self.batching.connect(
            env,
            group_size=registration.group_size,
            max_token_length=registration.max_token_length,
            weight=registration.weight,
            min_allocation=registration.min_batch_allocation,
        )
        self.heard[env] = at
        self.unchecked = True
        self._forget_verdicts()

    def leave(self, env: int) -> None:
        """Disconnects an environment; its groups stay."""
        self.batching.disconnect(env)
        self.heard.pop(env, None)
        self.silent.pop(env, None)
        self.unchecked = True

    def hear(self, env: int | None, at: float) -> None:
        """A connected environment called: it is silent no longer."""
        if env is None or (env not in self.heard and env not in self.silent):
            return
        if self.silent.pop(env, None) is not None:
            self.batching.silence(env, False)
        self.heard[env] = max(at, self.heard.get(env, at))
        self.heard.move_to_end(env)

    def silence(self, since: float) -> None:
        """Leaves environments that have not called since out of the weights."""
        while self.heard:
            env, heard = next(iter(self.heard.items()))
            if heard >= since:
                return
            self.silent[env] = self.heard.pop(env)
            self.batching.silence(env)

    # -- groups --------------------------------------------------------------------------------------------------------

    def take(self, entry: PostedGroup, piece: Piece, at: float) -> Posted:
        """Takes in a posted group; returns the answer to its poster."""
        self.pieces.put(entry.number, piece)
        if entry.trajectories:
            self.made_of[entry.number] = entry.channel, entry.trajectories
        added = self.batching.add(entry.number, entry.env, entry.sequences)
        self.next_number = max(self.next_number, entry.number + 1)
        self.counts["posted"] += 1
        if added.entered:
            self.latest = self.pieces.stored(added.entered[-1])
            self.latest_of = self.made_of.get(added.entered[-1])
            if entry.env is not None and any(self.batching.size(one) not in self.condemned for one in added.entered):
                self.unservable_sequences.pop(entry.env, None)
        if entry.key:
            seen = added.buffer_size if added.status == "buffered" else RECEIVED
            _remember(self.keys, key_of(entry.env, entry.key), seen, KEYS_REMEMBERED)
        self.hear(entry.env, at)
        self.unchecked = True
        return Posted(added.status, added.buffer_size)

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
        if self.unchecked:
            known = self.registration is not None
            self._unservable = self.batching.dead_letters(self.exact_size, self.condemned) if known else {}
            self.unchecked = False
        return self._unservable

    def drop(self, numbers: Iterable[int], kind: str, reason: str) -> None:
        """Counts groups as dead letters of a kind. Their sizes are condemned, unless they went by damage."""
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
                self.unservable_sequences[env] = self.unservable_sequences.get(env, 0) + size
        self.misfit = reason

    def serve(self, channel: str | None) -> None:
        """Serves from the channel, and it from here, from now on; None: from no channel."""
        self.serving = channel
        self.unmovable.clear()  # what did not fit the one before may fit this one

    def is_unmovable(self, number: int) -> bool:
        """Whether a group in line was found to fit no channel."""
        return number in self.unmovable.get(self.batching.env(number), ())

    def note_unmovable(self, number: int, why: str) -> bool:
        """Notes that a group in line fits no channel, so that only `desk_batch` can serve it; whether the reason is
        news. No fact: who looks again finds it again."""
        self.unmovable.setdefault(self.batching.env(number), {})[number] = why
        if why in self._reasons_told:
            return False
        if len(self._reasons_told) >= REASONS_REMEMBERED:
            self._reasons_told.clear()
        self._reasons_told.add(why)
        return True

    def why_unmovable(self, *envs: Env) -> str:
        """Why a group in line, of one of these environments, fits no channel; empty where none was found not to."""
        return next((next(reversed(self.unmovable[env].values())) for env in envs if env in self.unmovable), "")

    def _forget_unmovable(self, numbers: Iterable[int]) -> None:
        """These groups leave the line."""
        for number in numbers if self.unmovable else ():
            env = self.batching.env(number)
            if self.is_unmovable(number):
                del self.unmovable[env][number]
                if not self.unmovable[env]:
                    del self.unmovable[env]

    def move(self, numbers: Iterable[int]) -> None:
        """Counts groups as moved to the channel that is served."""
        self.counts["moved"] += self._forget(numbers)

    def _forget(self, numbers: Iterable[int]) -> int:
        self.unchecked = True
        known = [number for number in numbers if self.batching.knows(number)]
        self._forget_unmovable(known)
        self.batching.forget(known)
        self.repeated.difference_update(known)
        for number in known:
            self.pieces.drop(number)
            self.made_of.pop(number, None)
        return len(known)

    def holds(self, channel: str, trajectory: str) -> bool:
        """Whether something here was made of a channel's trajectory."""
        return any(_holds(made_of, channel, trajectory) for made_of in (*self.made_of.values(), self.latest_of))

    def forget(self, channel: str, trajectory: str) -> list[int]:
        """Lets go of what was made of a channel's trajectory, wherever it is: groups go whole, as dead letters. Answers
        their numbers."""
        numbers = [number for number, made_of in self.made_of.items() if _holds(made_of, channel, trajectory)]
        for number in numbers:
            if self.batching.is_out(number):
                self.free(number)
        if numbers:
            self.dead[FORGOTTEN] += self._forget(numbers)
        if _holds(self.latest_of, channel, trajectory):
            self.latest = self.latest_of = None
        return numbers

    # -- batches -------------------------------------------------------------------------------------------------------

    def hand_out(self, lease: BatchLease) -> None:
        """Takes a batch's groups out of the queue and counts its step."""
        self._forget_unmovable(lease.groups)
        self.batching.hand_out(lease.groups)
        for number in lease.groups:
            self.condemned.discard(self.batching.size(number))
            if (env := self.batching.env(number)) is not None:
                self.unservable_sequences.pop(env, None)
        self.started = self.unchecked = True
        self.training_ended = False
        self.step += 1
        self.restore_lease(lease)

    def restore_lease(self, lease: BatchLease) -> None:
        """Notes a lease whose groups are out."""
        self.leases[lease.id] = lease
        if lease.request:
            self.requests[lease.request] = lease
        heappush(self.deadlines, (lease.deadline, lease.id))
        self.next_lease = max(self.next_lease, int(lease.id.rpartition("-")[2]) + 1)

    def ack(self, lease: BatchLease) -> None:
        """Ends a lease whose batch arrived: its groups are served."""
        self._end(lease, "acked")
        self.counts["served"] += self._forget(lease.groups)

    def give_back(self, lease: BatchLease) -> None:
        """Ends a lease whose batch did not arrive: its groups stand where they stood, and its step is taken back."""
        self._end(lease, "returned")
        back = [number for number in lease.groups if self.batching.is_out(number)]
        self.batching.give_back(back)
        self.repeated.update(back)
        _remember(self.returned, lease.id, tuple(back), REQUESTS_REMEMBERED)
        if lease.counted:
            self.step -= 1
        self.unchecked = True

    def receive(self, lease_id: str) -> None:
        """The batch of a lease that was given back had arrived: what of it still waits is served, and where any does,
        its step counts again."""
        waiting = [number for number in self.returned.pop(lease_id) if self.batching.is_queued(number)]
        _remember(self.ended, lease_id, "acked", REQUESTS_REMEMBERED)
        if waiting:
            self.step += 1
            self.counts["served"] += self._forget(waiting)

    def free(self, number: int) -> None:
        """Takes a group out of a lease whose end was lost."""
        for lease in self.leases.values():
            if number in lease.groups:
                lease.groups = tuple(other for other in lease.groups if other != number)
        self.batching.give_back([number])

    def _end(self, lease: BatchLease, how: str) -> None:
        del self.leases[lease.id]
        if self.requests.get(lease.request) is lease:
            del self.requests[lease.request]
        _remember(self.ended, lease.id, how, REQUESTS_REMEMBERED)

    # -- the end -------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets everything but the ledger and the channel that is served; numbers and leases are not given twice."""
        self.counts["cleared"] += len(self.batching.numbers())
        for lease in self.leases.values():
            _remember(self.ended, lease.id, "returned", REQUESTS_REMEMBERED)
        self.returned.clear()
        self.pieces.clear()
        self._begin()

    def lost(self) -> list[int]:
        """Groups whose bytes are not here: a repair of the journal left them out."""
        return [number for number in self.batching.numbers() if number not in self.pieces]

    def tally(self) -> tuple[int, int, int]:
        """Groups posted, served, and here."""
        return self.counts["posted"], self.counts["served"], len(self.pieces)

    def settle(self, posted: int, served: int, live: int) -> tuple[int, int]:
        """Sets the ledger by its tally behind a hole in the journal, and by what is here. How many groups were lost,
        and how many at least are here again though they had gone."""
        here = sum(self.batching.places().values())
        found = reconcile(posted, served, here=here, gone=self._gone, known_consumed=self.counts["served"])
        self.counts["posted"] = found.submitted
        self.counts["served"] += found.consumed
        if found.lost:
            self.dead[DAMAGED] += found.lost
        return found.lost, max(0, here - live)

    def let_go(self) -> None:
        """Frees what it holds, in memory and on the disk."""
        self.pieces.clear()
        self.latest = None

    @property
    def _gone(self) -> int:
        """Groups that are here no longer, whatever became of them."""
        return sum(self.counts[name] for name in ("served", "moved", "cleared")) + sum(self.dead.values())

    @property
    def balanced(self) -> bool:
        """Whether every group that was posted is in exactly one place."""
        return self.counts["posted"] == len(self.pieces) + self._gone

    def stats(self) -> dict[str, Any]:
        """What the pool's `stats()` shows under `desk`."""
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
            "memory_bytes": self.pieces.memory,
            "spilled_bytes": self.pieces.spilled,
            "serving": self.serving,
            "unmovable": sum(map(len, self.unmovable.values())),
            "why_unmovable": self.why_unmovable(*self.unmovable),
        }


def _holds(made_of: MadeOf | None, channel: str, trajectory: str) -> bool:
    return made_of is not None and made_of[0] == channel and trajectory in made_of[1]


def key_of(env: int | None, key: str) -> str:
    """A key under which a posted group is remembered: every environment has its own."""
    return f"{'' if env is None else env}:{key}"


def _remember(memory: OrderedDict[str, Any], name: str, value: Any, most: int) -> None:
    """Keeps a value by its name, and of all of them the newest."""
    memory[name] = value
    while len(memory) > most:
        memory.popitem(last=False)
