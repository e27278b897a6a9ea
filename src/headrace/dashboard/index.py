"""The index of trajectories: found, sorted and paged without asking the pool. Pure: rows come in by `put` and `retire`.

Numbers are in columns, so that a filter over 100,000 rows is a handful of vector operations; names are looked up. At
most `most` rows are kept: beyond, those that have left the pool go first, the oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from headrace.dashboard.name_text import NameText
from headrace.dashboard.records import TrajectoryPage, TrajectoryQuery, TrajectoryRecord

#: Rows that are kept: some 600 bytes each, so 120 MB.
MAX_TRAJECTORIES = 200_000
#: States of a trajectory that is in the pool.
PRESENT = ("queued", "leased")

Slots = npt.NDArray[np.int64]
Key = tuple[str, str]

#: Each in an array of its own: a filter reads the columns that it is about, and no others.
_COLUMNS: dict[str, type[np.generic]] = {
    "alive": np.bool_,
    "number": np.int64,
    "state": np.int32,
    "channel": np.int32,
    "complete": np.bool_,
    "steps": np.int64,
    "tokens": np.int64,
    "reward": np.float64,
    "version": np.int64,
    "created_at": np.float64,
}


class _Codes:
    """Names as small numbers."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def of(self, name: str) -> int:
        return self._codes.setdefault(name, len(self._codes))

    def known(self, name: str) -> int:
        """The number of a name; -1 where no row ever had it."""
        return self._codes.get(name, -1)

    @property
    def names(self) -> list[str]:
        return list(self._codes)


