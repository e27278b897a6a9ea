"""What people decide about steps, by hand: quality, trainable or not, tags, notes and rewards; with undo.

What is curated stays in the pool: steps that are not trainable become context, and all of it is exported with the data.
Who did it and when stands in the step's metadata. What a consumer has cannot be curated any more, and is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from headrace.data.errors import InvalidInput, shown
from headrace.data.trajectory import Trajectory
from headrace.pool.errors import Conflict, Gone, NotFound
from headrace.pool.groups import PERSON

#: Steps that one action may change: each is a call of the pool, and a person waits.
MAX_STEPS = 20_000
#: Actions that can be undone.
MAX_UNDO = 50
#: What `by` says where nobody gave a name, and the longest name.
ANYBODY, MAX_NAME = "dashboard", 100

Key = tuple[str, str]


class Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is set; a field that is not given stays as it is. `reward` is the trajectory's, at its last step, or that of
    the one step."""

    quality: float | UnsetType | None = UNSET
    trainable: bool | UnsetType = UNSET
    tags: tuple[str, ...] | UnsetType = UNSET
    note: str | UnsetType | None = UNSET
    reward: float | UnsetType = UNSET

    def fields(self) -> dict[str, Any]:
        """Those of a step that are given."""
        names = ("quality", "trainable", "tags", "note")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not UNSET}


class CurationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to change: one step, a trajectory, or, with `filter` (as the page's address has it), all that it shows."""

    changes: Changes
    by: str = ""
    channel: str | None = None
    uid: str | None = None
    step: int | None = None
    filter: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if not self.changes.fields() and self.changes.reward is UNSET:
            raise InvalidInput("changes is empty; set quality, trainable, tags, note or reward")
        if (self.filter is None) == (self.uid is None):
            raise InvalidInput("name either a trajectory (channel and uid) or a filter")
        if self.uid is not None and not self.channel:
            raise InvalidInput("channel is missing; name the trajectory's")
        if len(self.by) > MAX_NAME:
            raise InvalidInput(f"by is {shown(self.by)}; a name has at most {MAX_NAME} characters")


class CurationResult(msgspec.Struct, frozen=True):
    """What was done. `refused` trajectories were with a consumer or gone; `undo` counts actions that can be undone;
    `kept_rewards` were set where there was none before, which an undo cannot take back."""

    trajectories: int
    steps: int
    refused: int
    undo: int
    kept_rewards: int = 0


class CuratedPool(Protocol):
    """What curation asks of a pool."""

    def trajectory(self, channel: str, uid: str) -> Trajectory: ...

    def curate(self, channel: str, uid: str, step: int, changes: dict[str, Any]) -> None: ...

    def reward(self, channel: str, uid: str, step: int, reward: float, source: str) -> str: ...


class _Before(msgspec.Struct):
    """A step as it was before an action."""

    channel: str
    uid: str
    step: int
    fields: dict[str, Any]
    reward: float | None
    rewarded: bool


class Curator:
    """Changes steps, and remembers how they were. For one thread."""

    def __init__(self, pool: CuratedPool) -> None:
        self._pool = pool
        self._done: deque[list[_Before]] = deque(maxlen=MAX_UNDO)

    def apply(self, keys: Iterable[Key], step: int | None, changes: Changes, by: str) -> CurationResult:
        """Changes one step, or all steps, of trajectories. Raises `InvalidInput` where those are too many, with nothing
        changed; `NotFound` where a named step is not there."""
        wanted = self._wanted(keys, step)
        done: list[_Before] = []
        refused: set[Key] = {key for key, steps in wanted.items() if not steps}
        self._done.append(done)
        try:
            for key, steps in wanted.items():
                for before in steps:
                    try:
                        done.append(self._change(before, changes, by or ANYBODY, last=before is steps[-1]))
                    except (Conflict, Gone, NotFound):
                        refused.add(key)
                        break
        finally:
            if not done:
                self._done.pop()
        return CurationResult(len({(one.channel, one.uid) for one in done}), len(done), len(refused), len(self._done))

    def undo(self, by: str) -> tuple[CurationResult, list[Key]]:
        """Takes the last action back; what is with a consumer by now stays. Raises `InvalidInput` where there is
        none."""
        if not self._done:
            raise InvalidInput("there is nothing to undo here")
        steps, refused, kept = 0, set[Key](), 0
        touched: dict[Key, None] = {}
        for before in self._done.pop():
            key = (before.channel, before.uid)
            try:
                if before.fields:
                    self._pool.curate(*key, before.step, {**before.fields, "by": f"{by or ANYBODY} (undone)"})
                if before.rewarded and before.reward is not None:
                    self._pool.reward(*key, before.step, before.reward, PERSON)
                elif before.rewarded:
                    kept += 1
            except (Conflict, Gone, NotFound):
                refused.add(key)
                continue
            steps += 1
            touched[key] = None
        return CurationResult(len(touched), steps, len(refused), len(self._done), kept), list(touched)

    def _wanted(self, keys: Iterable[Key], step: int | None) -> dict[Key, list[_Before]]:
        """The steps of trajectories, as they are; none for a trajectory that is gone."""
        wanted: dict[Key, list[_Before]] = {}
        count = 0
        for channel, uid in keys:
            found = wanted[channel, uid] = list[_Before]()
            try:
                records = self._pool.trajectory(channel, uid).tree.records
            except (Gone, NotFound):
                continue
            if step is not None and step not in records:
                raise NotFound(f"trajectory {uid!r} has no step {step}")
            for index in sorted(records) if step is None else [step]:
                head = records[index].head
                extra = head.unpack_extra()
                fields = {name: getattr(extra, name) for name in ("quality", "trainable", "tags", "note")}
                found.append(_Before(channel, uid, index, fields, head.reward, rewarded=False))
            count += len(found)
            if count > MAX_STEPS:
                raise InvalidInput(f"the filter shows more than {MAX_STEPS} steps; narrow it")
        return wanted

    def _change(self, before: _Before, changes: Changes, by: str, *, last: bool) -> _Before:
        given = changes.fields()
        if given:
            self._pool.curate(before.channel, before.uid, before.step, {**given, "by": by})
        before.fields = {name: before.fields[name] for name in given}
        if last and changes.reward is not UNSET:
            said = self._pool.reward(before.channel, before.uid, before.step, changes.reward, PERSON)
            if said == "late":
                raise Conflict(f"trajectory {before.uid!r} is with a consumer")
            before.rewarded = True
        return before
