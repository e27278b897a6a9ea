"""The fourteen fields of a scored group, in the order in which they are served, and what each may hold."""

from __future__ import annotations

from msgspec import Raw, Struct

#: Numbers by how deep they are nested; these can be long, and are served as they came where that is possible.
INTS = {"tokens": 2, "masks": 2, "distill_token_ids": 3}
FLOATS = {"scores": 1, "advantages": 2, "ref_logprobs": 2, "inference_logprobs": 2, "distill_logprobs": 3}
#: A group without one of these is none.
REQUIRED = ("tokens", "masks", "scores")

ABSENT = Raw(b"")


class Fields(Struct, gc=False):
    """The text of each field, as it stands in the body; unknown ones are read over."""

    tokens: Raw = ABSENT
    masks: Raw = ABSENT
    scores: Raw = ABSENT
    advantages: Raw = ABSENT
    ref_logprobs: Raw = ABSENT
    messages: Raw = ABSENT
    generation_params: Raw = ABSENT
    inference_logprobs: Raw = ABSENT
    overrides: Raw = ABSENT
    group_overrides: Raw = ABSENT
    images: Raw = ABSENT
    env_id: Raw = ABSENT
    distill_token_ids: Raw = ABSENT
    distill_logprobs: Raw = ABSENT


KEYS: tuple[str, ...] = Fields.__struct_fields__
