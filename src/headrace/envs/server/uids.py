"""Which trajectory a sequence was recorded as, so that steps behind a gateway and scored groups carry the same uids.

Rollouts of one item share a `prompt_uid`: `new_group` sets it for everything that runs inside, other tasks included. A
sequence is known again by its ids, however an environment made its group of it.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

#: How many sequences are remembered; a group is scored soon after it was sampled.
REMEMBERED = 65_536

_group: ContextVar[str | None] = ContextVar("headrace_env_group", default=None)


@contextmanager
def new_group(prompt_uid: str | None = None) -> Iterator[str]:
    """What is sampled inside belongs to one group."""
    uid = prompt_uid or uuid.uuid4().hex
    token = _group.set(uid)
    try:
        yield uid
    finally:
        _group.reset(token)


def group_uid() -> str:
    """The group that is being sampled; one of its own where nobody said."""
    return _group.get() or uuid.uuid4().hex


class Uids(msgspec.Struct, frozen=True):
    trajectory_uid: str
    prompt_uid: str


class Names:
    """Uids by the ids of sequences; the oldest are forgotten first."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._known: OrderedDict[bytes, Uids] = OrderedDict()

    def note(self, tokens: Sequence[int], uids: Uids) -> None:
        self._known[_key(tokens)] = uids
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def of(self, tokens: Sequence[int]) -> Uids | None:
        return self._known.get(_key(tokens))

    def named(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A scored group whose `overrides` name each known sequence's uids, and `group_overrides` their group's."""
        made = dict(group)
        found = [self.of(tokens) for tokens in group.get("tokens") or ()] if self._known else []
        before = list(group.get("overrides") or []) or [None] * len(found)
        if not any(found) or len(before) != len(found):
            return made
        made["overrides"] = [
            {**(given or {}), **(msgspec.structs.asdict(uids) if uids else {})}
            for given, uids in zip(before, found, strict=True)
        ]
        prompts = {uids.prompt_uid for uids in found if uids}
        if len(prompts) == 1 and all(found):
            made["group_overrides"] = {**(group.get("group_overrides") or {}), "prompt_uid": prompts.pop()}
        return made


def _key(tokens: Sequence[int]) -> bytes:
    return blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()
