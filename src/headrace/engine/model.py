"""One forward pass of a Llama-like transformer over rows of the cache.

It is written out here because a step of a small model is all overhead: this is about fifteen operations a layer, and
nothing else. `FAMILIES` lists the architectures; a checkpoint of another is refused when it is opened. Tests compare it
with transformers' own forward pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from headrace.data.errors import InvalidInput
from headrace.engine.cache import KVCache
from headrace.engine.weights import EMBED, HEAD, Weights, checkpoint

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class ModelLayer:
    """The tensors of one block, fused, and (in, out) rather than (out, in), which makes small products much faster."""

    def __init__(self, config: Any, head_dim: int, options: dict[str, Any]) -> None:
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        family = config.model_type
        rows = (heads + 2 * kv_heads) * head_dim
        self.qkv = torch.empty(hidden, rows, **options)
        biased = family == "qwen2" or getattr(config, "attention_bias", False)
        self.qkv_bias = torch.empty(rows, **options) if biased else None
        self.out = torch.empty(heads * head_dim, hidden, **options)
        self.out_bias = torch.empty(hidden, **options) if biased and family != "qwen2" else None
        self.q_norm = torch.empty(head_dim, **options) if family == "qwen3" else None
        self.k_norm = torch.empty(head_dim, **options) if family == "qwen3" else None
        self.gate_up = torch.empty(hidden, 2 * config.intermediate_size, **options)
        self.down = torch.empty(config.intermediate_size, hidden, **options)
        self.norm = torch.empty(hidden, **options)
        self.mlp_norm = torch.empty(hidden, **options)

    def views(self, prefix: str, config: Any, head_dim: int) -> dict[str, torch.Tensor]:
        """The block's tensors by their names in a checkpoint, as views."""
        q, k = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        cuts = {"q_proj": slice(0, q), "k_proj": slice(q, q + k), "v_proj": slice(q + k, q + 2 * k)}
        found = {f"{prefix}self_attn.{name}.weight": self.qkv[:, cut].t() for name, cut in cuts.items()}
        if self.qkv_bias is not None:
            found |= {f"{prefix}self_attn.{name}.bias": self.qkv_bias[cut] for name, cut in cuts.items()}
        middle = config.intermediate_size
        found |= {
            f"{prefix}self_attn.o_proj.weight": self.out.t(),
            f"{prefix}mlp.gate_proj.weight": self.gate_up[:, :middle].t(),
            f"{prefix}mlp.up_proj.weight": self.gate_up[:, middle:].t(),
            f"{prefix}mlp.down_proj.weight": self.down.t(),
            f"{prefix}input_layernorm.weight": self.norm,
            f"{prefix}post_attention_layernorm.weight": self.mlp_norm,
        }
        rest = {"self_attn.o_proj.bias": self.out_bias, "self_attn.q_norm.weight": self.q_norm}
        rest["self_attn.k_norm.weight"] = self.k_norm
        return found | {f"{prefix}{name}": tensor for name, tensor in rest.items() if tensor is not None}


