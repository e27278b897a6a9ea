"""Updates the weights from one batch. All that lies between a token and its gradient is here, in `losses` and in
`weighting`.

A batch is gone through `epochs` times, in `minibatches` updates each; a minibatch is computed in packed forward passes
of at most `tokens` tokens, whose gradients add up to those of one pass over all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from headrace.data.errors import InvalidInput
from headrace.data.sequence import Sequence
from headrace.trainer import losses, sharded
from headrace.trainer.advantages import EPS, gae
from headrace.trainer.backends.tensors import Packed, PackedBackend, predicting_tokens
from headrace.trainer.checkpoint import Checkpoints, Progress
from headrace.trainer.config import TrainerConfig
from headrace.trainer.examples import guided, rewards_at
from headrace.trainer.lora import WithoutAdapter
from headrace.trainer.losses import LossBatch
from headrace.trainer.memory import MemoryLimits, MemoryUse, ModelShape, available_bytes, compiles, weights_dtype
from headrace.trainer.optimizer import MasterAdamW
from headrace.trainer.own_functions import is_own, loss_of, loss_value
from headrace.trainer.policy import Critic, Policy
from headrace.trainer.prefix_tree import SharingRule, passes
from headrace.trainer.ranks import ALONE, Ranks, deal, sequence_cost
from headrace.trainer.sharded_state import write_state
from headrace.trainer.step_metrics import MetricAccumulator
from headrace.trainer.weighting import token_weights

Optimizer: TypeAlias = torch.optim.Optimizer | MasterAdamW


@dataclass
class FixedTensors:
    """What stays the same while a batch is learned from: for each sequence, one entry for each target.

    `old` is what ratios are against, `rollout` the log-probs at sampling. With `loss: sft`, which uses neither, they
    are NaN where none was recorded.
    """

    old: list[Tensor]
    rollout: list[Tensor]
    importance: list[Tensor] | None = None
    reference: list[Tensor] | None = None
    teacher: list[Tensor] | None = None
    values: list[Tensor] | None = None
    returns: list[Tensor] | None = None


class Learner:
    """A policy and its optimizer; with `gae` a critic and its optimizer; with a KL a frozen reference."""

    def __init__(self, config: TrainerConfig, device: str, ranks: Ranks = ALONE) -> None:
        self.config, self.device, self.ranks = config, device, ranks
        self._algorithm, self._optimizer_config = config.algorithm, config.optimizer
        if not ranks.alone:
            _check_shardable(config)
        sharding: dict[str, Any] = {"ranks": ranks, "dtype": config.dtype, "device": device}
        self.policy = sharded.policy(config.model, **sharding, lora=config.lora, seed=config.seed)
        self.limits = self._limits()
        self.optimizer = self._optimizer(self.policy, self.policy.parameters(), config.learning_rate)
        self.reference: Policy | WithoutAdapter | None = None
        if self._algorithm.kl and self.policy.adapter is not None and self._algorithm.reference is None:
            self.reference = WithoutAdapter(self.policy.adapter, self.policy.log_probs)
        elif self._algorithm.kl:
            self.reference = sharded.policy(self._algorithm.reference or config.model, **sharding)
            if self._narrows:
                self.reference.narrow()
        self.critic: Critic | None = None
        self.critic_optimizer: Optimizer | None = None
        if self._algorithm.advantage == "gae":
            self.critic = sharded.critic(config.model, **sharding)
            self.critic_optimizer = self._optimizer(self.critic, list(self.critic.parameters()), config.critic.lr)
        self._loss = loss_of(config.algorithm)
        self._fit(self.limits)

    def agree_on_limits(self) -> None:
        """Takes the least of all ranks' limits, so that all cut a batch into the same passes and refuse the same
        sequences. All ranks call it at the same point, before they learn. Raises `RankLost`."""
        least = min(self.ranks.exchange(self.limits), key=lambda limits: limits.available)
        if least != self.limits:
            self._fit(least)

    def learn(self, sequences: list[Sequence], step: int, version: int) -> dict[str, float]:
        """Learns from a batch; returns the step's metrics. `step` counts from 0 and decides the shuffle and the
        learning rate; `version` is what the policy was last published as. Raises `InvalidInput` where a sequence does
        not fit into memory."""
        self.limits.check((sequence.trajectory_uid, len(sequence)) for sequence in sequences)
        meter = MetricAccumulator()
        with torch.no_grad():
            fixed, sequences = self._fixed(sequences)
        rate = self._rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for number, minibatch in enumerate(self._minibatches(len(sequences), step)):
            chosen = [sequences[at] for at in minibatch]
            weights = token_weights(chosen, self._algorithm.weighting, self._algorithm.constant_length)
            for part, counts in self._passes(chosen):
                packed = self._packed([chosen[at] for at in part], [weights[at] for at in part])
                which, noted = [minibatch[at] for at in part], meter if counts else MetricAccumulator()
                self._backward(self._policy_loss(packed, fixed, which, noted, version, first=number == 0), counts)
                if self.critic is not None:
                    self._backward(self._critic_loss(packed, fixed, which, noted), counts)
            if step >= self.config.critic.warmup_steps or self.critic is None:
                meter.last("grad_norm", self._update(self.optimizer, meter))
            else:
                self.optimizer.zero_grad(set_to_none=True)
            if self.critic_optimizer is not None:
                self._update(self.critic_optimizer, meter)
            meter.updated()
        return {**meter.read(self.ranks), "lr": rate}

    def _backward(self, loss: Tensor, counts: bool) -> None:
        """Adds a loss's gradients; zeros where the pass does not count."""
        self.ranks.heard((loss if counts else 0 * loss).backward)

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
        teacher = packed.teacher_log_probs if algorithm.distill else None
        log_probs, entropy, candidates = self.policy.candidate_log_probs(
            packed, packed.teacher_ids if teacher is not None else None, entropy_learns=algorithm.entropy > 0
        )
        weights = packed.weights
        batch = LossBatch(
            log_probs=log_probs,
            old_log_probs=_select(fixed.old, which),
            rollout_log_probs=_select(fixed.rollout, which),
            importance=torch.ones_like(weights) if fixed.importance is None else _select(fixed.importance, which),
            advantages=packed.advantages,
            weights=weights,
            entropy=entropy,
            sequence=packed.sequence,
            sequences=len(which),
            versions=packed.versions,
            version=version,
            algorithm=algorithm,
        )
        loss, metrics = loss_value(batch, self._loss)
        for name, value in metrics.items():
            meter.mean(f"loss_{name}" if is_own(algorithm.loss) else name, torch.as_tensor(value))
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
        if fixed.teacher is not None:
            meter.mean("teacher_reverse_kl", log_probs - _select(fixed.teacher, which))
        meter.add("loss", loss)
        meter.mean("entropy", entropy)
        if algorithm.loss != "sft":  # whoever sampled what is imitated is no policy to be compared with
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
        fixed = FixedTensors(recorded, recorded)
        proximal_is_old = algorithm.old == "proximal"
        unrecorded = any(torch.isnan(log_probs).any() for log_probs in recorded)
        if proximal_is_old or (unrecorded and algorithm.loss != "sft"):
            proximal = self._per_sequence(sequences, lambda packed: self.policy.log_probs(packed)[0])
            # A token without a recorded log-prob counts as sampled by the weights before this batch.
            fixed.rollout = [torch.where(torch.isnan(r), p, r) for r, p in zip(recorded, proximal, strict=True)]
            fixed.old = proximal if proximal_is_old else fixed.rollout
            if proximal_is_old:
                pairs = zip(proximal, fixed.rollout, strict=True)
                fixed.importance = [losses.truncated_importance(p, r, algorithm.cap) for p, r in pairs]
        if algorithm.teacher is not None:
            sequences, fixed.teacher = self._with_teacher(sequences, fixed.rollout, algorithm.teacher.weight)
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

    def _with_teacher(
        self, sequences: list[Sequence], rollout: list[Tensor], weight: float
    ) -> tuple[list[Sequence], list[Tensor]]:
        """The sequences with what the teacher thinks of each sampled token added to its advantage: its log-prob less
        that at sampling, times `weight`; those that came with a sequence stay as they are. And its log-probs."""
        done, found = [], []
        for sequence, sampled in zip(sequences, rollout, strict=True):
            assert sequence.guidance is not None
            assert sequence.guidance.ref_log_probs is not None
            thinks = sequence.guidance.ref_log_probs[sequence.loss_mask]
            whole = np.zeros(len(sequence), np.float32) if sequence.advantages is None else sequence.advantages.copy()
            whole[sequence.loss_mask] += weight * (thinks - sampled.float().cpu().numpy())
            done.append(replace(sequence, advantages=guided(sequence, whole)))
            found.append(torch.from_numpy(thinks).to(self.device))
        return done, found

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
        """`compute`'s values for each target, by sequence; each rank computes those of its own."""
        sizes = [int(sequence.loss_mask.sum()) for sequence in sequences]
        found = list(torch.zeros(sum(sizes), device=self.device).split(sizes))
        for part, counts in self._passes(sequences) if sequences else ():
            values = compute(self._packed([sequences[at] for at in part]))
            for at, mine in zip(part, values.split([sizes[at] for at in part]), strict=True):
                if counts:
                    found[at] = mine
        if self.ranks.alone:
            return found
        return list(self.ranks.add_up(torch.cat(found)).split(sizes)) if found else []

    # -- minibatches ---------------------------------------------------------------------------------------------------

    def _minibatches(self, count: int, step: int) -> Iterator[list[int]]:
        """Indices of the sequences of each update. The shuffle depends on seed and step: a resumed run repeats it."""
        for epoch in range(self._optimizer_config.epochs):
            order = np.random.default_rng([self.config.seed, step, epoch]).permutation(count)
            yield from (
                part.tolist() for part in np.array_split(order, self._optimizer_config.minibatches) if len(part)
            )

    def _passes(self, sequences: Seq[Sequence]) -> Iterator[tuple[list[int], bool]]:
        """Indices of the sequences of each of this rank's forward passes, and whether the pass counts. Sequences are
        dealt to ranks by their cost. A rank with fewer passes than another makes up for them with some that do not
        count, since each exchanges weights."""
        width = self.policy.model.config.get_text_config().hidden_size
        costs = [sequence_cost(len(sequence), width) for sequence in sequences]
        shares = deal(costs, [sequence.prompt_uid for sequence in sequences], self.ranks.count)
        every = [
            [[share[at] for at in part] for part in self._micro_batches([sequences[at] for at in share])]
            for share in shares
        ]
        mine = every[self.ranks.rank]
        yield from ((part, True) for part in mine)
        shortest = min(range(len(sequences)), key=lambda at: len(sequences[at]))
        yield from (([shortest], False) for _ in range(max(map(len, every)) - len(mine)))

    def _micro_batches(self, sequences: Seq[Sequence]) -> Iterator[list[int]]:
        """Indices of the sequences of each forward pass."""
        sharing = self._optimizer_config.share_prefixes
        tokens = [predicting_tokens(sequence) if sharing else sequence.tokens for sequence in sequences]
        return passes(tokens, self._pass_tokens, sharing=sharing)

    def _packed(self, sequences: list[Sequence], weights: list[Any] | None = None) -> Packed:
        return self._pack.convert(sequences, weights).to(self.device)

    # -- optimizers ----------------------------------------------------------------------------------------------------

    def _limits(self) -> MemoryLimits:
        """What fits, by the forecast. Raises `InvalidInput` where not even the model does."""
        use = MemoryUse.of(
            *(self.config, self.device),
            compiled=self.policy.decoder.compiled,
            synced=self.config.sync is not None,
            ranks=self.ranks.count,
        )
        return MemoryLimits.of(ModelShape.of(self.policy.model), use, available_bytes(self.device))

    def _fit(self, limits: MemoryLimits) -> None:
        """Has passes be no longer, and layers recomputed, as these limits say."""
        self.limits = limits
        beyond = {"none": None, "layers": 0, "auto": limits.without_recompute}[self.config.memory.recompute]
        self.policy.decoder.recompute_beyond = beyond
        if self.critic is not None:
            self.critic.decoder.recompute_beyond = beyond
        self._pass_tokens = limits.pass_tokens(self._optimizer_config.tokens, self.device)
        sharing = SharingRule.on(self.device, self._pass_tokens) if self._optimizer_config.share_prefixes else None
        self._pack = PackedBackend(sharing=sharing)

    @property
    def _narrows(self) -> bool:
        """Whether models' weights are rounded to the dtype of the computation. Sharded ones are when they are
        gathered."""
        return self.ranks.alone and weights_dtype(self.config) == self.policy.dtype

    def _optimizer(self, model: Policy | Critic, parameters: list[torch.nn.Parameter], lr: float) -> Optimizer:
        """AdamW for a model, whose weights are narrowed and whose layers are compiled as the configuration says."""
        config, memory = self._optimizer_config, self.config.memory
        exact = model.narrow() if self._narrows else {}
        if self.ranks.alone and compiles(self.config, self.device, model.decoder.parameter_count):
            model.decoder.compile()
            self.limits = self._limits()  # a compiled layer keeps less
        rule = {"lr": lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
        if exact or memory.offload == "optimizer":
            return MasterAdamW(parameters, exact=exact, offload=memory.offload == "optimizer", **rule)
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], fused=True, **rule)

    def _update(self, optimizer: Optimizer, meter: MetricAccumulator) -> Tensor:
        if isinstance(optimizer, MasterAdamW):
            norm = optimizer.clip(self._optimizer_config.max_grad_norm)
        else:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            norm = sharded.whole_of(torch.nn.utils.clip_grad_norm_(parameters, self._optimizer_config.max_grad_norm))
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

    # -- for servers ---------------------------------------------------------------------------------------------------

    def served_weights(self) -> dict[str, Tensor]:
        """The policy's weights as servers compute with them, whole, by their names in memory: once they are copied,
        `Policy.in_checkpoint` gives them the names by which servers load them."""
        return sharded.gathered(self.policy.weights(), self.ranks)

    def raw_log_probs(self, ids: list[int]) -> list[float]:
        """The policy's log-probs of each token but the first, to compare with a server's."""
        return self.policy.raw_log_probs(ids)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """The policy's weights as exactly as they are known, by their names in the checkpoint and in the host's memory:
        the optimizer's masters, where it has any. What a checkpoint must hold for a run to go on from it; servers get
        `served_weights`."""
        exact = _exact(self.optimizer, self.policy.named_parameters()) | self.policy.buffers()
        whole = sharded.gathered(exact, self.ranks)
        return self.policy.in_checkpoint({name: tensor.cpu() for name, tensor in whole.items()})

    def write_state(self, folder: Path) -> None:
        """Writes `state` into a checkpoint's folder."""
        write_state(folder, self.state(), self.ranks)

    def resume(self, checkpoints: Checkpoints, place: Path) -> Progress:
        """Restores everything from a checkpoint; returns its progress. Raises `BadCheckpoint`, and `InvalidInput` where
        it is of another model."""
        progress, written, state = checkpoints.load(place, self.ranks)
        weights = self.policy.in_memory(written)
        if self.policy.adapter is None:
            own = {name: parameter.shape for name, parameter in self.policy.named_parameters().items()}
            checkpoints.check_model(place, weights, own)
        self.restore(sharded.parted(weights, self.ranks), state)
        return progress

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs besides `weights`: optimizers, and the critic."""
        found: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        if self.critic is not None and self.critic_optimizer is not None:
            exact = _exact(self.critic_optimizer, dict(self.critic.named_parameters()))
            found |= {
                "critic": {**self.critic.state_dict(), **exact},
                "critic_optimizer": self.critic_optimizer.state_dict(),
            }
        return found

    def restore(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Restores what `weights` and `state` returned, the weights by their names in memory, each rank its parts. What
        is configured of the optimizers stays as it is now."""
        self.policy.restore(weights)
        _restore_exact(self.optimizer, self.policy.named_parameters(), weights)
        _restore_state(self.optimizer, state["optimizer"])
        if self.critic is not None and self.critic_optimizer is not None:
            self.critic.load_state_dict(state["critic"])
            _restore_exact(self.critic_optimizer, dict(self.critic.named_parameters()), state["critic"])
            _restore_state(self.critic_optimizer, state["critic_optimizer"])


