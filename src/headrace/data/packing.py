"""Steps in their packed form: small heads in a frame's header, arrays in its body.

A `Block` is a batch of packed steps: heads, one run of int32 ids (each step's prompt, then its response), one run of
float32 log-probs, and the blobs (images, routed experts) that the heads name by hash. A `Record` is one step cut out
of a Block, as the pool keeps it. A head with `base >= 0` leaves out what an earlier step of its trajectory holds: its
prompt is the first `keep` tokens of that step's prompt and response, followed by its own `n_prompt`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Any

import msgspec
import numpy as np

from headrace.data.errors import FrameError, InvalidInput, shown
from headrace.data.frame import Buffer, checksum
from headrace.data.step import (
    INT32_MAX,
    MAX_UID,
    FloatArray,
    IntArray,
    Step,
    check_spans,
    check_uid,
    count,
    finite,
    step_from_dict,
)

TOKEN = 4  # bytes of an id and of a log-prob
_I4, _F4 = np.dtype("<i4"), np.dtype("<f4")
MAX_METADATA = 1 << 20
DIGEST_SIZE = 16  # bytes of a blob's hash
_BLOB = "$blob"


class Extra(msgspec.Struct, omit_defaults=True):
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


class Peek(msgspec.Struct):
    """The fields of `Extra` that are looked at whenever a step comes in; the others are passed over."""

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

    def unpack_extra(self) -> Extra:
        return _extra_decoder.decode(self.extra) if self.extra else Extra()

    def peek(self) -> Peek:
        return _peek_decoder.decode(self.extra) if self.extra else Peek()


class BlockHeader(msgspec.Struct, array_like=True):
    """How a Block lies in a frame's body: ids, log-probs, then the blobs in order."""

    heads: list[StepHead]
    ids: int
    log_probs: int
    blobs: list[tuple[bytes, int]] = []


_encoder = msgspec.msgpack.Encoder(enc_hook=lambda value: plain(value))
_extra_decoder = msgspec.msgpack.Decoder(Extra)
_peek_decoder = msgspec.msgpack.Decoder(Peek)


