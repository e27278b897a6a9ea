"""Attention over a row in which shared tokens stand once: each token attends to its own path in the tree alone.

What a token attends to is computed in parts (`tree_plan`), each of them one softmax with its log-sum-exp; they are
merged to one softmax over all of them. The gradient of each part is that of the whole: its kernel gets the merged
result and the merged log-sum-exp in place of its own, and gradients of what several parts attend to add up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import groupby, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.trainer import stacking
from headrace.trainer.prefix_tree import PrefixTree
from headrace.trainer.tree_plan import PrefixRead, dense_part, dense_segments, padded_length, plan_blocks, plan_calls

#: Tokens of the row: a span of them, or their indices.
Where: TypeAlias = slice | Tensor

#: Of queries, keys and values.
Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]

#: Widest heads that cuDNN's attention has a gradient for.
DENSE_WIDTH = 128


def tree_attention(q: Tensor, k: Tensor, v: Tensor, tree: PrefixTree, scaling: float | None) -> Tensor:
    """Queries [T, heads, width] with keys and values [T, key heads, width] of the same dtype, on a CPU, or on CUDA in
    half precision; results as the queries."""
    kernels = _gpu_kernels(tree, q.device, has_dense(q)) if q.is_cuda else _cpu_kernels(tree, q.dtype)
    found: Tensor = TreeAttention.apply(q, k, v, kernels, q.shape[-1] ** -0.5 if scaling is None else scaling)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class PartCall:
    """One call for queries that all attend to the keys that they are paired with. The edges are those of its pairs of
    queries and keys, for a variable-length kernel; a `dense` one has one pair, for a kernel that takes no edges."""

    queries: Where
    keys: Where
    query_edges: Tensor
    key_edges: Tensor
    most_queries: int
    most_keys: int
    dense: bool = False


class TreeKernels(ABC):
    """How a tree is computed on a device. Tokens come first: queries [T, heads, width], keys and values [T, key heads,
    width]; log-sum-exps are [heads, T]."""

    calls: tuple[PartCall, ...] = ()

    @abstractmethod
    def within(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Every token with what it attends to in its block: results, which may be written into, and log-sum-exps."""

    @abstractmethod
    def within_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> Gradients:
        """Its gradients, which may be written into."""

    @abstractmethod
    def across(self, call: PartCall, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The queries of a call with its keys."""

    @abstractmethod
    def across_backward(
        self, call: PartCall, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> Gradients:
        """Its gradients."""


class TreeAttention(torch.autograd.Function):  # type: ignore[misc] # torch is not checked
    """The parts of a tree, merged."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernels: TreeKernels, scale: float) -> Tensor:
        out, lse = kernels.within(q, k, v, scale)
        for call in kernels.calls:
            part, part_lse = kernels.across(call, _at(q, call.queries), _at(k, call.keys), _at(v, call.keys), scale)
            mine, mine_lse = _at(out, call.queries), _at(lse, call.queries, 1)
            share = torch.sigmoid(part_lse - mine_lse).t()[..., None]
            _put(out, call.queries, torch.lerp(mine.to(share.dtype), part.to(share.dtype), share))
            _put(lse, call.queries, torch.logaddexp(mine_lse, part_lse), 1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernels, ctx.scale = kernels, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        kernels, scale = ctx.kernels, ctx.scale
        dq, dk, dv = kernels.within_backward(grad, q, k, v, out, lse, scale)
        for call in kernels.calls:
            queries = [_at(x, call.queries) for x in (grad, q, out)]
            keys = [_at(x, call.keys) for x in (k, v)]
            found = kernels.across_backward(
                call, queries[0], queries[1], *keys, queries[2], _at(lse, call.queries, 1), scale
            )
            for whole, where, part in zip((dq, dk, dv), (call.queries, call.keys, call.keys), found, strict=True):
                _add(whole, where, part)
        return dq, dk, dv, None, None


def _at(x: Tensor, where: Where, dim: int = 0) -> Tensor:
    if isinstance(where, slice):
        return x.narrow(dim, where.start, where.stop - where.start)
    return x.index_select(dim, where)


def _put(x: Tensor, where: Where, part: Tensor, dim: int = 0) -> None:
    if isinstance(where, slice):
        x.narrow(dim, where.start, where.stop - where.start).copy_(part)
    else:
        x.index_copy_(dim, where, part.to(x.dtype))


def _add(x: Tensor, where: Where, part: Tensor) -> None:
    if isinstance(where, slice):
        x[where] += part
    else:
        x.index_add_(0, where, part)


def _part_call(reads: list[PrefixRead], device: torch.device, *, dense: bool = False) -> PartCall:
    """One call for some reads: tokens that stand side by side as they stand, others gathered."""

    def edges(side: int) -> Tensor:
        return torch.tensor(np.cumsum([0, *(read.lengths[side] for read in reads)]), dtype=torch.int32, device=device)

    def where(spans: list[tuple[int, int]]) -> Where:
        if all(one[1] == after[0] for one, after in pairwise(spans)):
            return slice(spans[0][0], spans[-1][1])
        found: Tensor = torch.from_numpy(np.concatenate([np.arange(*span) for span in spans])).to(device)
        return found

    return PartCall(
        where([read.queries for read in reads]),
        where([read.keys for read in reads]),
        edges(0),
        edges(1),
        max(read.lengths[0] for read in reads),
        max(read.lengths[1] for read in reads),
        dense,
    )


# -- on a CPU ----------------------------------------------------------------------------------------------------------


class CpuKernels(TreeKernels):
    """torch's flash attention for CPUs, which shares keys between heads; blocks of similar length are stacked."""

    def __init__(self, tree: PrefixTree, dtype: torch.dtype) -> None:
        blocks, reads = plan_blocks(tree)
        self.calls = tuple(_part_call([read], torch.device("cpu")) for read in reads)
        self._stacks: list[tuple[int, int, Tensor | None]] = []
        tokens = []
        for masked in (False, True):
            chosen = [block for block in blocks if (block.mask is not None) == masked]
            begins = np.array([block.begin for block in chosen], np.int64)
            lengths = np.array([block.end - block.begin for block in chosen], np.int64)
            for members in stacking.by_length(lengths):
                longest = int(lengths[members[0]])
                mask = _stacked_masks([chosen[at].mask for at in members], longest, dtype) if masked else None
                self._stacks.append((len(members), longest, mask))
                tokens.append(stacking.padded_places(begins, lengths, members).reshape(-1))
        found = np.concatenate(tokens)
        _, places = np.unique(found, return_index=True)  # of a token that padding repeats, its own place: the first
        self._in_place = np.array_equal(found, np.arange(tree.cuts[-1]))
        self._tokens, self._places = torch.from_numpy(found), torch.from_numpy(places)

    def within(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        parts = zip(self._stacks, *(self._placed(x) for x in (q, k, v)), strict=True)
        for (rows, length, mask), *qkv in parts:
            out, lse = _cpu_forward([_rows(x, rows, length) for x in qkv], mask, scale, causal=mask is None)
            outs.append(out.transpose(1, 2).flatten(0, 1))
            lses.append(lse.transpose(0, 1).flatten(1, 2))
        return self._taken(torch.cat(outs)), self._taken(torch.cat(lses, 1), 1)

    def within_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> Gradients:
        found: list[list[Tensor]] = [[], [], []]
        lses = self._placed(lse.t())
        parts = zip(self._stacks, self._spread(grad), *(self._placed(x) for x in (q, k, v, out)), lses, strict=True)
        for (rows, length, mask), *given, lse_part in parts:
            each = _cpu_backward(
                [_rows(x, rows, length) for x in given],
                lse_part.unflatten(0, (rows, length)).mT,
                mask,
                scale,
                causal=mask is None,
            )
            for whole, part in zip(found, each, strict=True):
                whole.append(part.transpose(1, 2).flatten(0, 1))
        dq, dk, dv = (self._taken(torch.cat(parts)) for parts in found)
        return dq, dk, dv

    def across(self, call: PartCall, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = _cpu_forward([_rows(x, 1, len(x)) for x in (q, k, v)], None, scale, causal=False)
        return out[0].transpose(0, 1), lse[0]

    def across_backward(
        self, call: PartCall, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> Gradients:
        given = [_rows(x, 1, len(x)) for x in (grad, q, k, v, out)]
        dq, dk, dv = _cpu_backward(given, lse[None], None, scale, causal=False)
        return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)

    def _placed(self, x: Tensor) -> tuple[Tensor, ...]:
        """Tokens in their places, stack by stack."""
        sizes = [rows * length for rows, length, _ in self._stacks]
        placed: tuple[Tensor, ...] = (x if self._in_place else x.index_select(0, self._tokens)).split(sizes)
        return placed

    def _spread(self, grad: Tensor) -> tuple[Tensor, ...]:
        """Gradients in their tokens' places, and none in padding."""
        if self._in_place:
            return self._placed(grad)
        sizes = [rows * length for rows, length, _ in self._stacks]
        whole = grad.new_zeros(len(self._tokens), *grad.shape[1:])
        spread: tuple[Tensor, ...] = whole.index_copy_(0, self._places, grad).split(sizes)
        return spread

    def _taken(self, x: Tensor, dim: int = 0) -> Tensor:
        """Tokens back from their places."""
        return x if self._in_place else x.index_select(dim, self._places)


def _rows(x: Tensor, rows: int, length: int) -> Tensor:
    return x.unflatten(0, (rows, length)).transpose(1, 2)


def _stacked_masks(masks: list[Any], length: int, dtype: torch.dtype) -> Tensor:
    """Masks of blocks as one, [rows, 1, length, length]: a padding token sees what its block's last one sees."""
    found = torch.full((len(masks), 1, length, length), -torch.inf, dtype=dtype)
    for row, sees in enumerate(masks):
        own = len(sees)
        found[row, 0, :own, :own].masked_fill_(torch.from_numpy(sees), 0)
        found[row, 0, own:] = found[row, 0, own - 1]
    return found


def _cpu_forward(qkv: list[Tensor], mask: Tensor | None, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *qkv, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def _cpu_backward(given: list[Tensor], lse: Tensor, mask: Tensor | None, scale: float, *, causal: bool) -> Gradients:
    """`given` is the gradient, queries, keys, values and results."""
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *given, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return dq, dk, dv


@lru_cache(maxsize=4)  # few: masks of a tree with thousands of forks take up to 150 MB
def _cpu_kernels(tree: PrefixTree, dtype: torch.dtype) -> CpuKernels:
    return CpuKernels(tree, dtype)


# -- on CUDA -----------------------------------------------------------------------------------------------------------


class GpuKernels(TreeKernels):
    """torch's variable-length flash attention for half precision, and, where `dense`, cuDNN's for what is large and of
    a shape that comes again. The former does not share keys between heads in every release: they are repeated for each
    call, and not kept."""

    def __init__(self, tree: PrefixTree, device: torch.device, dense: bool) -> None:
        calls: list[PartCall] = []
        for reads in plan_calls(tree):
            large, rest = dense_part(reads[0]) if dense and len(reads) == 1 else (None, None)
            if large is None:
                calls.append(_part_call(reads, device))
                continue
            calls.append(_part_call([large], device, dense=True))
            if rest is not None:
                calls.append(_part_call([rest], device))
        self.calls = tuple(calls)
        own = [PrefixRead(at, span, span) for at, span in enumerate(pairwise(tree.cuts))]
        long = set(dense_segments(tree)) if dense else set()
        #: Segments, each causal in itself: a long one alone, and those between long ones together.
        self._segments = [
            _part_call(list(reads), device, dense=alone is not None)
            for alone, reads in groupby(own, key=lambda read: read.segment if read.segment in long else None)
        ]

    def within(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if len(self._segments) == 1:
            forward, _ = _kernels_of(self._segments[0])
            return forward(q, k, v, scale, causal=True)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
        for call in self._segments:
            at, (forward, _) = call.queries, _kernels_of(call)
            part, part_lse = forward(_at(q, at), _at(k, at), _at(v, at), scale, causal=True)
            _put(out, at, part)
            _put(lse, at, part_lse, 1)
        return out, lse

    def within_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> Gradients:
        if len(self._segments) == 1:
            _, backward = _kernels_of(self._segments[0])
            return backward(grad, q, k, v, out, lse, scale, causal=True)
        found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for call in self._segments:
            at, (_, backward) = call.queries, _kernels_of(call)
            parts = backward(*(_at(x, at) for x in (grad, q, k, v, out)), _at(lse, at, 1), scale, causal=True)
            for whole, part in zip(found, parts, strict=True):
                _put(whole, at, part)
        return found

    def across(self, call: PartCall, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        forward, _ = _kernels_of(call)
        return forward(q, k, v, scale, causal=False)

    def across_backward(
        self, call: PartCall, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> Gradients:
        _, backward = _kernels_of(call)
        return backward(grad, q, k, v, out, lse, scale, causal=False)


def _kernels_of(call: PartCall) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Gradients]]:
    """What computes a call, and what computes its gradients."""
    if call.dense:
        return _dense_forward, _dense_backward
    return partial(_varlen_forward, call), partial(_varlen_backward, call)


def _varlen_forward(
    call: PartCall, q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    edges = (call.query_edges, call.key_edges, call.most_queries, call.most_keys)
    k, v = _repeated(k, groups), _repeated(v, groups)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *edges, 0.0, causal, False, scale=scale, window_size_left=-1, window_size_right=0 if causal else -1
    )
    return out, lse


def _varlen_backward(
    call: PartCall,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    causal: bool,
) -> Gradients:
    groups = q.shape[1] // k.shape[1]
    edges = (call.query_edges, call.key_edges, call.most_queries, call.most_keys)
    no_dropout = (torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device))
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad.contiguous(),
        q,
        _repeated(k, groups),
        _repeated(v, groups),
        out,
        lse.contiguous(),
        *edges,
        0.0,
        causal,
        *no_dropout,
        scale=scale,
        window_size_left=-1,
        window_size_right=0 if causal else -1,
    )
    return dq, _summed(dk, groups), _summed(dv, groups)


def _repeated(x: Tensor, groups: int) -> Tensor:
    """Keys or values, each head as often as it is shared."""
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _summed(grad: Tensor, groups: int) -> Tensor:
    """The gradient of what was repeated."""
    return grad if groups == 1 else grad.unflatten(1, (-1, groups)).sum(2)


def _dense_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    tokens, rows = len(q), padded_length(len(q))
    if causal:  # no token attends to what stands behind it, padding included
        k, v = _padded(k, rows), _padded(v, rows)
    out, lse = _cudnn_forward(_padded(q, rows), k, v, scale, causal=causal)
    return out[:tokens], lse[:, :tokens]


def _dense_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, *, causal: bool
) -> Gradients:
    queries, keys, rows = len(q), len(k), padded_length(len(q))
    if causal:
        k, v = _padded(k, rows), _padded(v, rows)
    # Results of padding have no gradient, so it gives none to any key.
    grad, q, out = (_padded(x, rows) for x in (grad, q, out))
    dq, dk, dv = _cudnn_backward(grad, q, k, v, out, F.pad(lse, (0, rows - queries)), scale, causal=causal)
    return dq[:queries], dk[:keys], dv[:keys]


def _padded(x: Tensor, tokens: int) -> Tensor:
    """With zeros behind it, as many tokens."""
    return x if len(x) == tokens else F.pad(x, (0, 0, 0, 0, 0, tokens - len(x)))


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(_one_row(x) for x in (q, k, v)), None, True, 0.0, causal, False, scale=scale
    )
    return out[0].transpose(0, 1), lse[0, :, :, 0]


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, *, causal: bool
) -> Gradients:
    no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(_one_row(x) for x in (grad, q, k, v, out)),
        lse.contiguous()[None, :, :, None],
        *no_dropout,
        None,
        None,
        None,
        len(q),
        len(k),
        0.0,
        causal,
        scale=scale,
    )
    return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)


def _one_row(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def has_dense(q: Tensor) -> bool:
    """Whether cuDNN's attention can compute these queries, with its gradient, and is the faster one."""
    return q.is_cuda and q.shape[-1] <= DENSE_WIDTH and _is_hopper(q.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    """Whether a GPU is of the generation that cuDNN was measured on, or of a later one."""
    return bool(torch.backends.cuda.cudnn_sdp_enabled()) and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache(maxsize=16)
def _gpu_kernels(tree: PrefixTree, device: torch.device, dense: bool) -> GpuKernels:
    return GpuKernels(tree, device, dense)
