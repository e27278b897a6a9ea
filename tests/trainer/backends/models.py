"""Small models with random weights, built as transformers builds them."""

from __future__ import annotations

from typing import Any

import torch

from headrace.trainer import attention

VOCABULARY = 37


def llama(implementation: str, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _built(LlamaForCausalLM, LlamaConfig(**{**SIZES, **changes}), implementation)


def qwen3(implementation: str, **changes: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _built(Qwen3ForCausalLM, Qwen3Config(**{**SIZES, **changes}), implementation)


#: Two heads share each head of keys.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
}


def _built(kind: Any, config: Any, implementation: str) -> Any:
    attention.register()
    torch.manual_seed(0)
    config._attn_implementation = implementation
    return kind(config).train()


def gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far two tensors lie apart, relative to the second."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
