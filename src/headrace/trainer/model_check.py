"""Whether the trainer computes a model as transformers and its servers do: asked of its configuration, and of two short
passes over it when it is loaded.

Sequences stand in one row, and attention alone keeps them apart (`attention`). A layer that mixes tokens in another
way, a convolution or a recurrence, would carry one sequence into the next without a word. And log-probs are computed
from the decoder's states by the head and one factor: a model that does more to its logits would be trained on other
log-probs than its servers sample by.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from headrace.data.errors import InvalidInput

#: The `layer_types` of configurations whose layers mix tokens by attention to all that came before, or to a window of
#: it, which packed attention refuses by itself.
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "attention")
#: The `layer_types` of recurrences, convolutions, and layers that have them beside attention.
MIXING_LAYERS = ("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding", "recurrent")
#: Names in configurations of what logits are multiplied by, or, in some models, divided by.
LOGIT_FACTORS = ("logits_scaling", "logit_scale", "lm_head_multiplier")
#: Where the two sequences of the tried row begin and end, in tokens: few, and of different lengths.
CUTS = (0, 9, 16)
#: How far states and logits may be off, as a share of their norm: float32 rounds to a thousandth of this share, and
#: what is carried over is a hundred times as much.
ROUNDING = 1e-3


def check_layers(config: Any, model: object) -> None:
    """Raises `InvalidInput` where a configuration names layers that packed sequences cannot go through. `model` is what
    the user calls it."""
    kinds = dict.fromkeys(getattr(config.get_text_config(), "layer_types", None) or ())
    wrong = [kind for kind in kinds if kind not in ATTENTION_LAYERS]
    if wrong:
        why = (
            "sequences are packed into one row, and such layers carry one into the next"
            if any(kind in MIXING_LAYERS for kind in wrong)
            else "packed attention has no masks, by which such layers leave tokens out"
        )
        raise InvalidInput(
            f"model {model} has layers of the kind {', '.join(wrong)}: {why}; take a model whose layers are all "
            "full_attention, such as Llama, Qwen3 or Qwen3-MoE"
        )


@torch.no_grad()  # type: ignore[untyped-decorator]
def check_packing(model: Any, name: object) -> None:
    """Raises `InvalidInput` where a sequence's states depend on the sequence before it in a packed row, with the layer
    that carries it over, and where the model cannot compute packed sequences at all."""
    ids, changed = _rows(model)
    if _moved(_states(model, ids)[CUTS[1] :], _states(model, changed)[CUTS[1] :]):
        raise InvalidInput(
            f"model {name} has {_carrier(model, ids, changed)}, which carries one sequence of a packed row into the "
            "next; take a model whose layers mix tokens by attention alone, such as Llama, Qwen3 or Qwen3-MoE"
        )


@torch.no_grad()  # type: ignore[untyped-decorator]
def logit_factor(model: Any, name: object) -> float:
    """What a model multiplies its head's output by to get its logits: 1, or what its configuration says. Raises
    `InvalidInput` where it does something else with them."""
    ids, _ = _rows(model)
    plain = model.get_output_embeddings()(_states(model, ids))
    logits = _given(model, ids).logits[0]
    for factor in _known_factors(model.config.get_text_config()):
        if logits.shape == plain.shape and not _moved(logits, factor * plain):
            return factor
    raise InvalidInput(
        f"model {name} ({type(model).__name__}) changes its logits in a way that the trainer does not know; it knows "
        f"the factors {', '.join(LOGIT_FACTORS)} of a configuration: take a model whose logits are its head's output"
    )


def _known_factors(config: Any) -> Iterator[float]:
    yield 1.0
    for name in LOGIT_FACTORS:
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value:
            yield float(value)
            yield 1.0 / value


def _rows(model: Any) -> tuple[Tensor, Tensor]:
    """A row of two sequences, and one whose first sequence is another throughout."""
    embeddings = model.get_input_embeddings().weight
    ids = torch.arange(CUTS[-1], device=embeddings.device)
    changed = torch.where(ids < CUTS[1], ids + 1, ids)
    return ids % len(embeddings), changed % len(embeddings)


def _given(module: Any, ids: Tensor) -> Any:
    """What a model or its decoder gives for a row. Raises `InvalidInput` where that takes no packed sequences."""
    positions = torch.cat([torch.arange(end - begin, device=ids.device) for begin, end in pairwise(CUTS)])
    try:
        return module(input_ids=ids[None], position_ids=positions[None], use_cache=False, cuts=CUTS)
    except (TypeError, ValueError) as error:  # what its forward pass does not know
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{type(module).__name__} of transformers takes no packed sequences: {error}") from error


def _states(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = _given(model.get_decoder(), ids).last_hidden_state[0]
    return found


def _moved(one: Tensor, other: Tensor) -> bool:
    """Whether any row of two tensors differs by more than rounding explains."""
    apart = (one.float() - other.float()).norm(dim=-1)
    return bool((apart > ROUNDING * one.float().norm(dim=-1)).any())


def _carrier(model: Any, ids: Tensor, changed: Tensor) -> str:
    """The class of the first part of a layer whose output for the second sequence differs between two rows: what comes
    before it gave the same."""
    runs: list[list[tuple[str, Tensor]]] = []

    def note(part: nn.Module, given: Any, found: Any) -> None:
        output = found[0] if isinstance(found, tuple) else found
        if isinstance(output, Tensor) and output.dim() > 1:
            runs[-1].append((type(part).__name__, output.flatten(0, -2)[CUTS[1] :].clone()))

    layers = getattr(model.get_decoder(), "layers", ())
    hooks = [part.register_forward_hook(note) for layer in layers for part in layer.children()]
    try:
        for row in (ids, changed):
            runs.append([])
            _states(model, row)
    finally:
        for hook in hooks:
            hook.remove()
    first, second = runs
    for (name, one), (_, other) in zip(first, second, strict=True):
        if _moved(one, other):
            return name
    return "a layer"
