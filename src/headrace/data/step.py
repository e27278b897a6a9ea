"""`Step`: one LLM call, the atom of everything that Headrace records.

Ids may be given as lists or arrays; a built Step holds int32 arrays and float32 log-probs. What is cheap to check is
checked when a Step is built; the values inside arrays that already have the right type are checked, all at once, when
a batch of them is packed.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.data.errors import InvalidInput, shown

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

INT32_MAX = 2**31 - 1
#: Characters of a uid: uids travel in URLs, headers and file names.
MAX_UID_CHARACTERS = 512
#: Levels that metadata may nest: what nests deeper, some decoder here would not read back.
MAX_METADATA_DEPTH = 100
#: Where a step's metadata says who its reward is from, and what the reward was made of.
REWARD_SOURCE, REWARD_INFO = "reward_source", "reward_extra_info"

_force = msgspec.structs.force_setattr
_INTEGERS = (int, np.integer)
_CONTAINERS = (dict, list, tuple)
_ONLY_STRINGS = {str}


class Step(msgspec.Struct, kw_only=True, frozen=True, eq=False, gc=False):
    """One LLM call: what the server consumed, what it sampled, and what is known about it.

    A producer that knows what its prompt continues may send only the rest: with `builds_on=(step_index, tokens)` the
    prompt is the first `tokens` of that earlier step's prompt and response, followed by `prompt_ids` (which may then be
    empty). Steps read out of a pool are always whole.

    `step_index=None` lets the pool assign the next one, by `call_id` where there is one. `policy_version=None` takes
    the pool's current version. `version_spans` is `((first_token, version), ...)` for an answer that straddled a
    weight sync; `policy_version` is then its oldest. `quarantined` is the reason why a step must never be trained on.
    """

    prompt_ids: Any
    response_ids: Any
    trajectory_uid: str
    prompt_uid: str = ""
    step_index: int | None = None
    reward: float | None = None
    rollout_log_probs: Any = None
    policy_version: int | None = None
    is_last: bool = False
    metadata: dict[str, Any] = {}
    finish_reason: str | None = None
    sampling: dict[str, Any] | None = None
    multi_modal_data: dict[str, Any] | None = None
    routed_experts: Any = None
    created_at: float | None = None
    call_id: str | None = None
    builds_on: tuple[int, int] | None = None
    version_spans: tuple[tuple[int, int], ...] | None = None
    quarantined: str | None = None
    # Curation: what people decided about a step after it was recorded.
    trainable: bool = True
    quality: float | None = None
    tags: tuple[str, ...] = ()
    note: str | None = None

    def __post_init__(self) -> None:
        if self.builds_on is not None:
            _force(self, "builds_on", check_base(self.builds_on))
        _force(
            self, "prompt_ids", token_ids_array(self.prompt_ids, "prompt_ids", may_be_empty=self.builds_on is not None)
        )
        _force(self, "response_ids", token_ids_array(self.response_ids, "response_ids"))
        if self.rollout_log_probs is not None:
            _force(self, "rollout_log_probs", log_probs_array(self.rollout_log_probs, len(self.response_ids)))
        if self.reward is not None:
            _force(self, "reward", check_finite(self.reward, "reward"))
        if self.routed_experts is not None:
            _force(self, "routed_experts", narrowest_array(self.routed_experts, "routed_experts"))
        check_uid(self.trajectory_uid, "trajectory_uid")
        if not self.prompt_uid:
            _force(self, "prompt_uid", self.trajectory_uid)
        check_uid(self.prompt_uid, "prompt_uid")
        if self.step_index is not None:
            _force(self, "step_index", check_count(self.step_index, "step_index", most=INT32_MAX))
        if self.policy_version is not None:
            _force(self, "policy_version", check_count(self.policy_version, "policy_version", most=INT32_MAX))
        if self.created_at is not None:
            _force(self, "created_at", check_finite(self.created_at, "created_at"))
        if type(self.is_last) is not bool:
            check_bool(self.is_last, "is_last")
        check_dict(self.metadata, "metadata")
        self._check_rare()

    def _check_rare(self) -> None:
        """What most steps leave at its default."""
        if type(self.trainable) is not bool:
            check_bool(self.trainable, "trainable")
        if self.finish_reason is not None and type(self.finish_reason) is not str:
            check_text(self.finish_reason, "finish_reason")
        if self.call_id is not None and type(self.call_id) is not str:
            check_text(self.call_id, "call_id")
        if self.quarantined is not None:
            check_text(self.quarantined, "quarantined")
        if self.note is not None:
            check_text(self.note, "note")
        if self.quality is not None:
            _force(self, "quality", check_finite(self.quality, "quality"))
        if self.sampling is not None:
            check_dict(self.sampling, "sampling")
        if self.multi_modal_data is not None:
            check_dict(self.multi_modal_data, "multi_modal_data")
        if self.tags != ():
            _force(self, "tags", check_tags(self.tags))
        if self.version_spans is not None:
            _force(self, "version_spans", check_spans(self.version_spans, len(self.response_ids)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Step) and all(
            same_value(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__
        )

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, for JSON and for people."""
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in ((name, getattr(self, name)) for name in self.__struct_fields__)
        }


