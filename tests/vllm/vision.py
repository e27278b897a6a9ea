"""A model that takes images, small enough for vLLM on a CPU: a Qwen3-VL of two layers with random weights.

vLLM imports torchvision to read images, of which only the Python is used. Its wheel is laid beside vLLM's environment
and not into it: its compiled half, and the module that describes that to torch, need what a CPU build does not have.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from tests.cached import locked
from tests.gateway.images.kit import PROCESSOR, write_tokenizer
from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from headrace.files import cache_folder

#: That of vLLM's torch.
TORCHVISION = "0.28.0"
CONTEXT = 2048


def torchvision() -> Path:
    """A folder for vLLM's PYTHONPATH; made once for a user."""
    found = cache_folder() / "venvs" / f"torchvision-{TORCHVISION}"
    with locked(found.with_name(found.name + ".lock")):
        if not found.exists():
            part = found.with_name(found.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(part)]
            subprocess.run([*install, f"torchvision=={TORCHVISION}"], check=True, stdout=sys.stderr)
            (part / "torchvision" / "_meta_registrations.py").write_text("")
            part.rename(found)
    return found


def variables() -> dict[str, str]:
    """What a vLLM that is to read images finds in its environment."""
    return {"PYTHONPATH": os.pathsep.join([str(torchvision()), *filter(None, [os.environ.get("PYTHONPATH")])])}


def build(into: Path, seed: int = 0) -> None:
    """Writes the checkpoint into an empty folder. What its eyes see weighs enough to change every log-prob."""
    tokenizer = write_tokenizer(into)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    width = 96
    config = Qwen3VLConfig(
        text_config={
            **{"vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": 192, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": CONTEXT},
            **{"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": None, **ids},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10_000.0},
                **{"mrope_section": [6, 5, 5], "mrope_interleaved": True},
            },
        },
        vision_config={
            **{"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": width},
            **{"patch_size": PROCESSOR["patch_size"], "spatial_merge_size": PROCESSOR["merge_size"]},
            **{"temporal_patch_size": 2, "num_position_embeddings": 256, "deepstack_visual_indexes": [0]},
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        model.lm_head.weight *= 4
        for name, weight in model.named_parameters():
            if ".visual." in name and weight.ndim > 1:
                weight *= 4
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(into)
    video = {**PROCESSOR, "video_processor_type": "Qwen3VLVideoProcessor"}
    del video["image_processor_type"]
    (into / "video_preprocessor_config.json").write_text(json.dumps(video))
