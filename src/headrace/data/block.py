"""A batch of packed steps: small heads in a frame's header, arrays in its body.

A `Block` has heads, one run of int32 ids (each step's prompt, then its response), one run of float32 log-probs, and the
blobs (images, routed experts) that the heads name by hash. A `Record` is one step cut out of a Block, as the pool keeps
it. A head with `base >= 0` leaves out what an earlier step of its trajectory holds: its prompt is the first `keep`
tokens of that step's prompt and response, followed by its own `n_prompt`.

A Record's arrays and a Blob's bytes are in memory, or in a file (`stored`), read whenever they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from headrace.data.errors import FrameError, InvalidInput, shown
from headrace.data.frame import Buffer, checksum
from headrace.data.step import FloatArray, IntArray

#: Of a token's id (int32), and of its log-prob (float32).
TOKEN_BYTES = 4
#: Of a step's metadata and sampling, packed: they are kept in memory, and written with every commit.
MAX_METADATA_BYTES = 1 << 20
T = TypeVar("T")
_I4, _F4 = np.dtype("<i4"), np.dtype("<f4")


class StepExtra(msgspec.Struct, omit_defaults=True):
    """What few steps carry, or what is read rarely: kept encoded inside the head. Unknown fields are ignored."""

    metadata: dict[str, Any] = {}
    finish_reason: str | None = None
    sampling: dict[str, Any] | None = None
    multi_modal_data: dict[str, Any] | None = None
    routed_experts: dict[str, Any] | None = None
    call_id: str | None = None
    version_spans: tuple[tuple[int, int], ...] | None = None
    quarantined: str | None = None
    trainable: bool = True
    quality: float | None = None
    tags: tuple[str, ...] = ()
    note: str | None = None


class StepExtraPeek(msgspec.Struct, frozen=True):
    """The fields of `StepExtra` that are looked at whenever a step comes in; the others are passed over."""

    call_id: str | None = None
    quarantined: str | None = None


class StepHead(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One step without its arrays. New fields go to the end, with a default: old frames stay readable."""

    trajectory_uid: str
    prompt_uid: str
    n_prompt: int
    n_response: int
    has_log_probs: bool
    step_index: int = -1
    created_at: float = 0.0
    policy_version: int = -1
    reward: float | None = None
    is_last: bool = False
    base: int = -1
    keep: int = 0
    extra: bytes = b""
    blobs: tuple[bytes, ...] = ()

    def unpack_extra(self) -> StepExtra:
        """All of the extra, decoded; `FrameError` where it cannot be."""
        return decoded(_extra_decoder, self.extra, "a step's extra") if self.extra else StepExtra()

    def peek(self) -> StepExtraPeek:
        """What every incoming step is asked for, without decoding the rest; `FrameError` where it cannot be decoded."""
        global _peeked
        extra = self.extra
        if not extra:
            return StepExtraPeek()
        last, found = _peeked
        if last is not extra:
            found = decoded(_peek_decoder, extra, "a step's extra")
            _peeked = extra, found
        return found


class BlockHeader(msgspec.Struct, array_like=True):
    """How a Block lies in a frame's body: ids, log-probs, then the blobs in order."""

    heads: list[StepHead]
    ids: int
    log_probs: int
    blobs: list[tuple[bytes, int]] = []


def no_extension(code: int, data: memoryview) -> Any:
    """What a decoder says to msgpack's extension types: nothing here writes one, and none has a form in JSON."""
    raise FrameError(f"a value of msgpack's extension type {code}; there are numbers, text, bytes, lists and maps")


def decoded(decoder: msgspec.msgpack.Decoder[T], data: Buffer, what: str) -> T:
    """What bytes that are checked to be undamaged hold; `FrameError` where that is not what the decoder reads."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FrameError(f"{what} cannot be read: {error}") from None
    except RecursionError:
        raise FrameError(f"{what} cannot be read: it is nested too deep") from None


_encoder = msgspec.msgpack.Encoder(enc_hook=lambda value: to_plain(value))
_extra_decoder = msgspec.msgpack.Decoder(StepExtra, ext_hook=no_extension)
_peek_decoder = msgspec.msgpack.Decoder(StepExtraPeek, ext_hook=no_extension)
_value_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=no_extension)
#: The extra that was looked into last, and what it held: a submit asks the same step several times in a row.
_peeked: tuple[bytes, StepExtraPeek] = b"", StepExtraPeek()


def to_plain(value: Any) -> Any:
    """A value of numpy's, which msgpack does not know, as plain Python; `InvalidInput` for anything else."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise InvalidInput(
        f"{shown(value)} of type {type(value).__name__} is no JSON value; use numbers, text, lists and dicts"
    )


class StoredBytes(Protocol):
    """Bytes that lie in a file; each reading checks them against their sum."""

    def read(self) -> bytes: ...


