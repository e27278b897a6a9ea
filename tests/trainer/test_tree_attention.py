"""Attention over a tree: each token attends to its own path, as if nothing were shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.backends.models import VOCABULARY, gap, llama, qwen3
from tests.trainer.kit import sequence

from headrace import Sequence
from headrace.data.errors import InvalidInput
from headrace.trainer import attention, stacking, tree_attention, tree_plan
from headrace.trainer.backends.tensors import Packed, PackedBackend
from headrace.trainer.config import TrainerConfig
from headrace.trainer.learner import Learner
from headrace.trainer.prefix_tree import PrefixTree, SharingRule, shared_row

SIZES = settings(max_examples=10, deadline=None)
ALWAYS = SharingRule(fork_tokens=-(10**6))


def grown(seed: int, segments: int = 7, longest: int = 12) -> PrefixTree:
    """A random tree, of random sequences over an alphabet of one or two tokens for each place."""
    rng = np.random.default_rng(seed)
    rows: list[np.ndarray] = []
    for _ in range(segments):
        own = rng.integers(0, 1000, int(rng.integers(1, longest)))
        before = rows[int(rng.integers(len(rows)))] if rows and rng.random() < 0.8 else own[:0]
        rows.append(np.concatenate([before[: int(rng.integers(len(before) + 1))], own]))
    return shared_row(rows, ALWAYS).tree


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
    q, k, v = given_
    found, _ = attention.packed_attention(
        torch.nn.Module(), q, k, v, None, scaling=scaling, cuts=list(tree.cuts), tree=tree
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
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_parts_and_masks_are_both_computed() -> None:
    """Of calls that cost nothing, none is under a mask; small segments are cheapest under one; long ones in parts."""
    small, large = grown(3), PrefixTree((0, 3000, 4000, 5000), (-1, 0, 0), (0, 2000, 2000))
    assert any(block.mask is not None for block in tree_plan.plan_blocks(small)[0])
    blocks, reads = tree_plan.plan_blocks(large)
    assert [block.mask for block in blocks] == [None] * 3
    assert [read.lengths for read in reads] == [(2000, 2000)]


def test_paths_that_share_nothing_give_the_same() -> None:
    """What a device without a kernel for parts computes."""
    tree = grown(5)
    given_ = drawn(tree, 4, 2, torch.float64)
    tokens, cuts, own = attention._paths(tree, torch.device("cpu"))
    q, k, v = (x.index_select(2, tokens) for x in given_)
    found, _ = attention.packed_attention(torch.nn.Module(), q, k, v, None, cuts=list(cuts))
    torch.testing.assert_close(found[0].index_select(0, own), computed(given_, tree))


def test_cuts_of_another_tree_are_refused() -> None:
    x = torch.zeros(1, 2, 6, 4)
    with pytest.raises(InvalidInput, match="they must be the same"):
        attention.packed_attention(
            torch.nn.Module(), x, x, x, None, cuts=[0, 6], tree=PrefixTree((0, 3, 6), (-1, 0), (0, 1))
        )


def families(seed: int = 0, prompt: int = 24, vocabulary: int = VOCABULARY) -> list[Sequence]:
    """Two prompts with answers of different lengths: some equal, one the beginning of another, one that forks within an
    answer, each with its own advantages, temperatures and targets."""
    rng = np.random.default_rng(seed)
    found = []
    for group in range(2):
        opening = rng.integers(0, vocabulary, prompt)
        answers = [rng.integers(0, vocabulary, int(rng.integers(3, 30))) for _ in range(3)]
        forked = np.concatenate([answers[0][:2], rng.integers(0, vocabulary, 5)])
        for at, answer in enumerate([*answers, answers[1], answers[2][:3], forked]):
            tokens = np.concatenate([opening, answer]).astype(np.int32)
            made = sequence(
                [(prompt, len(tokens))], advantage=float(rng.normal()), temperature=0.7 + 0.1 * at, uid=f"{group}-{at}"
            )
            log_probs = np.where(made.loss_mask, -4 + rng.random(len(tokens)), 0).astype(np.float32)
            found.append(replace(made, tokens=tokens, log_probs=log_probs))
    return found


def log_probs(model: Any, packed: Packed) -> torch.Tensor:
    logits = model(
        input_ids=packed.ids[None], position_ids=packed.positions[None], cuts=packed.cuts, tree=packed.tree
    ).logits[0, packed.states]
    scaled = logits.float() / packed.temperatures[:, None]
    return torch.log_softmax(scaled, -1).gather(-1, packed.target_ids[:, None])[:, 0]


def learned(model: Any, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of their sum weighted by advantages."""
    model.zero_grad()
    found = log_probs(model, packed)
    (found * packed.advantages).sum().backward()
    return found.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize("family", [llama, qwen3])
