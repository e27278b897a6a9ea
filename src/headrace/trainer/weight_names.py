"""The names of a model's weights: in memory, and in its checkpoint, by which servers and libraries know them.

transformers holds some weights otherwise than checkpoints do: the experts of a layer as one tensor, or all of a model
under another prefix. What is saved and published goes back by its own rules, those by which it saves; what is resumed
from comes in by those by which it loads. Both move values and compute none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.data.errors import InvalidInput

#: The layer that a weight is of, by its name.
LAYER = re.compile(r".*?\.\d+(?=\.)")


class WeightNames:
    """The names of one model's weights. Raises `InvalidInput` where a checkpoint has several layers in one tensor: they
    are told a layer at a time."""

    def __init__(self, model: Any) -> None:
        """`model` is whole, and as transformers has loaded it."""
        self._model, self._kind = model, type(model)
        saved = model.state_dict().keys()
        #: What is neither trained nor published and belongs into a checkpoint: a router's corrections, for example.
        self.buffers = tuple(name for name, _ in model.named_buffers() if name in saved)
        held = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.named_parameters()}
        held |= {name: torch.empty_like(model.get_buffer(name), device="meta") for name in self.buffers}
        whole = _by_checkpoint(model, held)
        self._differ = any(whole.get(name) is not tensor for name, tensor in held.items())
        by_layers = self.in_checkpoint(held)
        if odd := sorted(_shapes(whole).items() ^ _shapes(by_layers).items()):
            raise InvalidInput(
                f"{self._kind.__name__} has weights of several layers in one tensor of its checkpoint ({odd[0][0]}), "
                "which the trainer cannot publish; take a model of another family"
            )

    def in_checkpoint(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights by their names in the checkpoint. They are taken out of `weights` a layer at a time: no more than one
        is there twice."""
        if not self._differ:
            return weights
        layers: dict[str, list[str]] = {}
        for name in weights:
            found = LAYER.match(name)
            layers.setdefault(found[0] if found else "", []).append(name)
        renamed: dict[str, Tensor] = {}
        for names in layers.values():
            renamed |= _by_checkpoint(self._model, {name: weights.pop(name) for name in names})
        return renamed

    def in_memory(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A checkpoint's parameters by their names in memory; what the model does not know, by its name there, and
        what the checkpoint lacks is not in it."""
        if not self._differ:
            return {name: tensor for name, tensor in weights.items() if name not in self.buffers}
        loaded, told = self._kind.from_pretrained(
            None,
            config=self._model.config,
            state_dict=dict(weights),
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # whoever compares shapes says more
            output_loading_info=True,
        )
        lacking = {*told["missing_keys"], *(name for name, *_ in told["mismatched_keys"])}
        unknown = {name: weights[name] for name in told["unexpected_keys"] if name in weights}
        found = {name: tensor.detach() for name, tensor in loaded.named_parameters() if name not in lacking}
        return found | unknown


def _by_checkpoint(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as transformers would save them."""
    from transformers import core_model_loading

    found: dict[str, Tensor] = core_model_loading.revert_weight_conversion(model, weights)
    return found


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}