def plain(value: Any) -> Any:
    """A value that msgpack does not know as one that it does: numpy's numbers and arrays."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise InvalidInput(
        f"{shown(value)} of type {type(value).__name__} is no JSON value; use numbers, text, lists and dicts"
    )


class Blob:
    """Bytes that several steps may share: kept once, for as long as a record refers to it.

    `uses` counts the live steps of a pool that do; what only a reader still holds has none.
    """

    __slots__ = ("__weakref__", "data", "digest", "uses")

    def __init__(self, digest: bytes, data: bytes) -> None:
        self.digest = digest
        self.data = data
        self.uses = 0


class Record(msgspec.Struct, eq=False, gc=False):
    """One step as it is kept: its head, its own ids (prompt past `keep`, then response) and its log-probs.

    Neither it nor its head can be part of a cycle: millions of them are no work for the garbage collector.
    """

    head: StepHead
    ids: bytes
    log_probs: bytes
    blobs: tuple[Blob, ...] = ()

    @property
    def end(self) -> int:
        """Tokens of the whole prompt and response."""
        head = self.head
        return head.keep + head.n_prompt + head.n_response

    @property
    def response(self) -> bytes:
        return self.ids[self.head.n_prompt * TOKEN :]


class Block:
    """A batch of packed steps; see the module."""

    __slots__ = ("_body_crc", "_records", "blobs", "heads", "ids", "log_probs")

    def __init__(self, heads: list[StepHead], ids: Buffer, log_probs: Buffer, blobs: dict[bytes, Buffer]) -> None:
        self.heads = heads
        self.ids = ids
        self.log_probs = log_probs
        self.blobs = blobs
        self._records: list[Record] | None = None
        self._body_crc: int | None = None

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

    def _cut(self) -> list[Record]:
        ids, probs = self.ids, self.log_probs
        found: list[Record] = []
        at = lp_at = 0
        for head in self.heads:
            end = at + (head.n_prompt + head.n_response) * TOKEN
            lp_end = lp_at + (head.n_response * TOKEN if head.has_log_probs else 0)
            found.append(Record(head, bytes(ids[at:end]), bytes(probs[lp_at:lp_end])))
            at, lp_at = end, lp_end
        return found


def lay_out(records: Sequence[Record], blobs: dict[bytes, Buffer]) -> tuple[BlockHeader, list[Buffer]]:
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
        ids_len += (head.n_prompt + head.n_response) * TOKEN
        if head.has_log_probs:
            lp_len += head.n_response * TOKEN
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


def pack(steps: Sequence[Step | dict[str, Any]]) -> Block:
    """Steps as one Block, every value checked; `InvalidInput` names the step and the field, and nothing is packed."""
    heads: list[StepHead] = []
    ids: list[Any] = []
    probs: list[Any] = []
    blobs: dict[bytes, Buffer] = {}
    for at, given in enumerate(steps):
        try:
            step = given if type(given) is Step else step_from_dict(given)  # type: ignore[arg-type]
            heads.append(_head(step, blobs))
        except InvalidInput as error:
            raise InvalidInput(f"step {at}: {error}; none of the {len(steps)} steps was taken") from None
        ids.append(step.prompt_ids)
        ids.append(step.response_ids)
        if step.rollout_log_probs is not None:
            probs.append(step.rollout_log_probs)
    block = Block(heads, b"".join(ids), b"".join(probs), blobs)
    check_values(block)
    return block


def check_heads(block: Block) -> None:
    """Heads that come from another process hold what a Step would: the first value that could not is named."""
    for at, head in enumerate(block.heads):
        if _is_sound(head):
            continue
        try:
            check_uid(head.trajectory_uid, "trajectory_uid")
            check_uid(head.prompt_uid, "prompt_uid")
            count(head.n_response, "n_response", 1)
            count(head.keep + head.n_prompt, "n_prompt", 1)
            count(head.step_index, "step_index", -1, INT32_MAX)
            count(head.policy_version, "policy_version", -1, INT32_MAX)
            finite(head.created_at, "created_at")
            if head.reward is not None:
                finite(head.reward, "reward")
            if head.base < 0 and (head.base != -1 or head.keep):
                raise InvalidInput(f"keep is {head.keep} with base {head.base}; it is 0 where a step builds on none")
            extra = head.unpack_extra()
            if extra.quality is not None:
                finite(extra.quality, "quality")
            if extra.version_spans is not None:
                check_spans(extra.version_spans, head.n_response)
        except msgspec.MsgspecError as error:
            raise InvalidInput(f"step {at}: extra cannot be read: {error}; {_none_taken(block)}") from None
        except InvalidInput as error:
            raise InvalidInput(f"step {at}: {error}; {_none_taken(block)}") from None
        for digest in head.blobs:
            if len(digest) != DIGEST_SIZE:
                raise InvalidInput(f"step {at}: blobs holds {shown(digest)}, which is no digest; {_none_taken(block)}")


def _is_sound(head: StepHead) -> bool:
    """Whether nothing in a head without extra can be wrong: most heads, at a fraction of what a full check costs."""
    return (
        not head.extra
        and not head.blobs
        and head.base == -1
        and head.keep == 0
        and 0 < len(head.trajectory_uid) <= MAX_UID
        and 0 < len(head.prompt_uid) <= MAX_UID
        and head.n_prompt > 0
        and head.n_response > 0
        and -1 <= head.step_index <= INT32_MAX
        and -1 <= head.policy_version <= INT32_MAX
        and isfinite(head.created_at)
        and (head.reward is None or isfinite(head.reward))
    )


def _none_taken(block: Block) -> str:
    return f"none of the {len(block.heads)} steps was taken"


def check_values(block: Block) -> None:
    """Ids of at least 0 and finite log-probs; the first that is not is named."""
    ids = np.frombuffer(block.ids, "<i4")
    if len(ids) and int(ids.min()) < 0:
        at, field, offset = _locate(block, int(np.flatnonzero(ids < 0)[0]))
        raise InvalidInput(
            f"step {at}: {field}[{offset}] is {int(ids[np.flatnonzero(ids < 0)[0]])}; token ids lie in 0..2147483647; "
            + _none_taken(block)
        )
    probs = np.frombuffer(block.log_probs, "<f4")
    if not np.isfinite(probs).all():
        bad = int(np.flatnonzero(~np.isfinite(probs))[0])
        first = 0
        for at, head in enumerate(block.heads):
            n = head.n_response if head.has_log_probs else 0
            if bad < first + n:
                raise InvalidInput(
                    f"step {at}: rollout_log_probs[{bad - first}] is {probs[bad]}; it must be finite; "
                    + _none_taken(block)
                )
            first += n


def _locate(block: Block, token: int) -> tuple[int, str, int]:
    first = 0
    for at, head in enumerate(block.heads):
        if token < first + head.n_prompt:
            return at, "prompt_ids", token - first
        if token < first + head.n_prompt + head.n_response:
            return at, "response_ids", token - first - head.n_prompt
        first += head.n_prompt + head.n_response
    raise AssertionError("a token past the block")


def _head(step: Step, blobs: dict[bytes, Buffer]) -> StepHead:
    extra = b""
    used: tuple[bytes, ...] = ()
    if (
        step.metadata
        or step.sampling is not None
        or step.finish_reason is not None
        or step.call_id is not None
        or step.multi_modal_data is not None
        or step.routed_experts is not None
        or step.version_spans
        or step.quarantined is not None
        or not step.trainable
        or step.quality is not None
        or step.tags
        or step.note is not None
    ):
        extra, used = _pack_extra(step, blobs)
    base, keep = step.builds_on or (-1, 0)
    return StepHead(
        step.trajectory_uid,
        step.prompt_uid,
        len(step.prompt_ids),
        len(step.response_ids),
        step.rollout_log_probs is not None,
        -1 if step.step_index is None else step.step_index,
        step.created_at or 0.0,
        -1 if step.policy_version is None else step.policy_version,
        step.reward,
        step.is_last,
        base,
        keep,
        extra,
        used,
    )


def _pack_extra(step: Step, blobs: dict[bytes, Buffer]) -> tuple[bytes, tuple[bytes, ...]]:
    used: dict[bytes, Buffer] = {}
    media = _detach(step.multi_modal_data, used) if step.multi_modal_data is not None else None
    experts = _detach(step.routed_experts, used) if step.routed_experts is not None else None
    blobs.update(used)
    encoded = pack_extra(
        Extra(
            step.metadata,
            step.finish_reason,
            step.sampling,
            media,
            experts,
            step.call_id,
            step.version_spans,
            step.quarantined,
            step.trainable,
            step.quality,
            tuple(step.tags),
            step.note,
        )
    )
    return encoded, tuple(used)


def pack_extra(extra: Extra) -> bytes:
    try:
        encoded = _encoder.encode(extra)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"metadata and sampling hold JSON values with string keys: {error}") from None
    if len(encoded) > MAX_METADATA:
        raise InvalidInput(f"metadata and sampling take {len(encoded)} bytes; at most {MAX_METADATA} a step are kept")
    return encoded


def _detach(value: Any, blobs: dict[bytes, Buffer]) -> Any:
    """`value` with its bytes and arrays replaced by what finds them again in `blobs`."""
    if isinstance(value, bytes | bytearray | memoryview):
        digest = _digest(value)
        blobs[digest] = bytes(value)
        return {_BLOB: digest}
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value)
        if data.dtype.hasobject:
            raise InvalidInput(f"an array of type {data.dtype} cannot be kept; use numbers or bytes")
        raw = data.tobytes()
        digest = _digest(raw)
        blobs[digest] = raw
        return {_BLOB: digest, "dtype": data.dtype.str, "shape": list(value.shape)}
    if isinstance(value, dict):
        return {key: _detach(item, blobs) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_detach(item, blobs) for item in value]
    return value


def _attach(value: Any, blobs: dict[bytes, Buffer]) -> Any:
    if isinstance(value, dict):
        digest = value.get(_BLOB)
        if isinstance(digest, bytes):
            raw = blobs.get(digest)
            if raw is None:
                return None  # lost with a damaged journal; the step is quarantined for it
            return np.frombuffer(raw, value["dtype"]).reshape(value["shape"]) if "dtype" in value else bytes(raw)
        return {key: _attach(item, blobs) for key, item in value.items()}
    if isinstance(value, list):
        return [_attach(item, blobs) for item in value]
    return value


def _digest(data: Buffer) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_SIZE).digest()


def ids_array(data: Buffer) -> IntArray:
    return np.frombuffer(data, _I4)


def floats_array(data: Buffer) -> FloatArray:
    return np.frombuffer(data, _F4)


#: What a Step and its head's `Extra` hold alike.
_SHARED_FIELDS = [
    name
    for name in Extra.__struct_fields__
    if name in Step.__struct_fields__ and name not in ("multi_modal_data", "routed_experts")
]
#: Unpacked steps begin as copies of this one: their fields were checked when they were packed, and are only set.
_BLANK = Step(prompt_ids=[0], response_ids=[0], trajectory_uid="-")
_new: Callable[[], Step] = _BLANK.__copy__  # type: ignore[attr-defined]
_force = msgspec.structs.force_setattr


def unpack(record: Record, prompt: Buffer | None, blobs: dict[bytes, Buffer]) -> Step:
    """The Step of a record whose whole prompt is `prompt` (None: its own). Its arrays are read-only views."""
    head, own = record.head, ids_array(record.ids)
    whole = own[: head.n_prompt] if prompt is None else ids_array(prompt)
    return _step(head, whole, own[head.n_prompt :], floats_array(record.log_probs), blobs)


def unpack_block(block: Block) -> list[Step]:
    """The Steps of a block whose heads all hold their prompts whole. Their arrays are views of the block's memory."""
    ids, log_probs = ids_array(block.ids), floats_array(block.log_probs)
    steps: list[Step] = []
    at = lp_at = 0
    for head in block.heads:
        response_at = at + head.n_prompt
        end = response_at + head.n_response
        lp_end = lp_at + head.n_response if head.has_log_probs else lp_at
        steps.append(_step(head, ids[at:response_at], ids[response_at:end], log_probs[lp_at:lp_end], block.blobs))
        at, lp_at = end, lp_end
    return steps


def _step(
    head: StepHead, prompt: IntArray, response: IntArray, log_probs: FloatArray, blobs: dict[bytes, Buffer]
) -> Step:
    step = _new()
    _force(step, "prompt_ids", prompt)
    _force(step, "response_ids", response)
    _force(step, "rollout_log_probs", log_probs if head.has_log_probs else None)
    _force(step, "trajectory_uid", head.trajectory_uid)
    _force(step, "prompt_uid", head.prompt_uid)
    _force(step, "step_index", head.step_index if head.step_index >= 0 else None)
    _force(step, "policy_version", head.policy_version if head.policy_version >= 0 else None)
    _force(step, "reward", head.reward)
    _force(step, "is_last", head.is_last)
    _force(step, "created_at", head.created_at or None)
    if not head.extra:
        _force(step, "metadata", {})
        return step
    extra = head.unpack_extra()
    _force(step, "multi_modal_data", _attach(extra.multi_modal_data, blobs))
    _force(step, "routed_experts", _attach(extra.routed_experts, blobs))
    for name in _SHARED_FIELDS:
        _force(step, name, getattr(extra, name))
    return step