def step_from_dict(fields: dict[str, Any]) -> Step:
    """A Step from JSON-like fields; a missing or an unknown field is named."""
    if not isinstance(fields, dict):
        raise InvalidInput(f"a step must be an object with the fields of Step, not {shown(fields)}")
    unknown = sorted(set(fields) - set(Step.__struct_fields__))
    if unknown:
        raise InvalidInput(f"unknown field {unknown[0]!r} in a step; known: {', '.join(Step.__struct_fields__)}")
    missing = [name for name in ("prompt_ids", "response_ids", "trajectory_uid") if name not in fields]
    if missing:
        raise InvalidInput(f"a step needs {missing[0]}")
    given = dict(fields)
    for name in ("prompt_uid", "metadata", "is_last"):
        if given.get(name, 0) is None:
            del given[name]
    return Step(**given)


def token_ids_array(value: Any, field: str, *, may_be_empty: bool = False) -> IntArray:
    """`value` as an int32 array of at least one id; int32 arrays pass as they are."""
    if type(value) is np.ndarray and value.dtype == np.int32:
        array = value
    else:
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            wide = value
        else:
            if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
                raise InvalidInput(f"{field} must be a list or an array of token ids, not {shown(value)}")
            for i, item in enumerate(value):
                if isinstance(item, bool | np.bool_) or not isinstance(item, int | np.integer):
                    raise InvalidInput(f"{field}[{i}] must be an integer, not {shown(item)}")
                if not 0 <= item <= INT32_MAX:
                    raise InvalidInput(f"{field}[{i}] is {shown(item)}; token ids lie in 0..{INT32_MAX}")
            wide = np.asarray(value, dtype=np.int64)
        if wide.size:
            for bound in (wide.min(), wide.max()):
                if not 0 <= bound <= INT32_MAX:
                    at = int(np.flatnonzero(wide.reshape(-1) == bound)[0])
                    raise InvalidInput(f"{field}[{at}] is {bound}; token ids lie in 0..{INT32_MAX}")
        array = wide.astype(np.int32)
    if array.ndim != 1:
        raise InvalidInput(f"{field} must be one run of ids, not an array of shape {array.shape}")
    if not len(array) and not may_be_empty:
        raise InvalidInput(f"{field} is empty; a step has at least one id in its prompt and one in its response")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def log_probs_array(value: Any, expected: int) -> FloatArray:
    """`value` as a float32 array with one log-prob for each of the `expected` sampled tokens."""
    try:
        if type(value) is np.ndarray and value.dtype == np.float32:
            array = value
        else:
            with np.errstate(over="ignore"):  # what overflows is infinite, and refused as that
                array = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError):
        raise InvalidInput(f"rollout_log_probs must be a list or an array of numbers, not {shown(value)}") from None
    if array.ndim != 1 or len(array) != expected:
        raise InvalidInput(
            f"rollout_log_probs has shape {array.shape} for {expected} response_ids; there must be one a sampled token"
        )
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def check_finite(value: Any, field: str) -> float:
    """`value` as a float, if it is a finite number; else, as every check here, `InvalidInput` that names `field`."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise InvalidInput(f"{field} must be a number, not {shown(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise InvalidInput(f"{field} is {number}; it must be finite")
    return number


def check_count(value: Any, field: str, least: int = 0, most: int = 2**53) -> int:
    """`value` as an int, if it is an integer in `least..most`."""
    if isinstance(value, bool) or not isinstance(value, _INTEGERS) or value < least:
        raise InvalidInput(f"{field} must be an integer of at least {least}, not {shown(value)}")
    if value > most:
        raise InvalidInput(f"{field} must be an integer of at most {most}, not {shown(value)}")
    return int(value)


def check_uid(value: Any, field: str, most: int = MAX_UID_CHARACTERS) -> str:
    """`value`, if it is a string of 1 to `most` characters that has a UTF-8 form."""
    if not isinstance(value, str) or not value or len(value) > most:
        raise InvalidInput(f"{field} must be a string of 1 to {most} characters, not {shown(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"{field} is {shown(value)}, which is no valid Unicode") from None
    return value


def check_bool(value: Any, field: str) -> None:
    if type(value) is not bool:
        raise InvalidInput(f"{field} must be true or false, not {shown(value)}")


def check_text(value: Any, field: str) -> None:
    if not isinstance(value, str):
        raise InvalidInput(f"{field} must be a string, not {shown(value)}")


def check_dict(value: Any, field: str) -> None:
    """Refuses what is no dict with string keys, or nests too deep."""
    if not isinstance(value, dict) or not (
        _ONLY_STRINGS.issuperset(map(type, value)) or all(isinstance(key, str) for key in value)
    ):
        raise InvalidInput(f"{field} must be a dict with string keys, not {shown(value)}")
    check_depth(value, field)


def check_depth(value: Any, field: str) -> None:
    """Refuses what nests deeper than any decoder here reads: a record that cannot be read again must not be written."""
    level = [value]
    for _ in range(MAX_METADATA_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, _CONTAINERS)
        ]
        if not level:
            return
    raise InvalidInput(
        f"{field} nests deeper than {MAX_METADATA_DEPTH} levels; keep it flatter, or as a string of JSON"
    )


def check_tags(value: Any) -> tuple[str, ...]:
    """`value` as a tuple, if it is a list of strings."""
    if not isinstance(value, list | tuple) or not all(isinstance(tag, str) for tag in value):
        raise InvalidInput(f"tags must be a list of strings, not {shown(value)}")
    return tuple(value)


def check_base(value: Any) -> tuple[int, int]:
    """`builds_on` as (index of the step that it builds on, how many tokens of that it keeps)."""
    try:
        index, tokens = value
    except (TypeError, ValueError):
        raise InvalidInput(f"builds_on is {shown(value)}; it must be (step_index, tokens)") from None
    return check_count(index, "builds_on step_index"), check_count(tokens, "builds_on tokens", 1)


def check_spans(value: Any, tokens: int) -> tuple[tuple[int, int], ...]:
    """`version_spans` of a response of so many tokens, as pairs of (first token, policy version), rising from 0."""
    try:
        pairs = [(first, version) for first, version in value]
    except (TypeError, ValueError):
        raise InvalidInput(f"version_spans must be pairs (first_token, version), not {shown(value)}") from None
    spans = tuple((check_count(a, "version_spans"), check_count(b, "version_spans", most=INT32_MAX)) for a, b in pairs)
    firsts = [first for first, _ in spans]
    if not spans or firsts[0] != 0 or firsts != sorted(set(firsts)) or firsts[-1] >= tokens:
        raise InvalidInput(
            f"version_spans is {shown(value)}; it must begin at token 0 and rise to less than {tokens}, "
            "as ((0, version), (first_token, version), ...)"
        )
    return spans


def narrowest_array(value: Any, field: str) -> npt.NDArray[Any]:
    """An integer array in the narrowest unsigned type that holds it."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:  # rows of unequal lengths, numbers beyond 64 bits
        raise InvalidInput(f"{field} must be an array of integers, not {shown(value)}: {error}") from None
    if array.dtype.kind not in "iu" or not array.size or int(array.min()) < 0:
        raise InvalidInput(f"{field} must be a non-empty array of integers of at least 0, not {shown(value)}")
    return np.ascontiguousarray(array.astype(np.min_scalar_type(int(array.max()))))


def same_value(a: Any, b: Any) -> bool:
    """Whether two metadata values are equal, arrays by type and content."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    return bool(a == b)