class StoredArrays(Protocol):
    """A step's arrays that lie in a file; each reading checks them against their sum."""

    @property
    def fingerprint(self) -> int:
        """CRC32C of the sampled ids and their log-probs, as the pool's tombstones keep it."""

    def read(self, head: StepHead) -> tuple[bytes, bytes]:
        """The ids and the log-probs of the step with this head."""


class Blob:
    """Bytes that several steps may share: kept once, for as long as a record refers to it.

    `uses` counts the live steps of a pool that do; what only a reader still holds has none. `stored`: where its bytes
    lie, if not (only) in memory. `freed` hears how many bytes of memory go with it.
    """

    __slots__ = ("__weakref__", "digest", "freed", "in_memory", "size", "stored", "uses")

    def __init__(self, digest: bytes, data: bytes | None, size: int = -1, stored: StoredBytes | None = None) -> None:
        self.digest = digest
        self.in_memory = data
        self.size = len(data) if data is not None else size
        self.stored = stored
        self.uses = 0
        self.freed: Callable[[int], None] | None = None

    @property
    def data(self) -> bytes:
        """Its bytes, read where they are not in memory."""
        if self.in_memory is not None:
            return self.in_memory
        assert self.stored is not None
        return self.stored.read()

    def __del__(self) -> None:
        if self.freed is not None:
            self.freed(self.size)


class Record(msgspec.Struct, eq=False, gc=False):
    """One step as it is kept: its head, its own ids (prompt past `keep`, then response) and its log-probs.

    Neither it nor its head can be part of a cycle: millions of them are no work for the garbage collector.

    `stored`: where its arrays lie, if not (only) in memory; those in memory are None then, both or neither.
    """

    head: StepHead
    ids_in_memory: bytes | None
    log_probs_in_memory: bytes | None
    blobs: tuple[Blob, ...] = ()
    stored: StoredArrays | None = None

    @property
    def ids(self) -> bytes:
        """Its own ids, packed; read where they are not in memory."""
        ids = self.ids_in_memory
        return ids if ids is not None else self.arrays()[0]

    @property
    def log_probs(self) -> bytes:
        """Its log-probs, packed; read where they are not in memory."""
        log_probs = self.log_probs_in_memory
        return log_probs if log_probs is not None else self.arrays()[1]

    def arrays(self) -> tuple[bytes, bytes]:
        """Ids and log-probs; read where they are not in memory."""
        ids, log_probs = self.ids_in_memory, self.log_probs_in_memory
        if ids is not None and log_probs is not None:
            return ids, log_probs
        assert self.stored is not None
        return self.stored.read(self.head)

    @property
    def end(self) -> int:
        """Tokens of the whole prompt and response."""
        head = self.head
        return head.keep + head.n_prompt + head.n_response

    @property
    def array_bytes(self) -> int:
        """Bytes of its ids and log-probs, wherever they are."""
        head = self.head
        return ids_bytes(head) + log_probs_bytes(head)

    @property
    def response(self) -> bytes:
        """The sampled ids, packed."""
        return self.ids[self.head.n_prompt * TOKEN_BYTES :]


class BlockPlace(Protocol):
    """Where a Block's body lies in a file: what is in it can be read again from there."""

    def arrays(self, ids_at: int, log_probs_at: int, record: Record) -> StoredArrays:
        """The arrays of a record that is in memory, by where they begin in the body."""

    def blob(self, at: int, data: Buffer) -> StoredBytes:
        """The same for a blob."""


class Block:
    """A batch of packed steps: heads, ids, log-probs and blobs, as the module describes. `place`: where it lies in a
    file, once it was written, or read."""

    __slots__ = ("_blobs_at", "_body_crc", "_records", "blobs", "heads", "ids", "log_probs", "place")

    def __init__(self, heads: list[StepHead], ids: Buffer, log_probs: Buffer, blobs: dict[bytes, Buffer]) -> None:
        self.heads = heads
        self.ids = ids
        self.log_probs = log_probs
        self.blobs = blobs
        self._records: list[Record] | None = None
        self._body_crc: int | None = None
        self._blobs_at: dict[bytes, int] | None = None
        self.place: BlockPlace | None = None

    @classmethod
    def of(cls, records: Iterable[Record], blobs: dict[bytes, Buffer] | None = None) -> Block:
        """The records as a block; their own blobs come along unless others are given."""
        kept = list(records)
        if blobs is None:
            blobs = {blob.digest: blob.data for record in kept for blob in record.blobs}
        block = cls(
            [record.head for record in kept],
            b"".join([record.ids for record in kept]),
            b"".join([record.log_probs for record in kept]),
            blobs,
        )
        block._records = kept
        return block

    def header(self) -> BlockHeader:
        """How `body` is laid out."""
        sizes = [(digest, len(blob)) for digest, blob in self.blobs.items()]
        return BlockHeader(self.heads, len(self.ids), len(self.log_probs), sizes)

    def body(self) -> list[Buffer]:
        return [self.ids, self.log_probs, *self.blobs.values()]

    def body_crc(self) -> int:
        """What a frame with this body needs; summed once."""
        if self._body_crc is None:
            self._body_crc = checksum(self.body())
        return self._body_crc

    def prepare(self) -> None:
        """Does, ahead of time and outside of any lock, what does not depend on what a pool makes of the block."""
        self.body_crc()
        self.records()

    def records(self) -> list[Record]:
        """Each step with bytes of its own, so that one kept step does not keep the whole batch in memory. Cut once."""
        if self._records is None:
            self._records = self._cut()
        return self._records

    def placed_records(self) -> Iterator[tuple[Record, int, int]]:
        """The records, each with where its ids and its log-probs begin in the body."""
        at, lp_at = 0, len(self.ids)
        for record in self.records():
            head = record.head
            yield record, at, lp_at
            at += ids_bytes(head)
            lp_at += log_probs_bytes(head)

    def blob_at(self, digest: bytes) -> int:
        """Where a blob begins in the body."""
        if self._blobs_at is None:
            at = len(self.ids) + len(self.log_probs)
            self._blobs_at = {}
            for each, data in self.blobs.items():
                self._blobs_at[each] = at
                at += len(data)
        return self._blobs_at[digest]

    def _cut(self) -> list[Record]:
        ids, probs = self.ids, self.log_probs
        found: list[Record] = []
        at = lp_at = 0
        for head in self.heads:
            end = at + (head.n_prompt + head.n_response) * TOKEN_BYTES
            lp_end = lp_at + (head.n_response * TOKEN_BYTES if head.has_log_probs else 0)
            found.append(Record(head, bytes(ids[at:end]), bytes(probs[lp_at:lp_end])))
            at, lp_at = end, lp_end
        return found


