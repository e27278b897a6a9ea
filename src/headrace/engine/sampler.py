"""From logits to tokens and their log-probs, for a whole batch at once.

A token's random number depends on its sequence's seed and its index in the answer alone: not on the rest of the batch,
nor on how the batch was split. The token is where that number falls in the cumulative distribution.

Log-probs are, as vLLM defines them, `raw`: of the logits as they leave the model (temperature 1, nothing applied), or
`processed`: of what was sampled from, after bias, penalties, temperature, min-p, top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from headrace.engine.sequence import EngineSequence

#: The log-prob of a token with probability 0 in JSON, as in vLLM's answers.
LOWEST_LOGPROB = -9999.0


@dataclass(slots=True)
class SampledTokens:
    """One token for each sequence of a batch."""

    tokens: list[int]
    logprobs: list[float]
    ranks: list[int] | None
    #: The likeliest tokens, where any sequence asked for some.
    top_tokens: list[list[int]] | None
    top_logprobs: list[list[float]] | None


class Sampler:
    """Samples a batch; with `processed` its log-probs are processed ones, else raw."""

    def __init__(self, *, processed: bool) -> None:
        self.processed = processed

    def __call__(self, logits: torch.Tensor, batch: Seq[EngineSequence]) -> SampledTokens:
        """Samples row i of (row, vocabulary) logits for sequence i."""
        raw = logits
        asked = [sequence.sampling for sequence in batch]
        if not all(sampling.plain for sampling in asked):
            logits = _shaped(logits.clone(), batch)
        greedy = [sampling.greedy for sampling in asked]
        best = logits.argmax(-1) if any(greedy) else None
        if any(sampling.temperature != 1.0 and not sampling.greedy for sampling in asked):
            heat = [1.0 if sampling.greedy else sampling.temperature for sampling in asked]
            logits = logits / torch.tensor(heat, device=logits.device)[:, None]
        if any(sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p for sampling in asked):
            logits = _cut(logits, batch)
        logprobs = logits.log_softmax(-1)
        if best is not None and all(greedy):
            tokens = best
        else:
            tokens = _draw(logprobs, batch)
            if best is not None:
                tokens = torch.where(torch.tensor(greedy, device=tokens.device), best, tokens)
        if not self.processed and logits is not raw:
            logprobs = raw.log_softmax(-1)
        return _result(tokens, logprobs, batch)


def _result(tokens: torch.Tensor, logprobs: torch.Tensor, batch: Seq[EngineSequence]) -> SampledTokens:
    chosen = logprobs.gather(-1, tokens[:, None])
    most = max(
        (sequence.sampling.logprobs for sequence in batch if sequence.sampling.logprobs is not None), default=None
    )
    ranks = top = None
    if most is not None:
        ranks = (logprobs >= chosen).sum(-1).tolist()
        if most:
            top = logprobs.clamp(min=LOWEST_LOGPROB).topk(min(most, logprobs.shape[-1]), -1)
    return SampledTokens(
        tokens.tolist(),
        chosen[:, 0].clamp(min=LOWEST_LOGPROB).tolist(),
        ranks,
        top.indices.tolist() if top else None,
        top.values.tolist() if top else None,
    )


def _shaped(logits: torch.Tensor, batch: Seq[EngineSequence]) -> torch.Tensor:
    """Logits after allowed tokens, minimum length, bias and penalties, row by row, since few requests have any."""
    for row, sequence in zip(logits, batch, strict=True):
        sampling = sequence.sampling
        if sampling.allowed_token_ids is not None:
            kept = row[list(sampling.allowed_token_ids)]
            row.fill_(-torch.inf)
            row[list(sampling.allowed_token_ids)] = kept
        if len(sequence.output) < sampling.min_tokens:
            row[list(sequence.enders)] = -torch.inf
        if sampling.logit_bias:
            at = torch.tensor(list(sampling.logit_bias), device=row.device)
            row[at] += torch.tensor(list(sampling.logit_bias.values()), device=row.device)
        if sampling.penalised:
            _penalise(row, sequence)
    return logits


def _penalise(row: torch.Tensor, sequence: EngineSequence) -> None:
    sampling = sequence.sampling
    counts = torch.bincount(torch.tensor(sequence.output, dtype=torch.long), minlength=len(row)).to(row.device)
    seen = counts > 0
    if sampling.repetition_penalty != 1.0:
        before = seen.clone()
        before[sequence.prompt] = True
        pressed = torch.where(row > 0, row / sampling.repetition_penalty, row * sampling.repetition_penalty)
        row.copy_(torch.where(before, pressed, row))
    row -= sampling.frequency_penalty * counts + sampling.presence_penalty * seen


def _cut(logits: torch.Tensor, batch: Seq[EngineSequence]) -> torch.Tensor:
    """Logits after min-p, top-k and top-p; the likeliest token of each row always stays."""
    asked = [sequence.sampling for sequence in batch]
    device, size = logits.device, logits.shape[-1]
    if any(sampling.min_p for sampling in asked):
        least = torch.tensor([sampling.min_p for sampling in asked], device=device)[:, None]
        chances = logits.softmax(-1)
        logits = logits.masked_fill(chances < least * chances.amax(-1, keepdim=True), -torch.inf)
    if any(sampling.top_p < 1.0 or sampling.top_k > 0 for sampling in asked):
        kept = torch.tensor([sampling.top_k if sampling.top_k > 0 else size for sampling in asked], device=device)
        mass = torch.tensor([sampling.top_p for sampling in asked], device=device)[:, None]
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        least = ordered.gather(-1, (kept.clamp(max=size) - 1)[:, None])
        ordered = ordered.masked_fill(ordered < least, -torch.inf)
        chances = ordered.softmax(-1)
        before = chances.cumsum(-1) - chances
        drop = (before >= mass) & (mass < 1.0)
        drop[:, 0] = False
        logits = torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(drop, -torch.inf))
    return logits


def _draw(logprobs: torch.Tensor, batch: Seq[EngineSequence]) -> torch.Tensor:
    mass = logprobs.exp().cumsum(-1, dtype=torch.float64)
    places = uniform([sequence.seed for sequence in batch], [len(sequence.output) for sequence in batch])
    at = torch.from_numpy(places).to(logprobs.device)[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, at, right=True)[:, 0].clamp(max=logprobs.shape[-1] - 1)


def uniform(seeds: Seq[int], places: Seq[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A number in [0, 1) for each seed and index: splitmix64 of the two, applied twice."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    x = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64) + golden)
    x = _mix(x + (np.array(places, np.uint64) + np.uint64(1)) * golden)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
