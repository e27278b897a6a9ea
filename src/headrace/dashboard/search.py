"""Text in trajectories: what was said, by anybody, and what their metadata says, such as an agent's name.

There is no index of texts: trajectories that a filter leaves are read one after the other, newest first, for a bounded
time, and an answer says how far that was and where to go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import orjson

from headrace.dashboard.records import TrajectoryRecord
from headrace.data.errors import HeadraceError, InvalidInput
from headrace.data.json import text_keys
from headrace.data.packing import attach_metadata, unpack
from headrace.data.trajectory import Trajectory
from headrace.tokens import Vocabulary

#: Seconds that one answer may take, and trajectories that it may hold.
SEARCH_S, MAX_FOUND = 2.0, 50
#: The longest text that is looked for.
MAX_TEXT = 1_000


class SearchPage(msgspec.Struct, frozen=True):
    """Trajectories with a text. `searched` of `total` were read, from the first that was asked for on; `next` is where
    to go on, None at the end."""

    rows: list[TrajectoryRecord]
    searched: int
    total: int
    next: int | None


def search(
    records: list[TrajectoryRecord],
    text: str,
    offset: int,
    read: Callable[[str, str], Trajectory],
    vocabulary: Vocabulary | None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchPage:
    """Those of some trajectories, in their order, in which a text stands; capitals do not matter. Without a vocabulary
    only metadata, tags and notes are looked into. Raises `InvalidInput` for no text, or too long a one."""
    wanted = text.casefold()
    if not wanted.strip():
        raise InvalidInput("text is blank; give what is looked for")
    if len(text) > MAX_TEXT:
        raise InvalidInput(f"text has {len(text)} characters; look for at most {MAX_TEXT}")
    found: list[TrajectoryRecord] = []
    end, at = clock() + SEARCH_S, offset
    while at < len(records) and len(found) < MAX_FOUND and (at == offset or clock() < end):
        record = records[at]
        at += 1
        try:
            trajectory = read(record.channel, record.uid)
        except HeadraceError:
            continue  # it has left the pool
        if any(wanted in part.casefold() for part in texts(trajectory, vocabulary)):
            found.append(record)
    return SearchPage(found, at - offset, len(records), at if at < len(records) else None)


def texts(trajectory: Trajectory, vocabulary: Vocabulary | None) -> list[str]:
    """Everything in a trajectory that can be read: metadata, what people noted, and each branch from its root on."""
    found = [orjson.dumps(text_keys(trajectory.metadata), default=str).decode()]
    parents = trajectory.parents
    for index, record in trajectory.tree.records.items():
        extra = record.head.unpack_extra()
        found += [*extra.tags, extra.note or ""]
        if extra.metadata:
            own = attach_metadata(extra.metadata, trajectory.blobs)
            found.append(orjson.dumps(text_keys(own), default=str).decode())
        if vocabulary is not None and index not in parents.values():
            step = unpack(record, trajectory.tree.prompt(index) if record.head.base >= 0 else None, trajectory.blobs)
            found.append(vocabulary.decode([*step.prompt_ids.tolist(), *step.response_ids.tolist()]))
    return found
