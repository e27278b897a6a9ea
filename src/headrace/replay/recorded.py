"""Recorded answers, found by the exact ids of their prompts. Pure but for reading the source."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from headrace.dashboard.source import PoolSource
from headrace.data.block import floats_array
from headrace.data.errors import HeadraceError
from headrace.data.trajectory import Trajectory
from headrace.data.tree import common_tokens
from headrace.pool.errors import Gone, NotFound
from headrace.tokens import Vocabulary

#: Rows listed at a time.
ROWS_A_PAGE = 1_000
#: Tokens that are shown of each side of a difference, and before it.
SHOWN_TOKENS, CONTEXT_TOKENS = 24, 12


class RecordedAnswer(msgspec.Struct, frozen=True, gc=False):
    """What was sampled for a prompt, once. A log-prob that was not recorded is None."""

    trajectory_uid: str
    step_index: int
    ids: list[int]
    log_probs: list[float | None]
    finish_reason: str
    stop_reason: str | int | None


class NotRecorded(HeadraceError):
    """No recorded call has that prompt; the message shows where it first differs from the nearest that was."""

    code = "not_recorded"


class RecordedAnswers:
    """The answers of trajectories, by prompt. Of several for one prompt, the first call gets the first, the next the
    next, and after the last the first again."""

    def __init__(self, trajectories: Iterable[Trajectory], vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._trajectories: dict[tuple[str, str], Trajectory] = {}
        self._by_prompt: dict[bytes, list[tuple[tuple[str, str], int]]] = {}
        self._given: dict[bytes, int] = {}
        self.steps = 0
        for trajectory in trajectories:
            key = (trajectory.channel, trajectory.uid)
            self._trajectories[key] = trajectory
            for index in sorted(trajectory.tree.records):
                digest = _digest(trajectory.tree.prompt(index))
                self._by_prompt.setdefault(digest, []).append((key, index))
                self.steps += 1

    def __len__(self) -> int:
        return len(self._trajectories)

    def next(self, prompt: Sequence[int]) -> RecordedAnswer:
        """The answer for a prompt whose turn it is. Raises `NotRecorded` where there is none."""
        packed = _packed(prompt)
        digest = _digest(packed)
        found = self._by_prompt.get(digest)
        if found is None:
            raise NotRecorded(self._difference(packed))
        turn = self._given.get(digest, 0)
        self._given[digest] = turn + 1
        key, index = found[turn % len(found)]
        return _answer(self._trajectories[key], index)

    def _difference(self, prompt: bytes) -> str:
        """Where a prompt first differs from the recorded one that it shares most with."""
        nearest, shared = None, -1
        for trajectory in self._trajectories.values():
            for index in trajectory.tree.records:
                recorded = bytes(trajectory.tree.prompt(index))
                common = common_tokens(prompt, recorded)
                if common > shared:
                    nearest, shared = (trajectory, index, recorded), common
        if nearest is None:
            return "nothing is recorded here"
        trajectory, index, recorded = nearest
        asked_ids, recorded_ids = _ids(prompt), _ids(recorded)
        context = self._vocabulary.decode(asked_ids[max(0, shared - CONTEXT_TOKENS) : shared])
        return (
            f"no recorded call has this prompt. The nearest is step {index} of trajectory {trajectory.uid!r}: the "
            f"first {shared} of {len(asked_ids)} tokens agree, up to {context!r}. Then the recording has "
            f"{self._shown(recorded_ids, shared)}, and this call {self._shown(asked_ids, shared)}"
        )

    def _shown(self, ids: list[int], at: int) -> str:
        if at >= len(ids):
            return "its end"
        rest = "…" if len(ids) > at + SHOWN_TOKENS else ""
        return repr(self._vocabulary.decode(ids[at : at + SHOWN_TOKENS]) + rest)


def trajectories_of(source: PoolSource, channel: str | None, trajectory_uid: str | None) -> Iterator[Trajectory]:
    """The trajectories of a source, oldest first, also those that were consumed, where they can still be read."""
    for name in [channel] if channel is not None else list(source.stats()["channels"]):
        uids: dict[str, None] = {}
        cursor: str | None = "0"
        while cursor is not None:
            page = source.steps(name, cursor, ROWS_A_PAGE)
            uids |= dict.fromkeys(row["trajectory_uid"] for row in page["items"])
            cursor = page["next"]
        for trajectory in source.consumed(name):
            if trajectory_uid in (None, trajectory.uid):
                yield trajectory
        for uid in uids if trajectory_uid is None else [uid for uid in uids if uid == trajectory_uid]:
            try:
                yield source.trajectory(name, uid)
            except (Gone, NotFound):
                continue  # it left the pool meanwhile


def _answer(trajectory: Trajectory, index: int) -> RecordedAnswer:
    record = trajectory.tree.records[index]
    extra = record.head.unpack_extra()
    ids = _ids(record.ids)[record.head.n_prompt :]
    log_probs: list[float | None] = [None] * len(ids)
    if packed := record.log_probs:
        log_probs = [None if math.isnan(value) else value for value in floats_array(packed).tolist()]
    stop = extra.metadata.get("stop_reason")
    return RecordedAnswer(
        trajectory_uid=trajectory.uid,
        step_index=index,
        ids=ids,
        log_probs=log_probs,
        finish_reason=extra.finish_reason or "stop",
        stop_reason=stop if isinstance(stop, str | int) else None,
    )


def _packed(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


def _ids(packed: bytes) -> list[int]:
    found: list[int] = np.frombuffer(packed, "<i4").tolist()
    return found


def _digest(packed: bytes | bytearray | memoryview) -> bytes:
    return hashlib.blake2b(packed, digest_size=16).digest()
