"""Random scored groups, as environments could send them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from tests.data.kit import text

from headrace.data.scored import KEYS

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(text(max_size=5), ANYTHING, max_size=3)
MESSAGES = st.builds(lambda role, content, more: {**more, "role": role, "content": content}, text(), ANYTHING, OBJECTS)


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    """A group as it is served: every number of its field's kind."""
    size = draw(st.integers(1, 4))
    ids = st.integers(-(2**70), 2**70) | st.integers(0, 150_000)
    tokens = draw(st.lists(st.lists(ids, max_size=6), min_size=size, max_size=size))
    rows = st.lists(st.lists(FLOATS, max_size=6), max_size=4)
    optional = {
        "advantages": rows,
        "ref_logprobs": rows,
        "inference_logprobs": rows,
        "messages": st.lists(st.lists(MESSAGES, max_size=2), max_size=2),
        "generation_params": OBJECTS,
        "overrides": st.lists(OBJECTS, max_size=2),
        "group_overrides": OBJECTS,
        "images": ANYTHING,
        "env_id": st.integers(-(2**63) + 1, 2**63 - 1),
        "distill_token_ids": st.lists(st.lists(st.lists(ids, max_size=2), max_size=2), max_size=2),
        "distill_logprobs": st.lists(rows, max_size=2),
    }
    found: dict[str, Any] = dict.fromkeys(KEYS)
    found |= draw(st.fixed_dictionaries({}, optional=optional))
    found["tokens"] = tokens
    found["masks"] = [
        draw(st.lists(st.sampled_from([-100, 5]), min_size=len(row), max_size=len(row))) for row in tokens
    ]
    found["scores"] = draw(st.lists(FLOATS, min_size=size, max_size=size))
    return found


def large(first: int, tokens: int = 200, sequences: int = 4, **more: Any) -> dict[str, Any]:
    """A group of which no number needs a second look, and that is more than one block of a compressed stream."""
    rows = [[first, *(n * 7919 % 150_000 for n in range(k, k + tokens - 1))] for k in range(sequences)]
    found: dict[str, Any] = dict.fromkeys(KEYS)
    found |= {"tokens": rows, "masks": [[-100, *row[1:]] for row in rows], "scores": [0.5] * sequences}
    found["inference_logprobs"] = [[1.0, *(-n / 7e4 for n in range(1, tokens))] for _ in rows]
    return {**found, **more}


def body(group: dict[str, Any] | list[dict[str, Any]], compact: bool = False) -> bytes:
    return json.dumps(group, separators=(",", ":") if compact else None).encode()


def exact(value: Any) -> str:
    """Values with the kinds of their numbers: 1, 1.0, true and -0.0 are four."""
    return repr(value)