def test_log_probs_and_gradients_are_those_of_sequences_that_share_nothing(
    family: Callable[..., Any], in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_parts:
        monkeypatch.setattr(stacking, "CALL_COST", 0)
        monkeypatch.setattr(tree_plan, "MERGED_TOKEN_PAIRS", 0)
    tree_attention._cpu_kernels.cache_clear()
    model, batch = family(attention.NAME, initializer_range=0.15), families()
    shared, apart = PackedBackend(sharing=ALWAYS).convert(batch), PackedBackend().convert(batch)
    assert shared.tree is not None
    assert len(shared.ids) < 0.5 * len(apart.ids)
    found, wanted = learned(model, shared), learned(model, apart)
    assert gap(found[0], wanted[0]) < 1e-5
    assert gap(found[1], wanted[1]) < 1e-5
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a processor without bfloat16 says so
def test_bfloat16_is_as_far_from_float32_as_without_sharing() -> None:
    model, batch = llama(attention.NAME, initializer_range=0.1, num_hidden_layers=1), families(prompt=6)[:6]
    shared, apart = PackedBackend(sharing=ALWAYS).convert(batch), PackedBackend().convert(batch)
    exact, exact_gradient = learned(model, apart)
    gaps = []
    for packed in (shared, apart):
        with torch.autocast("cpu", torch.bfloat16):
            found, gradient = learned(model, packed)
        gaps.append((gap(found, exact), gap(gradient, exact_gradient)))
    for mine, theirs in zip(*gaps, strict=True):
        assert mine < 2 * theirs + 1e-3
        assert mine > 0


@pytest.mark.parametrize("changes", [{}, {"algorithm": {"advantage": "gae", "old": "proximal"}}])
@pytest.mark.parametrize("tokens", [4096, 64])
def test_the_learner_learns_the_same_with_and_without_sharing(
    model: Path, tokens: int, changes: dict[str, Any]
) -> None:
    batch = families(vocabulary=300)
    told, weights = [], []
    for share in (True, False):
        optimizer = {"lr": 1e-3, "tokens": tokens, "epochs": 2, "share_prefixes": share}
        mine = Learner(TrainerConfig(model=model, run=model, optimizer=optimizer, **changes), "cpu")
        told.append(mine.learn(batch, 0, 0))
        weights.append(torch.cat([weight.flatten() for weight in mine.policy.weights().values()]))
    assert told[0] == pytest.approx(told[1], rel=1e-3, abs=1e-5)
    assert gap(*weights) < 1e-5


def test_the_learners_passes_count_shared_tokens_once(model: Path) -> None:
    batch = families(vocabulary=300)
    counts = {}
    for share in (True, False):
        optimizer = {"tokens": 200, "share_prefixes": share}
        mine = Learner(TrainerConfig(model=model, run=model, optimizer=optimizer), "cpu")
        rows = [mine._packed([batch[at] for at in part]) for part in mine._micro_batches(batch)]
        assert all(len(row.ids) <= 200 for row in rows)
        counts[share] = len(rows)
    assert counts[True] < counts[False]


@settings(max_examples=200)
@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(0, 50))
def test_a_read_is_split_into_parts_that_have_every_pair_once(queries: int, keys: int, begin: int) -> None:
    read = tree_plan.PrefixRead(3, (begin + keys, begin + keys + queries), (begin, begin + keys))
    dense, rest = tree_plan.dense_part(read)
    parts = [part for part in (dense, rest) if part is not None]
    assert sum(part.lengths[0] * part.lengths[1] for part in parts) == queries * keys
    for at, one in enumerate(parts):
        assert read.queries[0] <= one.queries[0] < one.queries[1] <= read.queries[1]
        assert read.keys[0] <= one.keys[0] < one.keys[1] <= read.keys[1]
        for other in parts[:at]:
            assert not (_meet(one.queries, other.queries) and _meet(one.keys, other.keys))
    if min(queries, keys) >= 4096:
        assert dense is not None
        assert dense.lengths[0] * dense.lengths[1] > 0.96 * queries * keys


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def test_lengths_of_dense_calls_are_few() -> None:
    keys = {tree_plan.dense_length(tokens) for tokens in range(32_768)}
    queries = {tree_plan.padded_length(tokens) for tokens in range(1024, 32_768)}
    assert queries - keys == {32_768}
    assert len(keys) < 150
    assert [tree_plan.dense_length(tokens) for tokens in (1023, 1024, 14_335)] == [0, 1024, 14_080]
    assert [tree_plan.padded_length(tokens) for tokens in (1024, 1025, 14_335)] == [1024, 1152, 14_336]