class TrajectoryIndex:
    """Every trajectory that was heard of, by channel and uid. Not to be used by two threads at once."""

    def __init__(self, most: int = MAX_TRAJECTORIES) -> None:
        self._most = most
        self._columns = {name: np.zeros(min(most, 1024), kind) for name, kind in _COLUMNS.items()}
        self._names = NameText()
        self._rows: list[TrajectoryRecord | None] = []
        self._slots: dict[Key, int] = {}
        self._free: list[int] = []
        self._prompts: OrderedDict[Key, dict[str, None]] = OrderedDict()
        self._tags: dict[str, set[int]] = {}
        self._retired: OrderedDict[Key, None] = OrderedDict()
        self._states, self._channels = _Codes(), _Codes()
        self._next = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, channel: str, uid: str) -> TrajectoryRecord | None:
        """The row of a trajectory; None where it is unknown."""
        slot = self._slots.get((channel, uid))
        return None if slot is None else self._rows[slot]

    def put(self, record: TrajectoryRecord) -> None:
        """Adds a trajectory, or takes the place of what was known of it."""
        key = (record.channel, record.uid)
        slot = self._slots.get(key)
        if slot is None:
            slot = self._new_slot(key)
        else:
            self._untag(slot)
        self._rows[slot] = record
        self._prompts.setdefault((record.channel, record.prompt_uid), {})[record.uid] = None
        for tag in record.tags:
            self._tags.setdefault(tag, set()).add(slot)
        self._names.put(slot, record.uid, record.prompt_uid)
        values = {
            "alive": True,
            "state": self._states.of(record.state),
            "channel": self._channels.of(record.channel),
            "complete": record.complete,
            "steps": record.steps,
            "tokens": record.tokens,
            "reward": np.nan if record.reward is None else record.reward,
            "version": record.version,
            "created_at": np.nan if record.created_at is None else record.created_at,
        }
        for name, value in values.items():
            self._columns[name][slot] = value
        if record.state in PRESENT:
            self._retired.pop(key, None)
        else:
            self._retired.setdefault(key)

    def retire(self, channel: str, uid: str, state: str) -> None:
        """Says what became of a trajectory that has left the pool; nothing where it is unknown."""
        known = self.get(channel, uid)
        if known is not None and known.state != state:
            self.put(replace(known, state=state))

    def states(self) -> list[str]:
        """The states that rows have had."""
        return self._states.names

    def tags(self) -> list[str]:
        """The tags that rows have."""
        return sorted(tag for tag, slots in self._tags.items() if slots)

    def page(self, query: TrajectoryQuery) -> TrajectoryPage:
        """The rows of a query. Those without a value come last, whichever way it is sorted."""
        slots = self._select(query)
        values = self._columns[query.sort][slots].astype(np.float64)
        if query.descending:
            np.negative(values, out=values)
        # Those without a value are NaN, which numpy sorts last; the newest of equals comes first, or last.
        numbers = self._columns["number"][slots]
        ties = -numbers if query.descending else numbers
        end = query.offset + query.limit
        if end < len(slots):  # the rows before the page's end, in any order, are found in one pass
            last = np.partition(values, end - 1)[end - 1]
            if not np.isnan(last):
                near = np.flatnonzero(values <= last)
                slots_near, values, ties = slots[near], values[near], ties[near]
            else:
                slots_near = slots
        else:
            slots_near = slots
        order = np.lexsort((ties, values))
        chosen = slots_near[order[query.offset : end]]
        return TrajectoryPage(self._records(chosen), len(slots), len(self))

    def matching(self, query: TrajectoryQuery) -> list[TrajectoryRecord]:
        """All that fit a query, whichever page it asks for, newest first."""
        slots = self._select(query)
        return self._records(slots[np.argsort(self._columns["number"][slots])[::-1]])

    def keys(self, query: TrajectoryQuery) -> list[tuple[str, str, str]]:
        """All that fit a query, whichever page it asks for, oldest first: channel, prompt's uid and uid."""
        return [(row.channel, row.prompt_uid, row.uid) for row in reversed(self.matching(query))]

    def prompts(
        self, channel: str | None, find: str, offset: int, limit: int
    ) -> tuple[list[list[TrajectoryRecord]], int]:
        """Groups whose prompt's uid has `find` in it, newest first, as their trajectories; and how many there are."""
        if channel is None and not find:
            shown = islice(reversed(self._prompts), offset, offset + limit)
            return [self.group(*key) for key in shown], len(self._prompts)
        keys = [key for key in self._prompts if (channel is None or key[0] == channel) and find in key[1]]
        keys.reverse()
        return [self.group(*key) for key in keys[offset : offset + limit]], len(keys)

    def by_prompt(self) -> dict[str, list[TrajectoryRecord]]:
        """Every row, by its prompt's uid, whichever channel."""
        found: dict[str, list[TrajectoryRecord]] = {}
        for row in self._rows:
            if row is not None:
                found.setdefault(row.prompt_uid, []).append(row)
        return found

    def group(self, channel: str, prompt_uid: str) -> list[TrajectoryRecord]:
        """The trajectories of one prompt."""
        found = (self.get(channel, uid) for uid in self._prompts.get((channel, prompt_uid), ()))
        return [record for record in found if record is not None]

    def measured(self, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """A column of every row, with which of them were consumed, and which left the pool otherwise."""
        alive = self._column("alive")
        states = self._column("state")[alive]
        consumed = states == self._states.known("consumed")
        present = np.isin(states, [self._states.known(name) for name in PRESENT])
        return self._column(name)[alive].astype(np.float64), consumed, ~consumed & ~present

    def channels(self) -> tuple[list[str], npt.NDArray[np.int32]]:
        """The channels' names, and each row's, by its number among them; the rows are those of `measured`."""
        return self._channels.names, self._column("channel")[self._column("alive")]

    def _column(self, name: str) -> npt.NDArray[Any]:
        """A column, as far as there are rows."""
        return self._columns[name][: len(self._rows)]

    def _select(self, query: TrajectoryQuery) -> Slots:
        few = self._few(query)
        if few is not None:
            return few[self._fits(query, few)]
        return np.flatnonzero(self._fits(query, slice(0, len(self._rows))))

    def _few(self, query: TrajectoryQuery) -> Slots | None:
        """The slots that the names of a query leave; None where it names none."""
        found: set[int] | None = None
        channels = self._channels.names if query.channel is None else [query.channel]
        if query.uid is not None:
            found = {self._slots[name, query.uid] for name in channels if (name, query.uid) in self._slots}
        if query.prompt_uid is not None:
            keys = [(name, uid) for name in channels for uid in self._prompts.get((name, query.prompt_uid), ())]
            found = _both(found, {self._slots[key] for key in keys})
        if query.tag is not None:
            found = _both(found, self._tags.get(query.tag, set()))
        if query.find:
            found = _both(found, self._names.find(query.find))
        return None if found is None else np.fromiter(found, np.int64, len(found))

    def _fits(self, query: TrajectoryQuery, slots: Slots | slice) -> npt.NDArray[np.bool_]:
        """Which of those slots have the values that a query asks for."""
        columns = self._columns
        fits: npt.NDArray[np.bool_] = columns["alive"][slots].copy()
        if query.channel is not None:
            fits &= columns["channel"][slots] == self._channels.known(query.channel)
        if query.state is not None:
            fits &= columns["state"][slots] == self._states.known(query.state)
        if query.complete is not None:
            fits &= columns["complete"][slots] == query.complete
        with np.errstate(invalid="ignore"):  # a row without a reward is in no range
            if query.min_reward is not None:
                fits &= columns["reward"][slots] >= query.min_reward
            if query.max_reward is not None:
                fits &= columns["reward"][slots] <= query.max_reward
        if query.min_version is not None:
            fits &= columns["version"][slots] >= query.min_version
        if query.max_version is not None:
            fits &= columns["version"][slots] <= query.max_version
        return fits

    def _records(self, slots: Iterable[int]) -> list[TrajectoryRecord]:
        return [record for slot in slots if (record := self._rows[int(slot)]) is not None]

    def _new_slot(self, key: Key) -> int:
        if len(self._slots) >= self._most:
            self._evict()
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._rows)
            self._rows.append(None)
            if slot == len(self._columns["number"]):
                more = min(2 * slot, self._most) - slot
                self._columns = {name: np.pad(column, (0, more)) for name, column in self._columns.items()}
        self._slots[key] = slot
        self._columns["number"][slot] = self._next
        self._next += 1
        return slot

    def _evict(self) -> None:
        key = next(iter(self._retired), None) or next(iter(self._slots))
        self._retired.pop(key, None)
        slot = self._slots.pop(key)
        record = self._rows[slot]
        assert record is not None
        self._untag(slot)
        self._rows[slot] = None
        self._columns["alive"][slot] = False
        self._names.drop(slot)
        prompt = (record.channel, record.prompt_uid)
        self._prompts[prompt].pop(record.uid, None)
        if not self._prompts[prompt]:
            del self._prompts[prompt]
        self._free.append(slot)
        self.evicted += 1

    def _untag(self, slot: int) -> None:
        record = self._rows[slot]
        for tag in record.tags if record is not None else ():
            self._tags[tag].discard(slot)


def _both(found: set[int] | None, others: set[int]) -> set[int]:
    return others if found is None else found & others
