"""What a call on a pool is: an `Operation`, and the `Plan` that it makes.

An operation is a record of the call's arguments. It knows its name on the wire, how to carry itself out on a pool's
state, and what its caller gets for an answer. `Change` plans facts, `Read` only looks, `Upkeep` works on the journal's
files. `headrace.pool.operations` holds them all; `headrace.pool.calls` makes a pool's methods of them.

Making a plan changes nothing. The pool writes its facts to the journal, applies them, and only then answers; a plan
whose facts could not be written is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from headrace.data.block import Block
from headrace.data.step import check_uid
from headrace.pool.config import DEFAULT_CHANNEL, MAX_CHANNEL_NAME
from headrace.pool.facts import Fact
from headrace.pool.scored.types import read as as_record
from headrace.pool.state import State

Answer = TypeVar("Answer")

#: The answer to a remote caller whose long wait is sent as several short ones: nothing yet, ask again.
PENDING = "pending"


class Operation(msgspec.Struct, Generic[Answer], frozen=True, forbid_unknown_fields=True):
    """One call on a pool, whose caller gets an `Answer`. Its fields are the arguments of the call, on the wire too.

    Arguments that come from this process are not checked when the record is made: `check` and `plan` do that.
    """

    #: The operation on the wire.
    name: ClassVar[str]
    #: Whether it may wait, for as long as its `timeout` says, for the channel to change.
    waits: ClassVar[bool] = False
    #: Why it is not sent again where its answer was lost, and what to do then; empty: it can be.
    sent_once: ClassVar[str] = ""
    #: Whether its `channel` may be None: it finds what it needs in any, or means all.
    any_channel: ClassVar[bool] = False

    @property
    def takes_long(self) -> bool:
        """Whether it may take long for other reasons than a wait: it rewrites or copies files."""
        return False

    def arguments(self) -> dict[str, Any]:
        """What is sent of it beside its name and its steps."""
        return msgspec.structs.asdict(self)

    def steps(self) -> Block | None:
        """The steps that are sent with it."""
        return None

    def result(self, caller: Any, answer: Any) -> Answer:
        """What the caller gets for the pool's answer. `caller` is the `BlockingPool` or `AsyncPool` of the call."""
        return answer  # type: ignore[no-any-return]

    def check(self) -> None:
        """`InvalidInput` where a name could not be looked up, or written down."""
        for name in _names(type(self)):
            value = getattr(self, name)
            if name == "channel":
                if value is not None or not self.any_channel:
                    check_uid(value, name, MAX_CHANNEL_NAME)
            elif value or name != "request_id":
                check_uid(value, name)

    def concerned(self, state: State) -> list[str]:
        """The channels that the call may look at; the empty name stands for the scored groups."""
        serving = state.scored.serving
        name: str | None = getattr(self, "channel", None)
        uid: str | None = getattr(self, "trajectory_uid", None)
        if name is not None:
            names = [name]
        elif uid is not None:
            names = state.known_in.names(uid) or [DEFAULT_CHANNEL]
        else:
            return ["", *state.channels]
        return ["", *names] if serving in names else names


@cache
def _names(kind: type[Operation[Any]]) -> tuple[str, ...]:
    """The arguments of an operation that name something."""
    names = ("channel", "trajectory_uid", "lease_id", "request_id")
    return tuple(name for name in names if name in kind.__struct_fields__)


@dataclass(slots=True)
class Plan:
    """The facts that a call decided on, the steps that go with them, and the answer once they are applied."""

    facts: Sequence[Fact] = field(default_factory=list)
    block: Block | None = None
    reply: Any = None
    # What the answer needs from the state after the facts were applied.
    after: Callable[[], Any] | None = None
    # The facts only clear the way: once they are applied, the call has to be planned again.
    again: bool = False


class MustWait(Exception):
    """There is no answer yet: wait for the channel to change, or for the deadline, and plan again."""


class Change(Operation[Answer], frozen=True):
    """An operation that may change the pool."""

    def plan(self, state: State, now: float) -> Plan:
        """What to do, decided by reading the state; `MustWait` where nothing can be done yet, `MustLoad` where payloads
        are to be read first."""
        raise NotImplementedError

    def gave_up(self) -> Any:
        """The answer where its wait timed out."""
        return None


class Read(Operation[Answer], frozen=True):
    """An operation that changes nothing."""

    def read(self, state: State, now: float) -> Answer:
        """The answer, by what the state holds."""
        raise NotImplementedError


class Upkeep(Operation[None], frozen=True):
    """Work on the journal's files, which the pool does outside of its lock."""

    @property
    def takes_long(self) -> bool:
        return True


def _concerned(state: State) -> list[str]:
    """The scored groups, and the channel with which they serve each other."""
    serving = state.scored.serving
    return ["", serving] if serving is not None else [""]


class ScoredChange(Change[Answer], frozen=True):
    """An operation that may change the scored groups."""

    def concerned(self, state: State) -> list[str]:
        return _concerned(state)


class ScoredRead(Read[Answer], frozen=True):
    """An operation that looks at the scored groups."""

    def concerned(self, state: State) -> list[str]:
        return _concerned(state)


def result_as(kind: type[Any]) -> Any:
    """An operation's `result` for an answer that is a record, or None; from another process it comes as a dict."""

    def result(self: Any, caller: Any, answer: Any) -> Any:
        return None if answer is None else as_record(answer, kind)

    return result


class Receipt(msgspec.Struct, frozen=True):
    """What became of a submit. `indices` has one entry a step: its step index, or -1 where it came too late."""

    accepted: int
    duplicates: int = 0
    late: int = 0
    indices: tuple[int, ...] = ()


class Completion(msgspec.Struct, frozen=True):
    """`status`: ok, late (the group is with a consumer, or gone), too_few (it has fewer steps than asked for, and stays
    open) or unknown; `steps`: how many the trajectory has."""

    status: str
    steps: int = 0
