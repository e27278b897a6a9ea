"""A plan: the facts a call decided on, the steps that go with them, and the answer once they are carried out.

Making a plan changes nothing. A shell writes its facts to the journal, applies them, and only then answers; a plan
whose facts could not be written is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.data.block import Block
from headrace.pool.facts import Fact

#: The answer to a remote caller who waits in pieces: nothing yet, ask again.
PENDING = "pending"


@dataclass(slots=True)
class Plan:
    facts: Sequence[Fact] = field(default_factory=list)
    block: Block | None = None
    reply: Any = None
    # What the answer needs from the state after the facts were applied.
    after: Callable[[], Any] | None = None
    # The facts only clear the way: once they are applied, the call has to be planned again.
    again: bool = False


class MustWait(Exception):
    """There is no answer yet: wait for the channel to change, or for the deadline, and plan again."""


class Receipt(msgspec.Struct, frozen=True):
    """What became of a submit. `indices` has one entry a step: its step index, or -1 where it came too late."""

    accepted: int
    duplicates: int = 0
    late: int = 0
    indices: tuple[int, ...] = ()


class Completion(msgspec.Struct, frozen=True):
    """`status`: ok, late (the group is with a consumer, or gone) or unknown; `steps`: how many the trajectory has."""

    status: str
    steps: int = 0
