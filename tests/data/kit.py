"""Random steps and trees for tests of the data model."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from headrace.data import Step, TokenTree
from headrace.data.block import TOKEN_BYTES, Record
from headrace.data.packing import pack
from headrace.data.step import INT32_MAX


def text(min_size: int = 0, max_size: int = 8) -> st.SearchStrategy[str]:
    """Letters of one to four bytes, and the ones that separate."""
    return st.text("aZ é–🙂\x00\n/$", min_size=min_size, max_size=max_size)


TOKENS = st.integers(0, INT32_MAX)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(text(max_size=5), JSON, max_size=3)
ARRAYS = st.builds(
    lambda values, dtype: np.array(values).astype(dtype),
    st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=2), min_size=1, max_size=3),
    st.sampled_from(["<f4", "<f8", ">i4", "u1", "bool", "<i8"]),
)
MEDIA = st.dictionaries(
    text(max_size=5), JSON | st.binary(max_size=12) | ARRAYS | st.lists(st.binary(max_size=4), max_size=2), max_size=3
)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """A Step with any of its fields set."""
    response = draw(st.lists(TOKENS, min_size=1, max_size=8))
    cuts = draw(st.sets(st.integers(1, len(response) - 1), max_size=2)) if len(response) > 1 else set()
    spans = tuple((at, draw(st.integers(0, 9))) for at in sorted({0} | cuts))
    experts = st.lists(st.integers(0, draw(st.sampled_from([7, 255, 256, 70_000]))), min_size=1, max_size=4)
    optional: dict[str, st.SearchStrategy[Any]] = {
        "prompt_uid": text(min_size=1, max_size=8),
        "step_index": st.integers(0, 100),
        "reward": st.floats(allow_nan=False, allow_infinity=False),
        "rollout_log_probs": st.lists(
            st.floats(max_value=0, allow_infinity=False, width=32), min_size=len(response), max_size=len(response)
        ),
        "policy_version": st.integers(0, 1000),
        "is_last": st.booleans(),
        "metadata": OBJECTS,
        "finish_reason": st.sampled_from(["stop", "length"]),
        "sampling": OBJECTS,
        "multi_modal_data": MEDIA,
        "routed_experts": experts,
        "created_at": st.floats(1, 2e9),
        "call_id": text(min_size=1, max_size=8),
        "version_spans": st.just(spans),
        "quarantined": text(max_size=8),
        "trainable": st.booleans(),
        "quality": st.floats(0, 1),
        "tags": st.lists(text(max_size=4), max_size=3),
        "note": text(max_size=8),
    }
    given = draw(st.fixed_dictionaries({}, optional=optional))
    uid = draw(text(min_size=1, max_size=8))
    return Step(
        prompt_ids=draw(st.lists(TOKENS, min_size=1, max_size=8)), response_ids=response, trajectory_uid=uid, **given
    )


def record_of(step: Step) -> Record:
    return pack([step]).records()[0]


def insert(tree: TokenTree, step: Step) -> Record:
    """Adds a step to a tree, cut against what is there, as the pool does it."""
    record = record_of(step)
    head = record.head
    head.base, head.keep = tree.longest_prefix(record.ids[: head.n_prompt * TOKEN_BYTES])
    head.n_prompt -= head.keep
    record.ids_in_memory = record.ids[head.keep * TOKEN_BYTES :]
    tree.add(record)
    return record


def tree_of(steps: list[Step]) -> TokenTree:
    tree = TokenTree()
    for step in steps:
        insert(tree, step)
    return tree


@st.composite
def histories(draw: st.DrawFn, *, tokens: int, most: int = 8) -> list[Step]:
    """The steps of one trajectory in the ways agents make them: each continues, rewrites, shares or begins a history.

    With few `tokens`, different calls often sample the same; with `tokens` 0 every sampled token is a new one.
    """
    fresh = iter(range(10, 1_000_000))

    def some(least: int) -> list[int]:
        n = draw(st.integers(least, 4))
        return [next(fresh) if not tokens else draw(st.integers(1, tokens)) for _ in range(n)]

    made: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(["grow", "rewrite", "choice", "begin", "subagent"])) if made else "begin"
        prompt, response = draw(st.sampled_from(made)) if made else ([], [])
        if kind == "grow":
            prompt = prompt + response + some(0)
        elif kind == "rewrite":
            whole = prompt + response
            prompt = whole[: draw(st.integers(1, len(whole)))] + some(1)
        elif kind == "subagent":
            prompt = prompt[: draw(st.integers(1, len(prompt)))] + some(1)
        elif kind == "begin":
            prompt = some(1)
        made.append((prompt, some(1)))
    return [
        Step(prompt_ids=prompt, response_ids=response, trajectory_uid="t", step_index=i)
        for i, (prompt, response) in enumerate(made)
    ]
