"""Steps into blocks and back: every value is checked on the way in, and nothing is copied that need not be."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.data.block import (
    MAX_METADATA_BYTES,
    Block,
    Record,
    StepExtra,
    StepHead,
    floats_array,
    ids_array,
    pack_extra,
    pack_value,
    unpack_value,
)
from headrace.data.errors import FrameError, HeadraceError, InvalidInput, shown
from headrace.data.frame import Buffer
from headrace.data.guidance import SCORED_GROUP
from headrace.data.step import (
    INT32_MAX,
    MAX_METADATA_DEPTH,
    MAX_UID_CHARACTERS,
    REWARD_INFO,
    REWARD_SOURCE,
    FloatArray,
    IntArray,
    Step,
    check_count,
    check_depth,
    check_finite,
    check_spans,
    check_uid,
    step_from_dict,
)

DIGEST_SIZE = 16  # bytes of a blob's hash
#: Bytes from which a packed value of a scored group's metadata is a blob: what an environment says of each token, or
#: sends as images, takes megabytes. Of the ten fields that such metadata has, the rest fits `MAX_METADATA_BYTES`.
LARGE_VALUE_BYTES = 1 << 16
_BLOB = "$blob"
#: Beside `_BLOB`: the blob is a packed value of metadata.
_PACKED = "packed"


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
        if _is_plainly_valid(head):
            continue
        try:
            check_uid(head.trajectory_uid, "trajectory_uid")
            check_uid(head.prompt_uid, "prompt_uid")
            check_count(head.n_response, "n_response", 1)
            check_count(head.keep + head.n_prompt, "n_prompt", 1)
            check_count(head.step_index, "step_index", -1, INT32_MAX)
            check_count(head.policy_version, "policy_version", -1, INT32_MAX)
            check_finite(head.created_at, "created_at")
            if head.reward is not None:
                check_finite(head.reward, "reward")
            if head.base < 0 and (head.base != -1 or head.keep):
                raise InvalidInput(f"keep is {head.keep} with base {head.base}; it is 0 where a step builds on none")
            _check_extra(head, block.blobs)
        except HeadraceError as error:
            raise InvalidInput(f"step {at}: {error}; {_none_taken(block)}") from None
        for digest in head.blobs:
            if len(digest) != DIGEST_SIZE:
                raise InvalidInput(f"step {at}: blobs holds {shown(digest)}, which is no digest; {_none_taken(block)}")


def _check_extra(head: StepHead, blobs: Mapping[bytes, Buffer]) -> None:
    """A head's extra holds what packing would have put there; `FrameError` or `InvalidInput` where it does not."""
    if len(head.extra) > MAX_METADATA_BYTES:
        raise InvalidInput(
            f"metadata and sampling take {len(head.extra)} bytes; at most {MAX_METADATA_BYTES} a step are kept"
        )
    extra = head.unpack_extra()
    if extra.quality is not None:
        check_finite(extra.quality, "quality")
    if extra.version_spans is not None:
        check_spans(extra.version_spans, head.n_response)
    held = {name: getattr(extra, name) for name in ("metadata", "sampling", "multi_modal_data", "routed_experts")}
    for name, value in held.items():
        if value and len(head.extra) > MAX_METADATA_DEPTH:  # a level takes a byte
            check_depth(value, name)
    for name in ("multi_modal_data", "routed_experts"):
        if held[name] is not None:
            _check_references(held[name], blobs, name)
    if SCORED_GROUP in extra.metadata:
        for value in extra.metadata.values():
            digest = large_value(value)
            if digest is not None and digest in blobs:  # a pool may have the blob already
                check_depth([unpack_value(blobs[digest])], "metadata")


def _check_references(value: Any, blobs: Mapping[bytes, Buffer], field: str) -> None:
    """Refuses an array that could not be put together again: a trainer would meet it, and no submitter."""
    if isinstance(value, dict) and isinstance(value.get(_BLOB), bytes):
        data = blobs.get(value[_BLOB])
        if data is None or "dtype" not in value:
            return  # a pool may have the blob already
        try:
            whole = _array(data, value)
        except (ValueError, TypeError, KeyError, SyntaxError, OverflowError, RecursionError) as error:
            raise InvalidInput(f"{field} holds an array that cannot be read: {error}") from None
        if whole.dtype.hasobject:
            raise InvalidInput(f"{field} holds an array of type {whole.dtype}; use numbers or bytes")
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_references(inner, blobs, field)


