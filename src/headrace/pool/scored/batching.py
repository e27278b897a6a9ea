"""`Batching`: which scored groups are queued, wait in a buffer, or are out with a trainer. Pure: no I/O, no clock.

    batching = Batching()
    batching.connect(0, group_size=8, max_token_length=2048, min_allocation=0.25)
    batching.add(number, env=0, size=8)        # Added: into the queue, or into the environment's buffer
    numbers = batching.take(128)               # exactly 128 sequences, or None
    batching.forget(numbers)                   # delivered; give_back(numbers) where the answer never arrived

Every group is in exactly one of the three until it is forgotten. Deciding (`pick`) changes nothing; what was decided
is applied by number (`hand_out`), so that a log of calls replays to the same state. Neither a batch nor a status costs
more as the queue grows.

A buffer holds groups of another size than their environment's, until some of them make it up: the exact fill of a batch
as small as a group. A dead letter is a group that can never be served: larger than the batch, or of a size that no full
batch can hold. What may still come is judged by what is there: the sizes in line, those that are out and may come back,
and the group sizes of connected environments. Sizes are condemned only once a batch's worth is in line, so that the
first environment's groups outlast the second's late start; those that wait in a buffer, once it holds
`BUFFERED_GROUP_SIZES` times the group size. A size that was condemned before gets no such time again. A batch of more
than `MAX_ENDLESS_SUMS` sequences is taken to hold any size that is not larger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal

import msgspec

from headrace.data.errors import InvalidInput
from headrace.pool.scored.environments import Environment, Environments, EnvQueueStatus, env_status
from headrace.pool.scored.exact_fill import GroupSupply, fill_by_age, next_batch
from headrace.pool.scored.queue import Env, GroupQueue, QueuedGroup
from headrace.pool.scored.subset_sums import endless_sums

#: Batches of packs that may pass over the oldest group; the next one is filled by age, so that no group waits for ever
#: for others of its size.
MAX_PASSES = 16
#: Group sizes' worth of odd groups that an environment's buffer keeps in the hope of a match.
BUFFERED_GROUP_SIZES = 64


class Added(msgspec.Struct, frozen=True):
    """What became of a posted group, and which groups entered the queue by it."""

    status: Literal["received", "buffered"]
    entered: tuple[int, ...]
    buffer_size: int = 0  # sequences that wait in the environment's buffer


class DeadLetter(msgspec.Struct, frozen=True):
    """Why a group can never be served: the kind, to count by, and in words."""

    kind: Literal["too_large", "unmatched"]
    reason: str


class Buffers:
    """Groups that are not of their environment's size, by environment; an empty buffer is gone."""

    def __init__(self) -> None:
        self.by_env: dict[Env, GroupQueue] = {}

    def __iter__(self) -> Iterator[QueuedGroup]:
        return (group for buffer in self.by_env.values() for group in buffer)

    def __contains__(self, group: QueuedGroup) -> bool:
        return group.env in self.by_env and group in self.by_env[group.env]

    def add(self, group: QueuedGroup) -> None:
        self.by_env.setdefault(group.env, GroupQueue()).add(group)

    def remove(self, group: QueuedGroup) -> None:
        self.by_env[group.env].remove(group)
        if not self.by_env[group.env]:
            del self.by_env[group.env]

    def sequences(self, env: Env) -> int:
        return self.by_env[env].sequences[env] if env in self.by_env else 0

    def match(self, env: Env, group_size: int) -> list[QueuedGroup]:
        """The oldest groups that make up the group size, no longer buffered; none where none do."""
        if self.sequences(env) < group_size:
            return []
        lanes = [(size, lane) for size, lane in self.by_env[env].lanes[env].items() if size <= group_size]
        matched = fill_by_age(group_size, [GroupSupply(lanes)]) or []
        for group in matched:
            self.remove(group)
        return matched