def ids_bytes(head: StepHead) -> int:
    """Bytes of a step's own ids."""
    return (head.n_prompt + head.n_response) * TOKEN_BYTES


def log_probs_bytes(head: StepHead) -> int:
    """Bytes of a step's log-probs."""
    return head.n_response * TOKEN_BYTES if head.has_log_probs else 0


def block_layout(records: Sequence[Record], blobs: dict[bytes, Buffer]) -> tuple[BlockHeader, list[Buffer]]:
    """A Block of these records for a frame, header and body, without joining its arrays first."""
    ids: list[Buffer] = [record.ids for record in records]
    probs: list[Buffer] = [record.log_probs for record in records if record.log_probs]
    sizes = [(digest, len(data)) for digest, data in blobs.items()]
    header = BlockHeader([record.head for record in records], sum(map(len, ids)), sum(map(len, probs)), sizes)
    return header, [*ids, *probs, *blobs.values()]


def read_block(header: BlockHeader, body: memoryview) -> Block:
    """The Block in a frame's body; lengths that do not add up are a `FrameError`."""
    ids_len = lp_len = 0
    for head in header.heads:
        if head.n_prompt < 0 or head.n_response < 0 or head.keep < 0:
            raise FrameError("a step's head holds a negative length")
        if head.base < 0 and head.keep:
            raise FrameError(f"a step's head builds on {head.keep} tokens of no step")
        ids_len += (head.n_prompt + head.n_response) * TOKEN_BYTES
        if head.has_log_probs:
            lp_len += head.n_response * TOKEN_BYTES
    if any(size < 0 for _, size in header.blobs):
        raise FrameError("a blob's length is negative")
    total = header.ids + header.log_probs + sum(size for _, size in header.blobs)
    if header.ids != ids_len or header.log_probs != lp_len or total != len(body):
        raise FrameError(
            f"the heads speak of {ids_len} bytes of ids and {lp_len} of log-probs, the block of {header.ids} and "
            f"{header.log_probs} in a body of {len(body)}"
        )
    at = header.ids + header.log_probs
    blobs: dict[bytes, Buffer] = {}
    for digest, size in header.blobs:
        blobs[digest] = body[at : at + size]
        at += size
    return Block(header.heads, body[: header.ids], body[header.ids : header.ids + header.log_probs], blobs)


def pack_value(value: Any) -> bytes:
    """A value of metadata, or a step's whole extra, in msgpack; `InvalidInput` where it has no such form."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"metadata and sampling hold JSON values with string keys: {error}") from None


def unpack_value(data: Buffer) -> Any:
    """The value that `pack_value` packed; `FrameError` where it cannot be read."""
    return decoded(_value_decoder, data, "a value of a step's metadata")


def pack_extra(extra: StepExtra) -> bytes:
    """The extra as a head holds it; `InvalidInput` where it has no msgpack form, or is too large."""
    encoded = pack_value(extra)
    if len(encoded) > MAX_METADATA_BYTES:
        raise InvalidInput(
            f"metadata and sampling take {len(encoded)} bytes; at most {MAX_METADATA_BYTES} a step are kept"
        )
    return encoded


def ids_array(data: Buffer) -> IntArray:
    """Packed token ids as an array over the same memory."""
    return np.frombuffer(data, _I4)


def floats_array(data: Buffer) -> FloatArray:
    """Packed log-probs as an array over the same memory."""
    return np.frombuffer(data, _F4)
