"""From hidden states to log-probs, with no more than `MAX_LOGITS` logits in memory at once.

Where all of them are no more, they are computed plainly. Beyond that they are computed a chunk of rows at a time: the
forward pass keeps of each row its normalizer alone, and the backward pass computes a chunk's logits again and adds
what it gives to the gradients of the states and of the head. Both give the same numbers.

A target's log-prob and its distribution's entropy are at the temperature it was sampled at; log-probs of candidates are
at temperature 1, and -inf for an id that is no token of the model. Logits are what the head gives, times the model's
own factor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

#: Logits that are held at once: 0.5 GiB in float32, of which a chunk's backward pass holds about four. A chunk has
#: 4,096 rows of a vocabulary of 32,768: enough for a matrix product to run at full speed.
MAX_LOGITS = 1 << 27

#: Log-probs [M], entropies [M], log-probs of candidates [M, K].
Found = tuple[Tensor, Tensor, Tensor]


def log_probs_of(
    head: nn.Module,
    states: Tensor,
    ids: Tensor,
    temperatures: Tensor,
    candidates: Tensor | None = None,
    *,
    entropy_learns: bool = False,
    factor: float = 1.0,
) -> Found:
    """Of each of M hidden states [M, H]: the log-prob of its target, its entropy, and the log-probs of its candidates
    [M, K] (none without them). The entropy has a gradient where `entropy_learns`. The logits are `factor` times what
    the head gives."""
    if candidates is None:
        candidates = ids.new_zeros(len(ids), 0)
    weight: Tensor = head.weight
    rows = max(MAX_LOGITS // weight.shape[0], 1)
    if len(states) <= rows:
        return _whole(head, states, ids, temperatures, candidates, entropy_learns, factor)
    if type(head) is nn.Linear:
        computed = _compute_dtype(states)
        found: Found = _Chunked.apply(
            *(states.to(computed), weight, head.bias, ids, temperatures, candidates, entropy_learns, rows, factor)
        )
        return found
    return _recomputed(head, (states, ids, temperatures, candidates), entropy_learns, rows, factor)


def logits_of(head: nn.Module, states: Tensor, factor: float) -> Tensor:
    """The float32 logits of hidden states: what the head gives, times the model's factor."""
    found: Tensor = head(states).float()
    return found if factor == 1.0 else found * factor


def _compute_dtype(states: Tensor) -> torch.dtype:
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def _whole(
    head: nn.Module,
    states: Tensor,
    ids: Tensor,
    temperatures: Tensor,
    candidates: Tensor,
    entropy_learns: bool,
    factor: float,
) -> Found:
    logits = logits_of(head, states, factor)
    every = torch.log_softmax(logits / temperatures[:, None], -1)
    with torch.set_grad_enabled(entropy_learns and torch.is_grad_enabled()):
        entropy = -(every.exp() * every).sum(-1)
    return every.gather(-1, ids[:, None])[:, 0], entropy, _chosen(logits, candidates)


