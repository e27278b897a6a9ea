"""Attention over packed sequences, for any causal model of transformers that looks its attention up by name.

The tokens of all sequences stand in one row. A token attends to itself and to what precedes it in its own sequence,
never across a cut. No mask is built, and nothing is ever as large as the row squared: on CUDA with half precision
sequences of different lengths go through torch's variable-length kernel as they stand, and long ones one by one;
elsewhere those of similar length are stacked and go through plain causal attention together. Which are stacked depends
on the cuts alone and is decided once a batch.

Sequences that begin alike may share those tokens: then the row is a tree of segments, and a token attends to its path
(`tree_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from headrace.data.errors import InvalidInput, shown
from headrace.trainer import stacking
from headrace.trainer.prefix_tree import PrefixTree
from headrace.trainer.tree_attention import has_dense, tree_attention
from headrace.trainer.tree_plan import DENSE_SEGMENT, DENSE_SIDE, plan_paths

#: The name for `attn_implementation`.
NAME = "headrace_packed"
#: Kinds of attention that are not supported, by transformers' names of their arguments.
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


def register() -> str:
    """Makes packed attention known to transformers, and returns the name to give as `attn_implementation`.

        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention.register())
        model(input_ids=ids[None], position_ids=positions[None], cuts=cuts, use_cache=False)

    There is no mask function by that name on purpose: transformers then builds no mask.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    return NAME


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cuts: Sequence[int] | None = None,
    tree: PrefixTree | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in every layer: [1, heads, tokens, width] in, [1, tokens, heads,
    width] out. With a `tree`, whose cuts are those given, each token attends to its path in it."""
    edges = _checked(query, key, attention_mask, dropout, cuts, rest)
    if tree is not None and tree.cuts != edges:
        raise InvalidInput(f"cuts are {shown(edges)}; the tree's are {shown(tree.cuts)}: they must be the same")
    if tree is None and _has_varlen(query, value) and not _come_again(edges):
        if not has_dense(query) or not _is_long(edges):
            return _as_they_stand(query, key, value, edges, scaling)[None], None
        tree = PrefixTree.of(edges)  # which shares nothing: a long sequence goes through the faster kernel
    if tree is not None:
        return _in_tree(query, key, value, tree, scaling)[None], None
    return _stacked(query, key, value, edges, scaling)[None], None


def _checked(
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    cuts: Sequence[int] | None,
    rest: dict[str, Any],
) -> tuple[int, ...]:
    """The cuts. Raises `InvalidInput` where packed attention cannot compute what is asked for."""
    if cuts is None:
        raise InvalidInput(
            "a model with packed attention needs cuts=[0, ..., tokens]: where its sequences begin and end"
        )
    edges, tokens = tuple(cuts), query.shape[2]
    if query.shape[0] != 1 or key.shape[2] != tokens or attention_mask is not None:
        raise InvalidInput(
            f"packed attention takes one row, without a cache or a mask: not {query.shape[0]} rows of {tokens} tokens "
            f"against {key.shape[2]}{'' if attention_mask is None else ' under a mask'}"
        )
    if edges[0] != 0 or edges[-1] != tokens:
        raise InvalidInput(
            f"cuts go from {edges[0]} to {edges[-1]}; for {tokens} tokens they must go from 0 to {tokens}"
        )
    if dropout:
        raise InvalidInput(f"attention dropout is {dropout}; packed attention has none: set attention_dropout to 0")
    for name in UNSUPPORTED:
        if rest.get(name) is not None:
            raise InvalidInput(f"this model's attention has {name}={shown(rest[name])}, which packed attention has not")
    return edges


@dataclass(frozen=True, slots=True)
class StackedSequences:
    """Sequences that are attended to in one call: `rows` of them, each padded at its end to `length` tokens."""

    rows: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class StackPlan:
    """Where the tokens of a row go. Stacks stand one after the other; a place is one token of one of them.

    `tokens[place]` is the token at a place (in padding, the sequence's last), `places[token]` the place of a token.
    Both are None where every token is in its place already.
    """

    stacks: tuple[StackedSequences, ...]
    tokens: torch.Tensor | None
    places: torch.Tensor | None


@lru_cache(maxsize=16)
def plan_stacks(cuts: tuple[int, ...], device: torch.device) -> StackPlan:
    """How sequences with these cuts are stacked: cached, since it is the same for every layer, forward and backward."""
    edges, lengths = np.asarray(cuts, np.int64), _lengths(cuts)
    stacks, tokens = [], []
    for members in stacking.by_length(lengths):
        stacks.append(StackedSequences(len(members), int(lengths[members[0]])))
        tokens.append(stacking.padded_places(edges[:-1], lengths, members).reshape(-1))
    found = np.concatenate(tokens)
    if np.array_equal(found, np.arange(edges[-1])):
        return StackPlan(tuple(stacks), None, None)
    # Places of one token follow each other, its own first: of equals, `unique` gives the first.
    _, places = np.unique(found, return_index=True)
    return StackPlan(tuple(stacks), torch.from_numpy(found).to(device), torch.from_numpy(places).to(device))


def _lengths(cuts: tuple[int, ...]) -> npt.NDArray[np.int64]:
    edges = np.asarray(cuts, np.int64)
    lengths = edges[1:] - edges[:-1]
    if not len(lengths) or lengths.min() < 1:
        raise InvalidInput(f"cuts are {shown(cuts)}; they must rise: [0, first's tokens, first's and second's, ...]")
    return lengths


@lru_cache(maxsize=16)
def _come_again(cuts: tuple[int, ...]) -> bool:
    """Whether sequences stack without padding to a shape that is likely to come again: several of one length, or one of
    a round length. Plain causal attention is then the faster kernel on a GPU: cuDNN takes a tenth of a second for each
    shape that is new to it."""
    lengths = _lengths(cuts)
    length = int(lengths[0])
    return bool((lengths == length).all()) and (len(lengths) > 1 or length % DENSE_SIDE == 0)


@lru_cache(maxsize=16)
def _is_long(cuts: tuple[int, ...]) -> bool:
    """Whether any sequence is long enough for a call of its own."""
    return int(_lengths(cuts).max()) >= DENSE_SEGMENT


def _has_varlen(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's variable-length kernel can compute this."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and _computing_dtype(query) in (torch.float16, torch.bfloat16)
        and width == value.shape[-1]
        and width % 8 == 0
        and width <= 256
        and _torch_has_varlen()
    )


def _computing_dtype(query: torch.Tensor) -> torch.dtype:
    """The dtype for a kernel that autocast does not convert for."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


@cache
def _torch_has_varlen() -> bool:
    """Whether this torch has the kernel, with `window_size`: releases before that had another interface."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in signature(varlen_attn).parameters


@lru_cache(maxsize=16)
def _edges(cuts: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, int]:
    """The cuts as a tensor on a device, and the length of the longest sequence."""
    return torch.tensor(cuts, dtype=torch.int32, device=device), int(_lengths(cuts).max())


def _as_they_stand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cuts: tuple[int, ...], scaling: float | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    edges, longest = _edges(cuts, query.device)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # not every release of the kernel shares keys between heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    q, k, v = (x[0].transpose(0, 1).to(_computing_dtype(query)) for x in (query, key, value))
    found: torch.Tensor = varlen_attn(q, k, v, edges, edges, longest, longest, scale=scaling, window_size=(-1, 0))
    return found


def _stacked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cuts: tuple[int, ...], scaling: float | None
) -> torch.Tensor:
    places = plan_stacks(cuts, query.device)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda and _computing_dtype(query) == torch.float32:  # its kernels share no keys
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        groups = 1
    sizes = [stack.rows * stack.length for stack in places.stacks]
    parts = [
        _Placed.apply(x[0].transpose(0, 1), places.tokens, places.places).split(sizes) for x in (query, key, value)
    ]
    seen = []
    for stack, *qkv in zip(places.stacks, *parts, strict=True):
        q, k, v = (x.unflatten(0, (stack.rows, stack.length)).transpose(1, 2) for x in qkv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        seen.append(out.transpose(1, 2).flatten(0, 1))
    together = seen[0] if len(seen) == 1 else torch.cat(seen)  # a copy would be kept for the backward pass
    found: torch.Tensor = _Taken.apply(together, places.tokens, places.places)
    return found


def _in_tree(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: PrefixTree, scaling: float | None
) -> torch.Tensor:
    if _has_varlen(query, value) or (query.device.type == "cpu" and query.shape[-1] == value.shape[-1]):
        q, k, v = (x[0].transpose(0, 1).to(_computing_dtype(query)) for x in (query, key, value))
        return tree_attention(q, k, v, tree, scaling)
    tokens, cuts, own = _paths(tree, query.device)
    query, key, value = (x.index_select(2, tokens) for x in (query, key, value))
    found: torch.Tensor = _stacked(query, key, value, cuts, scaling).index_select(0, own)
    return found


@lru_cache(maxsize=16)
def _paths(tree: PrefixTree, device: torch.device) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
    """The tree's paths, for kernels that have no log-sum-exp to merge by: as sequences that share nothing."""
    paths = plan_paths(tree)
    return torch.from_numpy(paths.tokens).to(device), paths.cuts, torch.from_numpy(paths.own).to(device)


class _Placed(torch.autograd.Function):  # type: ignore[misc]
    """Gathers tokens into their places. The gradient of padding is zero, since no real token attends to it, and is
    dropped."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: torch.Tensor | None, places: torch.Tensor | None) -> torch.Tensor:
        ctx.places = places
        return x if tokens is None else x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad if ctx.places is None else grad.index_select(0, ctx.places), None, None


class _Taken(torch.autograd.Function):  # type: ignore[misc]
    """Gathers tokens back from their places."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: torch.Tensor | None, places: torch.Tensor | None) -> torch.Tensor:
        ctx.places, ctx.shape = places, x.shape
        return x if places is None else x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.places is None:
            return grad, None, None
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.places, grad), None, None