class EngineModel:
    """A loaded checkpoint. Raises `InvalidInput` for an architecture that is not among `FAMILIES`."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder)
        _refuse_unknown(folder, config)
        options = {"dtype": dtype, "device": device}
        if device.type == "cuda":  # cuDNN's attention plans anew for every length, and every token has another one
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.config, self.dtype, self.device = config, dtype, device
        self.vocabulary = int(config.vocab_size)
        self.context = int(config.max_position_embeddings)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        self.embed = torch.empty(self.vocabulary, config.hidden_size, **options)
        tied = bool(config.tie_word_embeddings)
        self.head = self.embed.t() if tied else torch.empty(config.hidden_size, self.vocabulary, **options)
        self.norm = torch.empty(config.hidden_size, **options)
        self.layers = [ModelLayer(config, self.head_dim, options) for _ in range(config.num_hidden_layers)]
        views = {EMBED: self.embed, "model.norm.weight": self.norm}
        for at, layer in enumerate(self.layers):
            views |= layer.views(f"model.layers.{at}.", config, self.head_dim)
        if not tied:
            views[HEAD] = self.head.t()
        self.weights = Weights(views, tied=tied)
        self.weights.load(checkpoint(folder))
        frequencies, scaling = _rotary(config, self.head_dim)
        angles = torch.outer(torch.arange(self.context, dtype=torch.float32), frequencies)
        angles = torch.cat([angles, angles], -1)
        self._cos = (angles.cos() * scaling).to(**options)[:, None]
        # The sign of the rotation is kept in the table, so that turning is one roll.
        half = self.head_dim // 2
        sign = torch.cat([-torch.ones(half), torch.ones(half)])
        self._sin = (angles.sin() * sign * scaling).to(**options)[:, None]

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(view.numel() for view in self.weights.views.values())

    def cache(self, rows: int, length: int) -> KVCache:
        """An empty cache for at most `rows` sequences of at most `length` tokens."""
        return KVCache(
            layers=len(self.layers),
            heads=self.kv_heads,
            width=self.head_dim,
            rows=rows,
            length=length,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(self, cache: KVCache, rows: slice, ids: torch.Tensor, start: list[int], new: list[int]) -> torch.Tensor:
        """The last layer's (token, hidden) states of `ids`: `new[i]` tokens of row i after its `start[i]` earlier ones.

        Tokens stand one after the other, row after row, and only attention pads them; what the padding sees is thrown
        away.
        """
        count, time, device = len(new), max(new), self.device
        even = min(new) == time
        length = max(map(sum, zip(start, new, strict=True)))
        at = torch.tensor(start, device=device)[:, None] + torch.arange(time, device=device)
        mask = torch.arange(length, device=device) <= at[:, :, None]
        group = self.heads // self.kv_heads
        mask = (mask.repeat(1, group, 1) if group > 1 else mask)[:, None]
        row = torch.arange(rows.start, rows.stop, device=device)[:, None].expand(count, time)
        # Where the tokens stand among the padded ones.
        valid = None if even else torch.arange(time, device=device) < torch.tensor(new, device=device)[:, None]
        at, row = (at.reshape(-1), row.reshape(-1)) if valid is None else (at[valid], row[valid])
        padded = None if valid is None else ids.new_zeros(count, time, self.heads, self.head_dim, dtype=self.dtype)
        cos, sin = self._cos[at], self._sin[at]
        turned = self.heads + self.kv_heads
        state = F.embedding(ids, self.embed)
        for at_layer, layer in enumerate(self.layers):
            x = F.rms_norm(state, layer.norm.shape, layer.norm, self.eps)
            qkv = _times(x, layer.qkv, layer.qkv_bias).view(len(ids), turned + self.kv_heads, self.head_dim)
            qk, values = qkv[:, :turned], qkv[:, turned:]
            if layer.q_norm is not None and layer.k_norm is not None:
                q = F.rms_norm(qk[:, : self.heads], layer.q_norm.shape, layer.q_norm, self.eps)
                k = F.rms_norm(qk[:, self.heads :], layer.k_norm.shape, layer.k_norm, self.eps)
                qk = torch.cat([q, k], 1)
            qk = qk * cos + qk.roll(self.head_dim // 2, -1) * sin
            cache.write(at_layer, row, at, qk[:, self.heads :], values)
            keys, values = cache.read(at_layer, rows, length)
            q = qk[:, : self.heads]
            if padded is not None:
                padded[valid] = q
                q = padded
            # The queries that share a head of keys stand one after the other in time.
            q = q.view(count, time, self.heads, self.head_dim).transpose(1, 2)
            q = q.reshape(count, self.kv_heads, group * time, self.head_dim)
            seen = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            seen = seen.reshape(count, self.heads, time, self.head_dim).transpose(1, 2)
            seen = (seen if valid is None else seen[valid]).reshape(len(ids), -1)
            state = state + _times(seen, layer.out, layer.out_bias)
            x = F.rms_norm(state, layer.mlp_norm.shape, layer.mlp_norm, self.eps)
            gate, up = _times(x, layer.gate_up).chunk(2, -1)
            state = state + _times(F.silu(gate) * up, layer.down)
        return state

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """Float32 logits of (token, hidden) states."""
        return (F.rms_norm(state, self.norm.shape, self.norm, self.eps) @ self.head).float()


def _times(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _rotary(config: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    """The frequencies by which positions turn a head's pairs, and the factor on cosines and sines: as transformers'
    Llama computes them, without its module, which takes seconds to import."""
    from transformers import modeling_rope_utils

    asked = config.rope_parameters
    if asked["rope_type"] == "default":
        return 1.0 / (asked["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)), 1.0
    modeling_rope_utils.torch = torch  # transformers may have been imported without (`import_without_models`)
    frequencies, scaling = modeling_rope_utils.ROPE_INIT_FUNCTIONS[asked["rope_type"]](config)
    return frequencies.float(), scaling


def _refuse_unknown(folder: Path, config: Any) -> None:
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InvalidInput(f"{folder} is a {config.model_type} model; the engine computes {known}. vLLM serves others")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise InvalidInput(f"{folder} has sliding_window={config.sliding_window}; the engine attends to everything")
    if getattr(config, "mlp_bias", False) or config.hidden_act != "silu":
        raise InvalidInput(f"{folder} has an MLP with biases or hidden_act={config.hidden_act!r}, not silu")