def _check_shardable(config: TrainerConfig) -> None:
    """Raises `InvalidInput` for what one rank can and several cannot."""
    if config.lora is not None:
        raise InvalidInput("lora is set, and adapters are trained by one rank alone: leave out --workers or lora")
    if config.memory.offload != "none":
        raise InvalidInput(
            f"memory.offload is {config.memory.offload}, which one rank alone can: set none; several ranks share what "
            "the optimizer holds"
        )
    if config.compile == "on":
        raise InvalidInput("compile is on, and layers that are sharded over ranks run as they are: set auto or off")


def _exact(optimizer: Optimizer, named: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    if not isinstance(optimizer, MasterAdamW):
        return {name: parameter.detach() for name, parameter in named.items()}
    return {name: optimizer.master(parameter) for name, parameter in named.items()}


def _restore_exact(optimizer: Optimizer, named: dict[str, torch.nn.Parameter], weights: dict[str, Tensor]) -> None:
    if isinstance(optimizer, MasterAdamW):
        optimizer.restore({parameter: weights[name] for name, parameter in named.items()})


def _restore_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loads an optimizer's state without what was configured of it when it was saved: what is now holds."""
    rules = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, rule in zip(optimizer.param_groups, rules, strict=True):
        group.update(rule)


def _select(per_sequence: list[Tensor], which: list[int]) -> Tensor:
    return torch.cat([per_sequence[at] for at in which])
