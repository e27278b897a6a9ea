"""What the calls about scored groups take and answer.

Numbers are bounded, so that whatever is written down can be read back.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from headrace.data.errors import InvalidInput, shown
from headrace.data.scored.piece import Piece
from headrace.data.step import check_count, check_finite, check_uid

T = TypeVar("T")

#: Most sequences of a batch, and of a group.
MAX_SEQUENCES = 2**31 - 1
Sequences = Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)]
Tokens = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Integer = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Name = Annotated[str, Meta(max_length=10_000)]
Ratio = Annotated[float, Meta(ge=-1e9, le=1e9)]

#: Most characters of an idempotency key.
MAX_KEY_CHARACTERS = 512

Status = Literal["received", "buffered"]


class Registration(msgspec.Struct, frozen=True):
    """What a trainer says about its run. `batch_groups`: it takes so many whole groups of any size by `fetch_batch`, in
    place of exactly `batch_size` sequences."""

    wandb_group: Name
    wandb_project: Name
    batch_size: Sequences
    max_token_len: Tokens
    checkpoint_dir: Name
    save_checkpoint_interval: Integer
    starting_step: Integer
    num_steps: Integer
    batch_groups: Sequences | None = None


class RegistrationResult(msgspec.Struct, frozen=True):
    """The answer to a trainer's registration. `warning`: what of its registration does not hold, since a trainer
    registered before with other settings."""

    uuid: int
    warning: str | None = None


class EnvRegistration(msgspec.Struct, frozen=True):
    """What an environment says about itself; `min_batch_allocation` is the share of every batch that it asks for."""

    max_token_length: Tokens
    desired_name: Name
    weight: Ratio
    group_size: Sequences
    min_batch_allocation: Ratio | None = None


class EnvRegistered(msgspec.Struct, frozen=True):
    """The answer to an environment's registration. `misfit`: why no batch can hold its groups as long as no groups of
    another size come, where that is so."""

    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int
    misfit: str = ""


class Posting(msgspec.Struct, frozen=True, gc=False):
    """A scored group on its way in. `key`: the same from the same environment is the same group, sent again."""

    piece: Piece
    sequences: int
    env_id: int | None = None
    key: str = ""


class Posted(msgspec.Struct, frozen=True):
    """What became of a posting: it is in the queue (`received`), or in its environment's buffer, which then holds
    `buffer_size` sequences. `duplicate`: it was here before. `misfit`: why no batch will ever hold it, where that is
    so: it is a dead letter then."""

    status: Status
    buffer_size: int = 0
    duplicate: bool = False
    misfit: str = ""


class ScoredBatch(msgspec.Struct, frozen=True):
    """Scored groups for a trainer, out under a lease: `desk_ack` once they arrived, `desk_nack` where they did not.
    `repeated`: some were out before, and may have arrived then."""

    lease: str
    pieces: list[Piece]
    step: int
    repeated: bool = False


class ScoredInfo(msgspec.Struct, frozen=True):
    """What the trainer registered with, and how far it is. `started`: it has asked for its first batch, so that
    environments may register. `batch_size`: sequences of a batch, where a trainer is registered; of one that takes
    whole groups, as many as its groups have at most. `ended`: it has said that it takes no more. `by_fetch`: nobody
    registered, a consumer fetched from the channel that is served."""

    registration: Registration | None
    started: bool
    environments: int
    serving: str | None = None
    batch_size: int | None = None
    ended: bool = False
    by_fetch: bool = False


class ScoredStatus(msgspec.Struct, frozen=True):
    """How many batches were handed out, and how many groups wait. `dead_letters`: groups since the last reset that
    fitted no batch, by why; `misfit`: why the last of them did not, until a trainer or an environment registers and
    sizes may fit. `unmovable`: why a group that waits cannot be fetched from the channel that is served, where one was
    found that cannot: only `desk_batch` has it."""

    step: int
    queue_size: int  # groups
    dead_letters: dict[str, int] = msgspec.field(default_factory=dict)
    misfit: str = ""
    unmovable: str = ""


class ScoredEnvStatus(msgspec.Struct, frozen=True):
    """The queue as one environment sees it, counted in its groups. `misfit`: why what it posted last fits no batch,
    where that is so; the queue's sizes count that too. `unmovable`: why a group of its that waits cannot be fetched
    from the channel that is served, where that is so."""

    step: int
    queue_size: int
    env_weight: float
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    misfit: str = ""
    ended: bool = False  # the trainer takes no more: environments may finish
    num_steps: int = -1  # of the trainer's run, -1 where it did not say
    unmovable: str = ""


def checked(value: Any, kind: type[T], name: str) -> T:
    """The value as the journal will give it back; `InvalidInput` where it could not, or is of another type."""
    try:
        found = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError, TypeError) as error:
        raise InvalidInput(f"{name}: {error}; it was {shown(value)}") from None
    for field in getattr(kind, "__struct_fields__", ()):
        if isinstance(number := getattr(found, field), float):
            check_finite(number, f"{name}: {field}")
    return found


def check_posting(posting: Posting, at: int) -> None:
    """`InvalidInput` for a group that could not be written down, or not be read back."""
    if not isinstance(posting, Posting):
        raise InvalidInput(f"group {at} must be a Posting, not {shown(posting)}")
    check_count(posting.sequences, f"group {at}: sequences", 1, MAX_SEQUENCES)
    check_count(posting.piece.size, f"group {at}: size")
    check_count(posting.piece.crc, f"group {at}: crc", 0, 2**32 - 1)
    if posting.env_id is not None:
        check_count(posting.env_id, f"group {at}: env_id", -(2**63), 2**63 - 1)
    if posting.key:
        check_uid(posting.key, f"group {at}: key", MAX_KEY_CHARACTERS)
    if not isinstance(posting.piece.data, bytes):
        raise InvalidInput(f"group {at}: data must be bytes, not {shown(posting.piece.data)}")


def read(value: Any, kind: type[T]) -> T:
    """An answer as the record that it is: it comes as one from this process, and plain from another."""
    return value if isinstance(value, kind) else msgspec.convert(value, kind)