def _is_plainly_valid(head: StepHead) -> bool:
    """Whether nothing in a head without extra can be wrong: most heads, at a fraction of what a full check costs."""
    return (
        not head.extra
        and not head.blobs
        and head.base == -1
        and head.keep == 0
        and 0 < len(head.trajectory_uid) <= MAX_UID_CHARACTERS
        and 0 < len(head.prompt_uid) <= MAX_UID_CHARACTERS
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
    metadata = _detach_large(step.metadata, used) if SCORED_GROUP in step.metadata else step.metadata
    media = _detach(step.multi_modal_data, used) if step.multi_modal_data is not None else None
    experts = _detach(step.routed_experts, used) if step.routed_experts is not None else None
    blobs.update(used)
    encoded = pack_extra(
        StepExtra(
            metadata,
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


def _detach_large(metadata: dict[str, Any], blobs: dict[bytes, Buffer]) -> dict[str, Any]:
    """A scored group's metadata with its large values replaced by what finds them again in `blobs`; but for what is
    said of the reward, which is looked at without them."""
    found: dict[str, Any] = {}
    for key, value in metadata.items():
        packed = b"" if key in (REWARD_SOURCE, REWARD_INFO) else pack_value(value)
        if len(packed) < LARGE_VALUE_BYTES:
            found[key] = value
            continue
        digest = _digest(packed)
        blobs[digest] = packed
        found[key] = {_BLOB: digest, _PACKED: True}
    return found


def large_value(value: Any) -> bytes | None:
    """The blob that holds a value of a scored group's metadata; None where the value stands in the metadata itself."""
    if not isinstance(value, dict) or value.get(_PACKED) is not True:
        return None
    digest = value.get(_BLOB)
    return digest if isinstance(digest, bytes) else None


def attach_metadata(metadata: dict[str, Any], blobs: Mapping[bytes, Buffer]) -> dict[str, Any]:
    """A step's own metadata as it was given: of a scored group's, large values are among `blobs`. A value of which the
    blob was lost, or is none, is None."""
    if SCORED_GROUP not in metadata:
        return metadata
    return {key: _large_value(value, blobs) for key, value in metadata.items()}


def _large_value(value: Any, blobs: Mapping[bytes, Buffer]) -> Any:
    digest = large_value(value)
    if digest is None:
        return value
    raw = blobs.get(digest)
    try:
        return unpack_value(raw) if raw is not None else None
    except FrameError:
        return None  # a producer named a blob of other steps, which the pool had already


def attach(value: Any, blobs: Mapping[bytes, Buffer]) -> Any:
    """What `_detach` took apart, put together again."""
    if isinstance(value, dict):
        digest = value.get(_BLOB)
        if isinstance(digest, bytes):
            raw = blobs.get(digest)
            if raw is None:
                return None  # lost with a damaged journal; the step is quarantined for it
            return _array(raw, value) if "dtype" in value else bytes(raw)
        return {key: attach(item, blobs) for key, item in value.items()}
    if isinstance(value, list):
        return [attach(item, blobs) for item in value]
    return value


def _array(raw: Buffer, reference: Mapping[str, Any]) -> npt.NDArray[Any]:
    """The array that a reference tells of, as a view of a blob; raises as numpy does where the two do not fit."""
    return np.frombuffer(raw, reference["dtype"]).reshape(reference["shape"])


def _digest(data: Buffer) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_SIZE).digest()


#: What a Step and its head's `Extra` hold alike.
_SHARED_FIELDS = [
    name
    for name in StepExtra.__struct_fields__
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


def inherit_metadata(steps: Iterable[Step], metadata: dict[str, Any]) -> None:
    """Gives unpacked steps their trajectory's metadata; what a step says itself goes before. The values are shared
    between the steps, and nobody changes them."""
    if metadata:
        for step in steps:
            _force(step, "metadata", {**metadata, **step.metadata})


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
    _force(step, "multi_modal_data", attach(extra.multi_modal_data, blobs))
    _force(step, "routed_experts", attach(extra.routed_experts, blobs))
    for name in _SHARED_FIELDS:
        _force(step, name, getattr(extra, name))
    if head.blobs:
        _force(step, "metadata", attach_metadata(extra.metadata, blobs))
    return step
