"""How much memory a pass takes, before it is run: a sum over what is held at its peak, from the model's shape.

The peak of a step is the backward pass of the last layer, or of the logits: by then everything that the layers keep is
there. What a layer of the Llama family keeps is listed tensor by tensor in `kept_by_layer`. The sums are of what is
allocated; `USABLE` leaves room for what an allocator loses between blocks and for the kernels themselves.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.data.errors import InvalidInput
from headrace.trainer import logits
from headrace.trainer.config import LearningConfig
from headrace.trainer.lora import is_adapters

log = logging.getLogger(__name__)

GIB = 1 << 30
#: The share of a device's memory that a forecast may fill.
USABLE = 0.92
#: AdamW's two averages, a master, and a gradient: bytes a weight, in float32.
AVERAGES, MASTER, GRADIENT = 8, 4, 4
#: Bytes that several ranks hold of each of their own weights: float32, whatever is computed in.
PART = 4
#: How often a rank holds a whole layer in the computation's dtype: the one that it computes, the next, which is on its
#: way, and the gradients of the one; and how often what is not in a layer: itself, and its gradients.
GATHERED_LAYERS, GATHERED_OUTSIDE = 3, 2
#: Bytes held for each logit: computed as a whole (float32 logits, their log-softmax, and two tensors in computing the
#: entropy or the gradient), and in chunks (float32 logits, changed in place, and one more).
LOGIT_WHOLE, LOGIT_IN_CHUNK = 16, 8
#: Models and passes from which on layers are compiled by themselves. Compiling costs time once, whatever their size;
#: small ones are through before it has paid.
COMPILED_PARAMETERS, COMPILED_TOKENS = 100_000_000, 4096
#: The longest sequence that is asked about.
MOST_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides how much memory it takes: its parameters in all, those that are trained, those of a LoRA
    adapter, those in layers, and those of the decoder without a head or an adapter, of which a critic is made.
    `intermediate` counts the experts that see a token."""

    parameters: int
    trained: int
    in_layers: int
    decoder: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    adapters: int = 0
    #: Queries and keys have norms of their own (Qwen3).
    qk_norm: bool = False

    @classmethod
    def of(cls, model: Any) -> ModelShape:
        """The shape of a causal LM of transformers, on any device."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        middle = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        experts = getattr(config, "num_experts_per_tok", None)
        if experts:
            middle = experts * (getattr(config, "moe_intermediate_size", None) or middle)
        decoder = model.get_decoder()
        layers = getattr(decoder, "layers", None)
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            in_layers=sum(parameter.numel() for parameter in layers.parameters()) if layers is not None else 0,
            decoder=sum(value.numel() for name, value in decoder.named_parameters() if not is_adapters(name)),
            adapters=sum(value.numel() for name, value in model.named_parameters() if is_adapters(name)),
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate=middle,
            vocabulary=config.vocab_size,
            qk_norm=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        )


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What of a configuration decides how much memory is taken. Widths are bytes: of the computation, of the weights
    that it computes with. `reference` is whether one is loaded, `published` whether what is on its way to servers is a
    copy on the device, `ranks` over how many devices weights, gradients and optimizer are spread."""

    computed: int = 4
    weights: int = 4
    recompute: bool = False
    compiled: bool = False
    offload: bool = False
    reference: bool = False
    critic: bool = False
    published: bool = False
    ranks: int = 1

    @classmethod
    def of(
        cls,
        config: LearningConfig,
        device: str = "cpu",
        *,
        compiled: bool = False,
        synced: bool = False,
        ranks: int = 1,
    ) -> MemoryUse:
        """`recompute` is whether the configuration allows it: `auto` does. `synced` is whether weights are published.

        Several ranks compute with what they gather, which is in the dtype of the computation, and gather what they
        publish in the host's memory, tensor by tensor. With LoRA a KL's reference is the model itself, unless another
        is named.
        """
        algorithm, computed = config.algorithm, 2 if config.dtype == "bfloat16" else 4
        return cls(
            computed=computed,
            weights=weights_dtype(config).itemsize if ranks == 1 else computed,
            recompute=config.memory.recompute != "none",
            compiled=compiled,
            offload=config.memory.offload == "optimizer",
            reference=algorithm.kl > 0 and (config.lora is None or algorithm.reference is not None),
            critic=algorithm.advantage == "gae",
            published=synced and (ranks == 1 or torch.device(device).type == "cpu"),
            ranks=ranks,
        )

    @property
    def held(self) -> int:
        """Bytes that a weight takes where it is held."""
        return self.weights if self.ranks == 1 else PART

    @property
    def master(self) -> int:
        """Bytes of a weight's master; 0 where the weight is its own."""
        return MASTER if self.held < MASTER else 0


