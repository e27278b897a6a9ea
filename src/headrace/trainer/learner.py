"""Updates the weights from one batch. All that lies between a token and its gradient is here and in `losses`.

A batch is gone through `epochs` times, in `minibatches` updates each; a minibatch is computed in packed forward passes
of at most `tokens` tokens, whose gradients add up to those of one pass over all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.data.sequence import Sequence
from headrace.trainer import losses
from headrace.trainer.backends.tensors import Packed, PackedBackend
from headrace.trainer.config import TrainerConfig
from headrace.trainer.examples import guided, rewards_at
from headrace.trainer.lora import WithoutAdapter
from headrace.trainer.losses import EPS, gae, token_weights
from headrace.trainer.policy import Critic, Policy


@dataclass
class FixedTensors:
    """What stays the same while a batch is learned from: for each sequence, one entry for each target."""

    old: list[Tensor]
    importance: list[Tensor] | None = None
    reference: list[Tensor] | None = None
    values: list[Tensor] | None = None
    returns: list[Tensor] | None = None


class Learner:
    """A policy and its optimizer; with `gae` a critic and its optimizer; with a KL a frozen reference."""

    def __init__(self, config: TrainerConfig, device: str) -> None:
        self.config, self.device = config, device
        self._algorithm, self._optimizer_config = config.algorithm, config.optimizer
        self.policy = Policy(config.model, dtype=config.dtype, device=device, lora=config.lora, seed=config.seed)
        self.optimizer = self._adamw(self.policy.parameters(), config.learning_rate)
        self.reference: Policy | WithoutAdapter | None = None
        if self._algorithm.kl and self.policy.adapter is not None and self._algorithm.reference is None:
            self.reference = WithoutAdapter(self.policy.adapter, self.policy.log_probs)
        elif self._algorithm.kl:
            self.reference = Policy(self._algorithm.reference or config.model, dtype=config.dtype, device=device)
        self.critic: Critic | None = None
        self.critic_optimizer: torch.optim.Optimizer | None = None
        if self._algorithm.advantage == "gae":
            self.critic = Critic(config.model, dtype=config.dtype, device=device)
            self.critic_optimizer = self._adamw(list(self.critic.parameters()), config.critic.lr)
        self._pack = PackedBackend()

    def learn(self, sequences: list[Sequence], step: int, version: int) -> dict[str, float]:
        """Learns from a batch; returns the step's metrics. `step` counts from 0 and decides the shuffle and the
        learning rate; `version` is what the policy was last published as."""
        meter = MetricAccumulator()
        with torch.no_grad():
            fixed, sequences = self._fixed(sequences)
        rate = self._rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for number, minibatch in enumerate(self._minibatches(len(sequences), step)):
            chosen = [sequences[at] for at in minibatch]
            weights = token_weights(chosen, self._algorithm.weighting, self._algorithm.constant_length)
            for part in self._micro_batches(chosen):
                packed = self._packed([chosen[at] for at in part], [weights[at] for at in part])
                which = [minibatch[at] for at in part]
                self._policy_loss(packed, fixed, which, meter, version, first=number == 0).backward()
                if self.critic is not None:
                    self._critic_loss(packed, fixed, which, meter).backward()
            if step >= self.config.critic.warmup_steps or self.critic is None:
                meter.last("grad_norm", self._update(self.optimizer, meter))
            else:
                self.optimizer.zero_grad(set_to_none=True)
            if self.critic_optimizer is not None:
                self._update(self.critic_optimizer, meter)
            meter.updated()
        return {**meter.read(), "lr": rate}

    # -- losses --------------------------------------------------------------------------------------------------------

    def _policy_loss(
        self,
        packed: Packed,
        fixed: FixedTensors,
        which: list[int],
        meter: MetricAccumulator,
        version: int,
        *,
        first: bool,
    ) -> Tensor:
        algorithm = self._algorithm
        low, high = algorithm.clip, algorithm.clip_high or algorithm.clip
        teacher = packed.teacher_log_probs if algorithm.distill else None
        log_probs, entropy, candidates = self.policy.candidate_log_probs(
            packed, packed.teacher_ids if teacher is not None else None, entropy_learns=algorithm.entropy > 0
        )
        old, weights, advantages = _select(fixed.old, which), packed.weights, packed.advantages
        if algorithm.loss == "ppo":
            importance = _select(fixed.importance, which) if fixed.importance is not None else None
            loss = losses.ppo(log_probs, old, advantages, weights, low=low, high=high, importance=importance)
            meter.mean("clip_fraction", losses.is_clipped(log_probs.detach(), old, advantages, low=low, high=high))
        else:
            loss = losses.tis(log_probs, old, advantages, weights, cap=algorithm.cap)
            meter.mean("clip_fraction", torch.exp(log_probs.detach() - old) > algorithm.cap)
        if algorithm.entropy:
            loss = loss - algorithm.entropy * (weights * entropy).sum()
        if fixed.reference is not None:
            distance = losses.kl(log_probs, _select(fixed.reference, which), algorithm.kl_estimator)
            loss = loss + algorithm.kl * (weights * distance).sum()
            meter.mean("reference_kl", distance)
        if teacher is not None:
            distance = losses.teacher_distance(candidates, teacher)
            loss = loss + algorithm.distill * (weights * distance).sum()
            meter.mean("teacher_kl", distance[(teacher > -torch.inf).any(-1)])
        meter.add("loss", loss)
        meter.mean("entropy", entropy)
        self._measure(packed, log_probs.detach(), meter, version, first=first)
        return loss

    def _measure(
        self, packed: Packed, log_probs: Tensor, meter: MetricAccumulator, version: int, *, first: bool
    ) -> None:
        """Metrics of the distance between the policy and the one that sampled."""
        known = ~torch.isnan(packed.log_probs)
        moved = (log_probs - packed.log_probs)[known]
        ratio = torch.exp(moved)
        meter.mean("kl", losses.kl(moved, torch.zeros_like(moved), "k3"))
        meter.mean("ratio_mean", ratio)
        meter.range("ratio", ratio)
        if first:
            meter.most("ratio_first_max", (ratio - 1).abs())
            meter.most("on_policy_gap", moved[packed.versions[known] == version].abs())

    def _critic_loss(self, packed: Packed, fixed: FixedTensors, which: list[int], meter: MetricAccumulator) -> Tensor:
        assert self.critic is not None
        assert fixed.values is not None
        assert fixed.returns is not None
        values, returns = self.critic(packed), _select(fixed.returns, which)
        clip = self.config.critic.clip
        loss = losses.value_loss(values, _select(fixed.values, which), returns, packed.weights, clip=clip)
        meter.add("value_loss", loss)
        meter.mean("value", values)
        meter.mean("return", returns)
        return loss

    # -- fixed while a batch is learned from ---------------------------------------------------------------------------

    def _fixed(self, sequences: list[Sequence]) -> tuple[FixedTensors, list[Sequence]]:
        algorithm = self._algorithm
        recorded = [torch.from_numpy(sequence.log_probs[sequence.loss_mask]).to(self.device) for sequence in sequences]
        fixed = FixedTensors(recorded)
        if algorithm.old == "proximal" or any(torch.isnan(log_probs).any() for log_probs in recorded):
            proximal = self._per_sequence(sequences, lambda packed: self.policy.log_probs(packed)[0])
            # A token without a recorded log-prob counts as sampled by the weights before this batch.
            recorded = [torch.where(torch.isnan(r), p, r) for r, p in zip(recorded, proximal, strict=True)]
            fixed.old = recorded
            if algorithm.old == "proximal" and algorithm.loss == "ppo":
                pairs = zip(proximal, recorded, strict=True)
                fixed.old, fixed.importance = (
                    proximal,
                    [losses.truncated_importance(p, r, algorithm.cap) for p, r in pairs],
                )
        if self.reference is not None:
            fixed.reference = self._reference_log_probs(self.reference, sequences)
        if self.critic is not None:
            fixed.values = self._per_sequence(sequences, self.critic)
            sequences, fixed.returns = self._with_gae(sequences, fixed.values)
        return fixed, sequences

    def _reference_log_probs(self, reference: Policy | WithoutAdapter, sequences: list[Sequence]) -> list[Tensor]:
        """Those that came with a sequence, else the reference's own."""
        given = [None if one.guidance is None else one.guidance.ref_log_probs for one in sequences]
        missing = [sequence for sequence, row in zip(sequences, given, strict=True) if row is None]
        computed = iter(self._per_sequence(missing, lambda packed: reference.log_probs(packed)[0]))
        return [
            next(computed) if row is None else torch.from_numpy(row[sequence.loss_mask]).to(self.device)
            for sequence, row in zip(sequences, given, strict=True)
        ]

    def _with_gae(self, sequences: list[Sequence], values: list[Tensor]) -> tuple[list[Sequence], list[Tensor]]:
        """The sequences with GAE's advantages, normalised over the batch to mean 0 and deviation 1, or with those that
        came with them; and the returns."""
        found = [
            gae(rewards_at(s)[s.loss_mask], v.double().cpu().numpy(), self._algorithm.gamma, self._algorithm.lam)
            for s, v in zip(sequences, values, strict=True)
        ]
        every = np.concatenate([advantages for advantages, _ in found])
        mean, spread = every.mean(), every.std() + EPS
        done = []
        for sequence, (advantages, _) in zip(sequences, found, strict=True):
            whole = np.zeros(len(sequence), np.float32)
            whole[sequence.loss_mask] = (advantages - mean) / spread
            done.append(replace(sequence, advantages=guided(sequence, whole)))
        returns = [torch.from_numpy(returns).float().to(self.device) for _, returns in found]
        return done, returns

    def _per_sequence(self, sequences: list[Sequence], compute: Callable[[Packed], Tensor]) -> list[Tensor]:
        found: list[Tensor | None] = [None] * len(sequences)
        for part in self._micro_batches(sequences):
            chosen = [sequences[at] for at in part]
            sizes = [int(sequence.loss_mask.sum()) for sequence in chosen]
            for at, values in zip(part, compute(self._packed(chosen)).split(sizes), strict=True):
                found[at] = values
        return [values for values in found if values is not None]

    # -- minibatches ---------------------------------------------------------------------------------------------------

    def _minibatches(self, count: int, step: int) -> Iterator[list[int]]:
        """Indices of the sequences of each update. The shuffle depends on seed and step: a resumed run repeats it."""
        for epoch in range(self._optimizer_config.epochs):
            order = np.random.default_rng([self.config.seed, step, epoch]).permutation(count)
            yield from (
                part.tolist() for part in np.array_split(order, self._optimizer_config.minibatches) if len(part)
            )

    def _micro_batches(self, sequences: Seq[Sequence]) -> Iterator[list[int]]:
        """Indices of the sequences of each forward pass: at most `tokens` tokens or one sequence, similar lengths
        together."""
        part: list[int] = []
        size = 0
        for at in sorted(range(len(sequences)), key=lambda at: len(sequences[at])):
            if part and size + len(sequences[at]) > self._optimizer_config.tokens:
                yield part
                part, size = [], 0
            part.append(at)
            size += len(sequences[at])
        if part:
            yield part

    def _packed(self, sequences: list[Sequence], weights: list[Any] | None = None) -> Packed:
        return self._pack.convert(sequences, weights).to(self.device)

    # -- optimizers ----------------------------------------------------------------------------------------------------

    def _adamw(self, parameters: list[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        config = self._optimizer_config
        return torch.optim.AdamW(
            parameters, lr=lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )

    def _update(self, optimizer: torch.optim.Optimizer, meter: MetricAccumulator) -> Tensor:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._optimizer_config.max_grad_norm)
        if torch.isfinite(norm):
            optimizer.step()
        else:
            meter.count("updates_not_finite")
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _rate(self, step: int) -> float:
        config, lr = self._optimizer_config, self.config.learning_rate
        if step < config.warmup_steps:
            return lr * (step + 1) / config.warmup_steps
        if config.schedule == "constant":
            return lr
        done = min((step - config.warmup_steps) / max(self.config.steps - config.warmup_steps, 1), 1.0)
        return lr * ((1 - done) if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs besides the policy's weights: optimizers, and the critic."""
        found: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        if self.critic is not None and self.critic_optimizer is not None:
            found |= {"critic": self.critic.state_dict(), "critic_optimizer": self.critic_optimizer.state_dict()}
        return found

    def restore(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Restores the policy's weights and what `state` returned."""
        self.policy.restore(weights)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.critic is not None and self.critic_optimizer is not None:
            self.critic.load_state_dict(state["critic"])
            self.critic_optimizer.load_state_dict(state["critic_optimizer"])


def _select(per_sequence: list[Tensor], which: list[int]) -> Tensor:
    return torch.cat([per_sequence[at] for at in which])


class MetricAccumulator:
    """Metrics of one step, accumulated over its forward passes and read once at the end, so that no pass waits for the
    device."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._means: dict[str, list[tuple[Tensor, int]]] = {}
        self._most: dict[str, list[Tensor]] = {}
        self._last: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._updates = 0

    def add(self, name: str, value: Tensor) -> None:
        """A part of an update's sum; read as the mean over updates."""
        self._sums.setdefault(name, []).append(value.detach())

    def mean(self, name: str, values: Tensor) -> None:
        """Values of which the mean over all passes is read."""
        if values.numel():
            self._means.setdefault(name, []).append((values.detach().float().sum(), values.numel()))

    def most(self, name: str, values: Tensor) -> None:
        """Values of which the largest is read."""
        if values.numel():
            self._most.setdefault(name, []).append(values.detach().max())

    def range(self, name: str, values: Tensor) -> None:
        """Values of which the extremes are read, as `NAME_min` and `NAME_max`."""
        self.most(f"{name}_max", values)
        self.most(f"{name}_min", -values)

    def last(self, name: str, value: Tensor) -> None:
        """A value that replaces the one before."""
        self._last[name] = value.detach()

    def count(self, name: str) -> None:
        """Adds one to a counter."""
        self._counts[name] = self._counts.get(name, 0) + 1

    def updated(self) -> None:
        """Counts an update of the weights."""
        self._updates += 1

    def read(self) -> dict[str, float]:
        """Every metric by its name, and `updates`."""
        updates = max(self._updates, 1)
        found = {name: float(torch.stack(values).sum()) / updates for name, values in self._sums.items()}
        for name, parts in self._means.items():
            total = torch.stack([part for part, _ in parts]).sum()
            found[name] = float(total) / sum(count for _, count in parts)
        for name, values in self._most.items():
            most = float(torch.stack(values).max())
            found[name] = -most if name.endswith("_min") else most
        return {
            **found,
            **{name: float(value) for name, value in self._last.items()},
            **self._counts,
            "updates": self._updates,
        }
