"""The models with their weights sharded over ranks, by torch's FSDP: each rank keeps its part of every layer, and has a
layer whole only while it computes it.

Losses are sums over a minibatch, and each rank computes those of its own sequences: gradients are added up over ranks,
not averaged. Every rank makes the same forward and backward passes in the same order, since each of them exchanges
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headrace.trainer.backends.tensors import Packed
from headrace.trainer.policy import Critic, Policy
from headrace.trainer.ranks import Ranks

T = TypeVar("T")


def policy(folder: Path, ranks: Ranks, *, dtype: str, device: str, **options: Any) -> Policy:
    """The policy of this rank: a whole one where it is alone."""
    if ranks.alone:
        return Policy(folder, dtype=dtype, device=device, **options)
    return ShardedPolicy(folder, ranks, dtype=dtype, device=device, **options)


def critic(folder: Path, ranks: Ranks, *, dtype: str, device: str) -> Critic:
    """The critic of this rank: a whole one where it is alone."""
    if ranks.alone:
        return Critic(folder, dtype=dtype, device=device)
    return ShardedCritic(folder, ranks, dtype=dtype, device=device)


class ShardedPolicy(Policy):
    """A policy of which each rank has a part. What computes is called on all ranks; weights are in parts (`gathered`
    makes them whole)."""

    def __init__(self, folder: Path, ranks: Ranks, *, dtype: str, device: str, **options: Any) -> None:
        super().__init__(folder, dtype=dtype, device="cpu", **options)  # whole, before it is cut: in the host's memory
        self.device, self._ranks = torch.device(device), ranks
        self.decoder.device = self.device
        self._root = shard(_Root(self.model), ranks, self.dtype)

    def candidate_log_probs(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        compute = partial(super().candidate_log_probs, *given, **options)

        def copied() -> tuple[Tensor, ...]:  # FSDP asks for tensors that are no views
            return tuple(tensor.clone() for tensor in compute())

        log_probs, entropy, candidates = self._computed(copied)
        return log_probs, entropy, candidates

    def raw_log_probs(self, ids: list[int]) -> list[float]:
        with torch.no_grad():
            return self._computed(partial(super().raw_log_probs, ids))

    def _computed(self, call: Callable[[], T]) -> T:
        found: T = self._ranks.heard(lambda: self._root(call))
        if not torch.is_grad_enabled():
            self._root.reshard()  # else a backward pass does it, once it needs them no more
        return found


class ShardedCritic(Critic):
    """A critic of which each rank has a part."""

    def __init__(self, folder: Path, ranks: Ranks, *, dtype: str, device: str) -> None:
        super().__init__(folder, dtype=dtype, device="cpu")
        self.device, self._ranks = torch.device(device), ranks
        self.decoder.device = self.device
        shard(self.head, ranks, torch.float32)  # computes in it, whatever the trunk does
        shard(self, ranks, self.dtype)

    def forward(self, packed: Packed) -> Tensor:
        return super().forward(packed).clone()  # FSDP asks for a tensor that is no view

    def __call__(self, packed: Packed) -> Tensor:
        found: Tensor = self._ranks.heard(lambda: super(ShardedCritic, self).__call__(packed))
        if not torch.is_grad_enabled():
            self.reshard()
        return found


class _Root(nn.Module):  # type: ignore[misc] # torch is not checked
    """What FSDP sees as one forward pass: a call that may use any part of the model in any order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], T]) -> T:
        return call()


def shard(root: Any, ranks: Ranks, dtype: torch.dtype) -> Any:
    """Cuts a model's weights over the ranks, in place: a layer at a time, and what is left with the root. The parts
    stay float32, as gradients do; what is gathered to compute with is of `dtype`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    for layer in _layers(root):
        fully_shard(layer, mesh=ranks.mesh, mp_policy=precision)
    fully_shard(root, mesh=ranks.mesh, mp_policy=precision)
    for module in root.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def _layers(root: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules: a transformer's layers."""
    for child in root.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def whole_of(tensor: Tensor) -> Tensor:
    """A tensor of which each rank has a part, whole on every rank; one that is whole, as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gathered(weights: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The whole of weights of which each rank has a part, on rank 0 and in the host's memory; none on other ranks.
    Called by all of them. Where there is one rank, they are as they were given."""
    if ranks.alone:
        return dict(weights)
    found = {}
    for name, tensor in weights.items():
        whole = whole_of(tensor)
        if ranks.rank == 0:
            found[name] = whole.cpu()
    return found


def parted(weights: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """This rank's parts of weights that every rank has whole; the weights where there is one rank."""
    return {name: tensor if ranks.alone else part_of(tensor, ranks) for name, tensor in weights.items()}


def part_of(tensor: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part of a tensor that every rank has whole, on the mesh's device. Nothing is exchanged."""
    from torch.distributed.tensor import Shard, distribute_tensor

    found: Tensor = distribute_tensor(tensor.to(ranks.mesh.device_type), ranks.mesh, [Shard(0)], src_data_rank=None)
    return found