def weights_dtype(config: LearningConfig) -> torch.dtype:
    """What the model's weights are held in."""
    wanted = config.dtype if config.memory.weights == "auto" else config.memory.weights
    found: torch.dtype = getattr(torch, wanted)
    return found


def compiles(config: LearningConfig, device: str, parameters: int) -> bool:
    """Whether layers are compiled: as the configuration says; by itself where it pays."""
    if config.compile != "auto":
        return config.compile == "on"
    large = parameters >= COMPILED_PARAMETERS and config.optimizer.tokens >= COMPILED_TOKENS
    return large and config.dtype == "bfloat16" and torch.device(device).type == "cuda"


def kept_by_layer(shape: ModelShape, use: MemoryUse) -> dict[str, int]:
    """Bytes a token that one layer keeps for its backward pass, by tensor.

    Norms compute in float32. The rotary embedding keeps nothing but sines and cosines, and residual sums keep nothing.
    A compiled layer keeps what goes into norms and matrix products and comes out of the latter, and computes what lies
    between again.
    """
    w, hidden, middle = use.computed, shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found = {
        "queries, keys, values": w * (queries + 2 * keys),
        "attention's output": w * queries,
        "attention's log-sum-exps": 4 * shape.heads,
    }
    if use.compiled:
        found |= {"two norms: input, output": 4 * w * hidden, "gate, up, their product": 3 * w * middle}
        return found | ({"queries and keys before their norms": w * (queries + keys)} if shape.qk_norm else {})
    if use.weights == use.computed:
        found["two norms: float32 input, normalized, output"] = 2 * (4 + w + w) * hidden
    else:  # under autocast each of five matrix products has its own cast of the norm's output
        found["two norms: float32 input, normalized"] = 2 * (4 + 4) * hidden
        found["five casts of norms' outputs"] = 5 * w * hidden
    found["gate, its activation, up, their product"] = 4 * w * middle
    if shape.qk_norm:
        found["norms of queries and keys"] = (4 + w) * (queries + keys)
    return found


def kept_by_pass(shape: ModelShape, use: MemoryUse, tokens: int, targets: int | None = None) -> int:
    """Bytes that one forward pass keeps for its backward pass, without the logits. A recomputed layer keeps its
    input."""
    residual = max(use.weights, use.computed)  # under autocast residual sums stay float32
    inputs = residual * shape.hidden
    layer = inputs if use.recompute else sum(kept_by_layer(shape, use).values())
    rotary = 2 * residual * shape.head_dim
    last_norm = (4 + residual) * shape.hidden
    predicting = use.computed * shape.hidden * (tokens if targets is None else targets)
    return tokens * (shape.layers * layer + rotary + last_norm) + predicting


def forecast(
    shape: ModelShape, use: MemoryUse, tokens: int, targets: int | None = None, *, several: bool = True
) -> dict[str, int]:
    """Bytes at the peak of a step, by what they are for, with passes of so many tokens, of which `targets` (default:
    all) are trained on. What is in the CPU's memory by `offload` is not in it: see `offloaded`.

    In a step of `several` passes the gradients of the first are there while the second is computed; in a step of one
    they come as its activations go.
    """
    residual = max(use.weights, use.computed)
    casts = shape.parameters * use.computed if use.weights > use.computed else 0
    layer = sum(kept_by_layer(shape, use).values()) if use.recompute else 0
    # The gradients of an activation, of its two factors and of the residual sum are there beside what is kept.
    backward = 2 * use.computed * shape.intermediate + 2 * residual * shape.hidden
    found = _learned(shape.parameters, shape.trained, use)
    critic = _learned(shape.decoder, shape.decoder, use) if use.critic else {}
    kept = kept_by_pass(shape, use, tokens, targets)
    # The logits' backward pass is through before the last layer's begins.
    computing = max(tokens * (layer + backward), _logits(shape, use, tokens if targets is None else targets))
    if not several:
        last = critic or found  # a pass goes backward through the policy, then through the critic
        last["gradients"] = max(last["gradients"] - kept - computing, 0)
    found |= {
        "casts of the weights": casts,
        "layers gathered from all ranks": _gathered(shape, use),
        "activations": kept,
        "backward pass of the logits or of one layer": computing,
        "the copy that is published": (shape.adapters or shape.parameters) * use.held if use.published else 0,
        "reference": (shape.parameters - shape.adapters) * use.held // use.ranks if use.reference else 0,
        "critic": sum(critic.values()),
    }
    return {name: size for name, size in found.items() if size}