def _chosen(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of some tokens [M, K]; -inf where an id is none of the vocabulary's."""
    if not ids.shape[1]:
        return logits.new_zeros(ids.shape)
    real = _real(ids, logits.shape[-1])
    found = logits.gather(-1, torch.where(real, ids, 0)) - logits.logsumexp(-1, keepdim=True)
    return found.masked_fill(~real, -torch.inf)


def _real(ids: Tensor, vocabulary: int) -> Tensor:
    return (ids >= 0) & (ids < vocabulary)


def _recomputed(head: nn.Module, given: tuple[Tensor, ...], entropy_learns: bool, rows: int, factor: float) -> Found:
    """The same for a head that is more than a matrix and a bias: each chunk's graph is built again in the backward
    pass."""
    found = []
    for chunk in zip(*(tensor.split(rows) for tensor in given), strict=True):
        arguments = (head, *chunk, entropy_learns, factor)
        grad = torch.is_grad_enabled()
        found.append(checkpoint(_whole, *arguments, use_reentrant=False) if grad else _whole(*arguments))
    first, second, third = zip(*found, strict=True)
    return torch.cat(first), torch.cat(second), torch.cat(third)


class _Chunked(torch.autograd.Function):  # type: ignore[misc] # torch is not checked
    """`_whole`, `rows` rows at a time. With s the logits over the temperature, p their softmax and H its entropy:

    d log p(t) / d s = onehot(t) - p        d H / d s = -p (log p + H)

    and each times `factor` for what the head gives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperatures: Tensor,
        candidates: Tensor,
        entropy_learns: bool,
        rows: int,
        factor: float,
    ) -> Found:
        log_probs, entropy = states.new_empty(2, len(ids), dtype=torch.float32)
        normalizer, plain_normalizer = torch.empty_like(log_probs), torch.empty_like(log_probs)
        chosen = states.new_zeros(candidates.shape, dtype=torch.float32)
        computed = _cast(states.dtype, weight, bias)
        with torch.autocast(states.device.type, enabled=False):
            for at in _chunks(len(ids), rows):
                logits = _chunk_logits(states[at], computed, factor)
                if candidates.shape[1]:
                    plain_normalizer[at] = logits.logsumexp(-1)
                    real = _real(candidates[at], logits.shape[-1])
                    picked = logits.gather(-1, torch.where(real, candidates[at], 0)) - plain_normalizer[at, None]
                    chosen[at] = picked.masked_fill_(~real, -torch.inf)
                log_probs[at], entropy[at], normalizer[at] = _scored(logits, ids[at], temperatures[at])
        ctx.save_for_backward(
            states, weight, bias, ids, temperatures, candidates, normalizer, plain_normalizer, entropy
        )
        ctx.rows, ctx.entropy_learns, ctx.factor = rows, entropy_learns, factor
        if not entropy_learns:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy, chosen

    @staticmethod
    def backward(ctx: Any, for_log_probs: Tensor, for_entropy: Tensor, for_chosen: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        states, weight, bias, ids, temperatures, candidates, normalizer, plain_normalizer, entropy = saved
        computed, factor = _cast(states.dtype, weight, bias), ctx.factor
        of_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        # Summed over the chunks in float32, whatever the weights are.
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        with torch.autocast(states.device.type, enabled=False):
            for at in _chunks(len(ids), ctx.rows):
                logits = _chunk_logits(states[at], computed, factor)
                entropy_too = (for_entropy[at], entropy[at]) if ctx.entropy_learns else None
                if candidates.shape[1]:
                    grad = _candidates_gradient(logits, candidates[at], plain_normalizer[at], for_chosen[at])
                    grad += _gradient(logits, ids[at], temperatures[at], normalizer[at], for_log_probs[at], entropy_too)
                else:
                    grad = _gradient(logits, ids[at], temperatures[at], normalizer[at], for_log_probs[at], entropy_too)
                del logits
                if factor != 1.0:
                    grad.mul_(factor)
                if of_bias is not None:
                    of_bias += grad.sum(0)
                grad = grad.to(states.dtype)
                if of_states is not None:
                    torch.mm(grad, computed[0], out=of_states[at])
                if of_weight is not None:
                    of_weight += grad.t() @ states[at]
        return (
            of_states,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            *(None,) * 6,
        )


def _chunk_logits(states: Tensor, computed: tuple[Tensor, Tensor | None], factor: float) -> Tensor:
    """The logits of one chunk, which may be overwritten."""
    logits = F.linear(states, *computed).float()
    return logits if factor == 1.0 else logits.mul_(factor)


def _scored(logits: Tensor, ids: Tensor, temperatures: Tensor) -> Found:
    """Of one chunk, whose logits are overwritten: log-probs, entropies, normalizers."""
    scaled = logits.div_(temperatures[:, None])
    normalizer = scaled.logsumexp(-1)
    log_probs = scaled.gather(-1, ids[:, None])[:, 0] - normalizer
    every = scaled.sub_(normalizer[:, None])
    return log_probs, -(every.exp().mul_(every)).sum(-1), normalizer


def _gradient(
    logits: Tensor,
    ids: Tensor,
    temperatures: Tensor,
    normalizer: Tensor,
    for_log_probs: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The gradient of one chunk's logits, which are overwritten; `entropy` is its gradient and its value."""
    every = logits.div_(temperatures[:, None]).sub_(normalizer[:, None])
    if entropy is None:
        grad = every.exp_().mul_(-for_log_probs[:, None])
    else:
        for_entropy, value = entropy
        p = every.exp()
        grad = every.add_(value[:, None]).mul_(for_entropy[:, None]).add_(for_log_probs[:, None]).mul_(p).neg_()
    grad.scatter_add_(-1, ids[:, None], for_log_probs[:, None])
    return grad.div_(temperatures[:, None])


def _candidates_gradient(logits: Tensor, candidates: Tensor, normalizer: Tensor, for_chosen: Tensor) -> Tensor:
    """The same of the candidates' log-probs; the logits stay."""
    real = _real(candidates, logits.shape[-1])
    given = torch.where(real, for_chosen, 0.0)
    grad = (logits - normalizer[:, None]).exp_().mul_(-given.sum(-1, keepdim=True))
    return grad.scatter_add_(-1, torch.where(real, candidates, 0), given)


def _cast(dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)


def _chunks(count: int, rows: int) -> list[slice]:
    return [slice(begin, min(begin + rows, count)) for begin in range(0, count, rows)]