class Batching:
    """The queue, the buffers, and what is out, by group number; see the module."""

    def __init__(self) -> None:
        self._environments = Environments()
        self._queue = GroupQueue()
        self._buffers = Buffers()
        self._groups: dict[int, QueuedGroup] = {}  # by number: queued, buffered and out
        self._out: set[int] = set()
        self._out_sizes: Counter[int] = Counter()  # how many groups of each are out
        self._next_place = 0
        self._passed = 0  # batches in a row that passed over the oldest group

    def __len__(self) -> int:
        """Groups queued."""
        return len(self._queue)

    # -- reading -------------------------------------------------------------------------------------------------------

    def knows(self, number: int) -> bool:
        """Whether a group is here: queued, buffered or out."""
        return number in self._groups

    def is_out(self, number: int) -> bool:
        return number in self._out

    def is_queued(self, number: int) -> bool:
        return number in self._groups and self._groups[number] in self._queue

    def size(self, number: int) -> int:
        """A group's sequences."""
        return self._groups[number].size

    def env(self, number: int) -> Env:
        """The environment that a group came from."""
        return self._groups[number].env

    def numbers(self) -> list[int]:
        """Every group that is here, wherever."""
        return sorted(self._groups)

    def numbers_in_no_order(self) -> list[int]:
        """The same, at once."""
        return list(self._groups)

    def places(self) -> dict[str, int]:
        """How many groups are where."""
        queued, out = len(self._queue), len(self._out)
        return {"queued": queued, "buffered": len(self._groups) - queued - out, "out": out}

    def oldest_first(self) -> Iterator[int]:
        """The queued groups by age."""
        return (group.number for group in self._queue.by_age())

    def sizes(self) -> dict[int, int]:
        """How many queued groups there are of each size."""
        return dict(self._queue.sizes)

    # -- environments --------------------------------------------------------------------------------------------------

    @property
    def group_sizes(self) -> Collection[int]:
        """The group sizes of connected environments."""
        return self._environments.group_sizes

    def connect(
        self,
        env: int,
        *,
        group_size: int,
        max_token_length: int,
        weight: float = 1.0,
        min_allocation: float | None = None,
    ) -> tuple[int, ...]:
        """Takes an environment in, or its new settings; the groups that a new group size lets enter the queue."""
        if env not in self._environments:
            self._adopt(env)
        self._environments.put(env, Environment(group_size, max_token_length, weight, min_allocation))
        entered: tuple[int, ...] = ()
        while found := self._match(env):
            entered += found
        return entered

    def _adopt(self, env: int) -> None:
        """Groups that were posted in an environment's name before it came are its own now, in the places they have."""
        queued = [group for lane in self._queue.lanes.get(None, {}).values() for group in lane]
        out = [self._groups[number] for number in self._out]
        for group in (*queued, *out):
            if group.env is None and group.claim == env:
                own = msgspec.structs.replace(group, env=env, claim=None)
                self._groups[group.number] = own
                if group.number not in self._out:
                    self._queue.remove(group)
                    self._queue.add(own)

    def disconnect(self, env: int) -> None:
        """Ends an environment's weight and share; `InvalidInput` where it never connected."""
        self._environments.change(env, connected=False)

    def silence(self, env: int, silent: bool = True) -> None:
        """A silent environment does not count towards weights."""
        if self._environments[env].silent != silent:
            self._environments.change(env, silent=silent)

    def is_silent(self, env: int) -> bool:
        return self._environments[env].silent

    def status(self, env: int, batch_size: int, unservable: int = 0) -> EnvQueueStatus:
        """The numbers for one environment; `unservable`: sequences that it posted and that no batch will hold."""
        return env_status(env, batch_size, self._environments, self._queue, unservable)

    # -- groups --------------------------------------------------------------------------------------------------------

    def add(self, number: int, env: Env, size: int) -> Added:
        """Queues a group, or buffers it where its size is not its environment's."""
        if number in self._groups:
            raise InvalidInput(f"group {number} is here already; every group has a number of its own")
        if size < 1:
            raise InvalidInput(f"group {number} has {size} sequences; a group has at least one")
        if env is None or env not in self._environments:
            # without an environment until one has that id: posts under random ids add no lanes
            self._enter(QueuedGroup(self._place(), number, None, size, claim=env))
            return Added("received", (number,))
        if size == self._environments[env].group_size:
            self._enter(QueuedGroup(self._place(), number, env, size))
            return Added("received", (number,))
        group = self._groups[number] = QueuedGroup(self._place(), number, env, size)
        self._buffers.add(group)
        return Added("buffered", self._match(env), self.buffered(env))

    def buffered(self, env: int) -> int:
        """Sequences in an environment's buffer."""
        return self._buffers.sequences(env)

    def _match(self, env: int) -> tuple[int, ...]:
        """Lets what makes up the group size enter the queue, as its youngest."""
        matched = self._buffers.match(env, self._environments[env].group_size)
        for group in matched:
            self._enter(msgspec.structs.replace(group, place=self._place()))
        return tuple(group.number for group in matched)

    def _enter(self, group: QueuedGroup) -> None:
        self._groups[group.number] = group
        self._queue.add(group)

    def _place(self) -> int:
        self._next_place += 1
        return self._next_place

    # -- batches -------------------------------------------------------------------------------------------------------

    def take(self, batch_size: int) -> list[int] | None:
        """Hands out the next batch; None where none is ready."""
        numbers = self.pick(batch_size)
        if numbers is not None:
            self.hand_out(numbers)
        return numbers

    def pick(self, batch_size: int) -> list[int] | None:
        """The groups of the next batch, exactly `batch_size` sequences. Changes nothing."""
        if batch_size < 1:
            raise InvalidInput(f"batch_size must be at least 1, not {batch_size}")
        chosen = next_batch(self._queue, self._environments, batch_size, by_age=self._passed >= MAX_PASSES)
        return None if chosen is None else [group.number for group in chosen]

    def hand_out(self, numbers: Iterable[int]) -> None:
        """Takes queued groups out; they are delivered (`forget`) or come back (`give_back`)."""
        groups = [self._groups[number] for number in self._known(numbers)]
        if astray := [group.number for group in groups if group not in self._queue]:
            raise InvalidInput(f"groups {astray} are not queued; only queued groups can be handed out")
        oldest = self._queue.oldest(sum(group.size for group in groups))
        for group in groups:
            self._queue.remove(group)
            self._leave(group)
        passed_over = oldest is not None and oldest.number not in self._out
        self._passed = self._passed + 1 if passed_over and self._passed < MAX_PASSES else 0

    def give_back(self, numbers: Iterable[int]) -> None:
        """Groups whose batch was not delivered stand in the queue where they stood."""
        known = self._known(numbers)
        if astray := [number for number in known if number not in self._out]:
            raise InvalidInput(f"groups {astray} were not handed out; only those that were can be given back")
        for number in known:
            self._return(self._groups[number])
            self._queue.add(self._groups[number])

    def forget(self, numbers: Iterable[int]) -> None:
        """Delivered, dropped or dead: the groups are gone, wherever they were."""
        for number in self._known(numbers):
            group = self._groups.pop(number)
            if number in self._out:
                self._return(group)
            elif group in self._buffers:
                self._buffers.remove(group)
            else:
                self._queue.remove(group)

    def _leave(self, group: QueuedGroup) -> None:
        self._out.add(group.number)
        self._out_sizes[group.size] += 1

    def _return(self, group: QueuedGroup) -> None:
        self._out.remove(group.number)
        self._out_sizes[group.size] -= 1
        if not self._out_sizes[group.size]:
            del self._out_sizes[group.size]

    def dead_letters(self, batch_size: int | None, condemned: Collection[int] = ()) -> dict[int, DeadLetter]:
        """Groups that can never be served, each with the reason; queued ones of a size that was `condemned` before, at
        once. Without a `batch_size` any queued group can be. Changes nothing: `forget` them."""
        dead: list[tuple[QueuedGroup, DeadLetter]] = []
        if batch_size is not None:
            coming = self._environments.group_sizes.union(self._out_sizes)
            dead += _unservable(self._queue, coming, batch_size, "batch_size", judged_from=1, condemned=condemned)
        for env, buffer in self._buffers.by_env.items():
            if env is not None:
                size = self._environments[env].group_size
                dead += _unservable(buffer, (), size, "group_size", judged_from=BUFFERED_GROUP_SIZES)
        return {group.number: why for group, why in dead}

    def may_fit(self, size: int, batch_size: int) -> bool:
        """Whether a batch can hold a group of this size, with those that are here and those that may come."""
        coming = self._environments.group_sizes.union(self._out_sizes, self._queue.sizes)
        fitting = {one for one in (size, *coming) if one <= batch_size}
        return size <= batch_size and endless_sums(fitting, batch_size) >> (batch_size - size) & 1 == 1

    def _known(self, numbers: Iterable[int]) -> list[int]:
        known = list(dict.fromkeys(numbers))
        if strange := [number for number in known if number not in self._groups]:
            raise InvalidInput(f"groups {strange} are not here: never added, or forgotten")
        return known

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return self.frozen()()

    def frozen(self) -> Callable[[], dict[str, Any]]:
        """What `state` answers now, whatever happens before it is asked for: the long part is done then."""
        environments = self._environments.state()
        queued, buffered = list(self._queue), list(self._buffers)
        out = [self._groups[number] for number in self._out]
        next_place, passed = self._next_place, self._passed
        return lambda: {
            "environments": environments,
            "queued": _plain(queued),
            "buffered": _plain(buffered),
            "out": _plain(out),
            "next_place": next_place,
            "passed": passed,
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Batching:
        """A batching that goes on where `state` was taken."""
        batching = cls()
        batching._environments = Environments.restored(state["environments"])
        for group in _groups(state["queued"]):
            batching._enter(group)
        for group in _groups(state["buffered"]):
            batching._groups[group.number] = group
            batching._buffers.add(group)
        for group in _groups(state["out"]):
            batching._groups[group.number] = group
            batching._leave(group)
        batching._next_place, batching._passed = state["next_place"], state["passed"]
        return batching


def _unservable(
    queue: GroupQueue,
    coming: Iterable[int],
    target: int,
    name: str,
    *,
    judged_from: int,
    condemned: Collection[int] = (),
) -> Iterator[tuple[QueuedGroup, DeadLetter]]:
    """The groups that nothing in line, and of the sizes that may come, makes up to the target, each with why.

    `name`: what the target is. `judged_from`: how many targets' worth must be in line before a size is condemned.
    `condemned`: sizes that were found so before, which are condemned at once.
    """
    fitting = {size for size in (*queue.sizes, *coming) if size <= target}
    waiting = sum(size * count for size, count in queue.sizes.items() if size <= target)
    judged = queue.sizes.keys() if waiting >= judged_from * target else queue.sizes.keys() & condemned
    reached = endless_sums(fitting, target) if judged else -1  # -1: every sum
    dead: dict[int, DeadLetter] = {}
    for size in queue.sizes:
        if size > target:
            dead[size] = DeadLetter("too_large", f"its {size} sequences exceed {name} {target}")
        elif size in judged and not reached >> (target - size) & 1:
            dead[size] = DeadLetter("unmatched", f"no groups make up its {size} sequences to {name} {target}")
    if dead:  # nearly never: looking costs the sizes there are, not the environments
        for lanes in queue.lanes.values():
            for size in dead.keys() & lanes.keys():
                yield from ((group, dead[size]) for group in lanes[size])


def _plain(groups: Iterable[QueuedGroup]) -> list[list[Any]]:
    return [list(msgspec.structs.astuple(group)) for group in sorted(groups)]


def _groups(plain: list[list[Any]]) -> list[QueuedGroup]:
    return [QueuedGroup(*fields) for fields in plain]