def _learned(parameters: int, trained: int, use: MemoryUse) -> dict[str, int]:
    """Bytes of a model and of its optimizer on one rank's device."""
    states = 0 if use.offload else trained * (AVERAGES + use.master)
    found = {
        "weights": parameters * use.held,
        "masters and AdamW's averages" if use.master else "AdamW's averages": states,
        "gradients": trained * GRADIENT,
    }
    return {name: size // use.ranks for name, size in found.items()}


def _gathered(shape: ModelShape, use: MemoryUse) -> int:
    """Bytes of what a rank holds whole while it computes; 0 where it is alone. A layer's gradients are added up over
    ranks in float32."""
    if use.ranks == 1:
        return 0
    one = shape.in_layers // shape.layers
    outside = shape.parameters - shape.in_layers
    return GATHERED_OUTSIDE * use.computed * outside + (GATHERED_LAYERS * use.computed + GRADIENT) * one


def offloaded(shape: ModelShape, use: MemoryUse) -> int:
    """Bytes in the CPU's memory by `offload`: masters, averages, and gradients on their way."""
    trained = shape.trained + (shape.decoder if use.critic else 0)
    return trained * (MASTER + AVERAGES + GRADIENT) if use.offload else 0


def longest(shape: ModelShape, use: MemoryUse, available: int) -> int:
    """The most tokens of a pass that fit into so many bytes, all of them trained on; 0 where the model does not."""
    low, high = 0, MOST_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(forecast(shape, use, middle).values()) <= available * USABLE
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def available_bytes(device: str) -> int:
    """What this process has of a device's memory, and what is free."""
    found = torch.device(device)
    if found.type == "cuda":
        return int(torch.cuda.mem_get_info(found)[0] + torch.cuda.memory_reserved(found))
    try:
        return _kilobytes("/proc/meminfo", "MemAvailable:") + _kilobytes("/proc/self/status", "VmRSS:")
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _kilobytes(file: str, name: str) -> int:
    """A line of a file under /proc, in bytes."""
    with open(file) as lines:
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What fits: tokens of one pass with its layers kept (beyond that they are recomputed, where that is allowed), and
    of the longest pass at all."""

    without_recompute: int
    longest: int
    available: int

    @classmethod
    def of(cls, shape: ModelShape, use: MemoryUse, available: int) -> MemoryLimits:
        """Raises `InvalidInput` where not even the model fits."""
        found = longest(shape, use, available)
        if not found:
            parts = {name: size / GIB for name, size in forecast(shape, use, 0).items() if size >= GIB / 100}
            named = ", ".join(f"{name} {size:.2f} GiB" for name, size in parts.items())
            raise InvalidInput(
                f"a model of {shape.parameters:,} parameters does not fit into {available / GIB:.2f} GiB: {named}; "
                "set dtype: bfloat16, memory.offload: optimizer, or take a smaller model"
            )
        return cls(longest(shape, replace(use, recompute=False), available), found, available)

    def pass_tokens(self, wanted: int, device: str) -> int:
        """The tokens of a pass: what is wanted, or on a GPU what fits of it, with a warning. What fits on a CPU changes
        from hour to hour, and passes would with it."""
        if wanted <= self.longest or torch.device(device).type != "cuda":
            return wanted
        log.warning("optimizer.tokens is %d; passes have at most %d tokens: more do not fit", wanted, self.longest)
        return self.longest

    def check(self, lengths: Iterable[tuple[str, int]]) -> None:
        """Raises `InvalidInput` where a sequence is too long to be learned from: each has a trajectory's uid and its
        tokens."""
        for uid, tokens in lengths:
            if tokens > self.longest:
                raise InvalidInput(
                    f"trajectory {uid} has {tokens:,} tokens; the longest that fits into "
                    f"{self.available / GIB:.2f} GiB has about {self.longest:,}: set max_length to that to skip longer "
                    "ones, memory.recompute: layers, dtype: bfloat16 or memory.offload: optimizer to fit more"
                )


def _logits(shape: ModelShape, use: MemoryUse, targets: int) -> int:
    count = targets * shape.vocabulary
    if count <= logits.MAX_LOGITS:
        return count * LOGIT_WHOLE
    # In chunks the head's gradient is summed in float32; a chunk's share and the cast of the sum are beside it.
    return logits.MAX_LOGITS * LOGIT_IN_CHUNK + shape.vocabulary * shape.hidden * (4 + 2 * use.computed)
