"""Attention over a tree: each token attends to its own path, as if nothing were shared."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.trainer import attention, stacking, tree_attention, tree_plan
from headrace.trainer.prefix_tree import PrefixTree, SharingRule, shared_row

SIZES = settings(max_examples=25, deadline=None)


def grown(seed: int, segments: int = 7, longest: int = 12) -> PrefixTree:
    """A random tree, of random sequences over an alphabet of one or two tokens for each place."""
    rng = np.random.default_rng(seed)
    rows: list[np.ndarray] = []
    for _ in range(segments):
        own = rng.integers(0, 1000, int(rng.integers(1, longest)))
        before = rows[int(rng.integers(len(rows)))] if rows and rng.random() < 0.8 else own[:0]
        rows.append(np.concatenate([before[: int(rng.integers(len(before) + 1))], own]))
    return shared_row(rows, SharingRule(fork_tokens=-(10**6))).tree


def paths(tree: PrefixTree) -> torch.Tensor:
    """Which tokens each token sees, by the definition."""
    sees = torch.zeros(tree.cuts[-1], tree.cuts[-1], dtype=torch.bool)
    for at, (parent, shared) in enumerate(zip(tree.parents, tree.shared, strict=True)):
        for token in range(tree.cuts[at], tree.cuts[at + 1]):
            sees[token, tree.cuts[at] : token + 1] = True
            if parent >= 0:
                sees[token] |= sees[tree.cuts[parent] + shared - 1]
    return sees


def drawn(tree: PrefixTree, heads: int, kv_heads: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads, kv_heads, kv_heads)
    return [
        torch.randn(1, count, tree.cuts[-1], 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for count in sizes
    ]


def by_definition(given_: list[torch.Tensor], sees: torch.Tensor, scaling: float | None) -> torch.Tensor:
    q, k, v = given_
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    return (torch.softmax(scores.masked_fill(~sees, -torch.inf), -1) @ v)[0].transpose(0, 1)


def computed(given_: list[torch.Tensor], tree: PrefixTree, scaling: float | None = None) -> torch.Tensor:
    found, _ = attention.packed_attention(
        torch.nn.Module(), *given_, None, scaling=scaling, cuts=list(tree.cuts), tree=tree
    )
    return found[0]


@pytest.mark.parametrize("call_cost", [0, stacking.CALL_COST])
@given(seed=st.integers(0, 10**6), kv_heads=st.sampled_from([1, 2, 4]), scaling=st.sampled_from([None, 0.3]))
@SIZES
def test_each_token_attends_to_its_path_alone(call_cost: int, seed: int, kv_heads: int, scaling: float | None) -> None:
    """In float64, gradients included; with calls that cost nothing in parts, else under masks."""
    tree = grown(seed)
    given_ = drawn(tree, 4, kv_heads, torch.float64)
    along = torch.randn(tree.cuts[-1], 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacking, "CALL_COST", call_cost)
        patch.setattr(tree_plan, "MERGED_TOKEN_PAIRS", call_cost)
        tree_attention._cpu_kernels.cache_clear()
        found, wanted = computed(given_, tree, scaling), by_definition(given_, paths(tree), scaling)
    torch.testing.assert_close(found, wanted)
    for mine, theirs in zip(
        torch.autograd.grad((found * along).sum(), given_),
        torch.autograd.grad((wanted * along).sum(), given_),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