def test_long_segments_are_dense() -> None:
    assert tree_plan.dense_segments(PrefixTree((0, 4096, 9000, 9100), (-1, 0, 1), (0, 4096, 4000))) == [0, 1]


def scores_of(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """[heads, queries, keys], keys repeated for the heads that share them."""
    found = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    return found.masked_fill(~torch.ones(found.shape[1:]).tril().bool(), -torch.inf) if causal else found


def plain_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = scores_of(q, k, scale, causal)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(q.shape[1] // v.shape[1], 1))
    return out, scores.logsumexp(-1)


def plain_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    *,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    """As flash attention's: probabilities by the log-sum-exp that is given, which may be that of more keys."""
    groups = q.shape[1] // k.shape[1]
    many_k, many_v = (x.repeat_interleave(groups, 1) for x in (k, v))
    p = (scores_of(q, k, scale, causal) - lse[..., None]).exp()
    ds = p * (torch.einsum("qhd,khd->hqk", grad, many_v) - (grad * out).sum(-1).t()[..., None]) * scale
    dq = torch.einsum("hqk,khd->qhd", ds, many_k)
    dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, grad)
    return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))


def pairs_of(call: tree_attention.PartCall) -> list[tuple[slice, slice]]:
    edges = (call.query_edges.tolist(), call.key_edges.tolist())
    queries, keys = ([slice(*span) for span in pairwise(one)] for one in edges)
    return list(zip(queries, keys, strict=True))


def plain_varlen_forward(
    call: tree_attention.PartCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [plain_forward(q[own], k[to], v[to], scale, causal=causal) for own, to in pairs_of(call)]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses, 1)


def plain_varlen_backward(
    call: tree_attention.PartCall,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    *,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    parts = [
        plain_backward(grad[own], q[own], k[to], v[to], out[own], lse[:, own], scale, causal=causal)
        for own, to in pairs_of(call)
    ]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_parts_that_a_gpu_computes_make_the_whole(seed: int, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are replaced by plain ones: what is tested is which tokens go where, and how parts are merged."""
    for name, value in {"DENSE_SIDE": 8, "DENSE_STEP": 4, "DENSE_SEGMENT": 16, "OWN_CALL_PAIRS": 64}.items():
        monkeypatch.setattr(tree_plan, name, value)
    monkeypatch.setattr(tree_attention, "_varlen_forward", plain_varlen_forward)
    monkeypatch.setattr(tree_attention, "_varlen_backward", plain_varlen_backward)
    monkeypatch.setattr(tree_attention, "_cudnn_forward", plain_forward)
    monkeypatch.setattr(tree_attention, "_cudnn_backward", plain_backward)
    tree = grown(seed, segments=12, longest=60)
    kernels = tree_attention.GpuKernels(tree, torch.device("cpu"), dense)
    assert [any(call.dense for call in calls) for calls in (kernels.calls, kernels._segments)] == [dense] * 2
    inputs = drawn(tree, 4, 2, torch.float64, seed)
    q, k, v = (x[0].transpose(0, 1) for x in inputs)
    found = tree_attention.TreeAttention.apply(q, k, v, kernels, 8**-0.5)
    wanted = by_definition(inputs, paths(tree), None)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)  # log-sum-exps are float32
    gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine, theirs = (torch.autograd.grad(out, inputs, gradient) for out in (found, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shared", [4096, 3001])
def test_on_a_gpu_long_segments_are_what_they_are_in_parts(shared: int) -> None:
    tree = PrefixTree((0, 5001, 8000, 9100), (-1, 0, 0), (0, shared, shared))
    inputs = drawn(tree, 4, 2, torch.float32)
    answers = []
    for device, kind in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        given = [x.detach().bfloat16().to(device, kind).requires_grad_() for x in inputs]
        found = computed(given, tree)
        answers.append([found, *torch.autograd.grad(found.float().square().sum(), given)])
    for wanted, got in zip(*answers, strict=True):
        assert gap(got.cpu(), wanted) < 0.02


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_it_is_what_it_is_on_a_cpu(dtype: torch.dtype) -> None:
    """bfloat16 goes through the variable-length kernel in parts, float32 through paths that share nothing."""
    tree = grown(7, segments=40, longest=90)
    rounded = [x.detach().to(dtype).float() for x in drawn(tree, 4, 2, torch.float32)]
    answers = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        inputs = [x.to(device, kind).requires_grad_() for x in rounded]
        found = computed(inputs, tree)
        answers.append([found, *torch.autograd.grad(found.float().square().sum(), inputs)])
    for wanted, got in zip(*answers, strict=True):
        assert gap(got.cpu(), wanted) < (1e-5 if dtype == torch.float32 else 0.02)
