"""LoRA: adapters beside the linear layers of a model whose own weights stay as they are.

Only the adapters are trained, checkpointed and published. `peft` computes them, and its names and files are kept, so
that any server or library that loads peft's adapters loads ours. The model without them is where training began: the
reference of a KL needs no second model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.data.errors import InvalidInput
from headrace.extras import MissingExtra, install_command
from headrace.trainer.backends.tensors import Packed
from headrace.trainer.config import LoraConfig
from headrace.trainer.sync.weights import AdapterWeights
from headrace.trainer.weight_names import WeightNames

#: What peft calls the one adapter of a model inside it, and what it writes before every name.
ADAPTER, PREFIX = "default", "base_model.model."
#: How peft calls a wrapped layer's own weights, and the two matrices.
BASE, FIRST, SECOND = ".base_layer.", f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}."
#: Our names of the first matrix' beginnings, as peft has them.
INITS = {"kaiming": True, "gaussian": "gaussian"}


def is_adapters(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter, not to the model."""
    return FIRST in name or SECOND in name


class Adapter:
    """The adapters of one model. Making it puts them into the model, in place, and freezes all else.

    Raises `MissingExtra` without peft, and `InvalidInput` where a target matches no linear layer of the decoder.
    """

    def __init__(
        self, model: Any, config: LoraConfig, folder: Path, *, seed: int = 0, names: WeightNames | None = None
    ) -> None:
        """`folder` is the checkpoint that `model` came from; the adapters' first values depend on `seed` alone, so
        that every process of a run begins with the same. `names` are the model's; without them what is `merged` has
        those in memory."""
        try:
            import peft
        except ModuleNotFoundError as error:
            raise MissingExtra(f"lora needs peft: {install_command('lora')}") from error
        self._model, self._config, self._names = model, config, names
        wanted = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.scaled_alpha,
            target_modules=_targets(model, config.targets),
            init_lora_weights=INITS[config.init],
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(folder.resolve() if folder.is_dir() else folder),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(wanted, model, ADAPTER)
        self._layers = [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
        self.config = _written(wanted)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The adapters' matrices by peft's names."""
        return {
            PREFIX + name.replace(f".{ADAPTER}.", "."): parameter
            for name, parameter in self._model.named_parameters()
            if is_adapters(name)
        }

    def weights(self) -> dict[str, Tensor]:
        """Their values, which share the model's memory."""
        return {name: parameter.detach() for name, parameter in self.named_parameters().items()}

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Copies the matrices of a checkpoint into the model; `InvalidInput` where they are of other targets or of
        another rank, and then none is copied."""
        mine = self.weights()
        shapes = {name: tuple(tensor.shape) for name, tensor in mine.items()}
        found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if shapes != found:
            odd = min(name for name in {*shapes, *found} if shapes.get(name) != found.get(name))
            raise InvalidInput(
                f"the checkpoint's adapter is another: {odd} is {found.get(odd, 'not in it')}, and "
                f"{shapes.get(odd, 'not in the model')} by this configuration; set lora.rank and lora.targets as they "
                "were, or begin in another run folder"
            )
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(weights[name])

    def snapshot(self) -> AdapterWeights:
        """The adapters as they are now, to be published: training may go on meanwhile."""
        tensors = {name: tensor.clone() for name, tensor in self.weights().items()}
        return AdapterWeights(tensors, self.config, lambda device=None: self.merged(tensors, device))

    def merged(self, tensors: Mapping[str, Tensor] | None = None, device: str | None = None) -> dict[str, Tensor]:
        """All weights by their names in the checkpoint, with the adapters (these, or the present ones) added to the
        layers that they stand beside: W + scale * B @ A. The sums go to `device` one by one; all else, and the model
        itself, stays as it is."""
        tensors = self.weights() if tensors is None else tensors
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, tensor in self._model.named_parameters():
                if is_adapters(name):
                    continue
                layer, own, kind = name.partition(BASE)
                if own and kind == "weight":
                    first = tensors[f"{PREFIX}{layer}.lora_A.weight"]
                    second = tensors[f"{PREFIX}{layer}.lora_B.weight"]
                    added = self._config.scale * (second.float() @ first.float())
                    tensor = (tensor.detach().float() + added).to(device or tensor.device, tensor.dtype)
                found[f"{layer}.{kind}" if own else name] = tensor.detach()
        return found if self._names is None else self._names.in_checkpoint(found)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within it, the model computes as it did before training."""
        for layer in self._layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enable_adapters(True)


class WithoutAdapter:
    """A policy as it was before its adapters: a KL's reference that takes no memory. `log_probs` is the policy's."""

    def __init__(self, adapter: Adapter, log_probs: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._adapter, self._log_probs = adapter, log_probs

    def log_probs(self, packed: Packed, *, entropy_learns: bool = False) -> tuple[Tensor, Tensor]:
        """As `Policy.log_probs`. Without gradients: nothing that is trained takes part."""
        with torch.no_grad(), self._adapter.disabled():
            return self._log_probs(packed, entropy_learns=entropy_learns)


def _targets(model: Any, asked: list[str] | str | None) -> list[str]:
    """The decoder's linear layers that are asked for, as short as they can be named: by the ends of their names where
    these mean no other module. What is asked has peft's meaning: a list has whole names or ends of names, a text is a
    regular expression of whole names."""
    within = {id(module) for module in model.get_decoder().modules()}
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear) and id(module) in within]
    patterns = [".*"] if asked is None else [asked] if isinstance(asked, str) else [_ending(end) for end in asked]
    unmatched = [at for at, pattern in enumerate(patterns) if not any(re.fullmatch(pattern, name) for name in linear)]
    if unmatched:
        said = asked if isinstance(asked, str) else ", ".join((asked or [])[at] for at in unmatched)
        raise InvalidInput(
            f"lora.targets: {said} matches no linear layer of the decoder; it has {', '.join(_ends(linear))} "
            f"(whole names look like {min(linear, default='none')})"
        )
    chosen = [name for name in linear if any(re.fullmatch(pattern, name) for pattern in patterns)]
    ends = _ends(chosen)
    meant = [name for name in modules if any(re.fullmatch(_ending(end), name) for end in ends)]
    return ends if set(meant) == set(chosen) else sorted(chosen)


def _ending(end: str) -> str:
    return rf"(.*\.)?{re.escape(end)}"


def _ends(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _written(config: Any) -> dict[str, Any]:
    """`adapter_config.json` of an adapter that is to be loaded, not trained on."""
    found = {**config.to_dict(), "inference_mode": True}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}
