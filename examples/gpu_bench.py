"""How fast the learner is on one GPU and how much memory it takes, beside plain loops of transformers in the same run.

    PYTHONPATH=src python examples/gpu_bench.py --json gpu.json               # all of it: about four minutes on an H200
    PYTHONPATH=src python examples/gpu_bench.py --parts 128k --loops ours     # one part, ours alone
    PYTHONPATH=src python examples/gpu_bench.py --device cpu --tiny           # whether it runs at all

A Llama of 1.15 B parameters with random weights learns from sequences of equal length, the last third of each trained
on: the layout at which padding costs nothing. The plain loops are what one would write: rows of a batch through
transformers' own SDPA attention, the head on trained tokens only, AdamW. `float32` has float32 weights under autocast,
`bfloat16` pure bfloat16 weights and moments, `compiled` is that under torch.compile. Ours keeps float32 masters;
`lora` is ours with adapters of rank 16 in place of all weights.

In the parts `prompt` and `agent` sequences come in groups of eight that begin alike (2,048 of 3,072 tokens, and 12,288
of 14,336): `ours` computes what they share once, `packed` as often as it occurs.

FLOPs are 6 N a token, and 6 layers x width x length for causal attention; recomputed ones are not counted. The peak is
that of an H200 (dense bfloat16).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.data.sequence import Sequence, Span
from headrace.trainer import memory
from headrace.trainer.config import TrainerConfig
from headrace.trainer.learner import Learner
from headrace.trainer.memory import GIB, MemoryUse, ModelShape

#: FLOP/s of an H200 in dense bfloat16.
PEAK = 989e12
LARGE = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
TINY = {
    **LARGE,
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
}


@dataclass(frozen=True)
class Part:
    """Sequences of one length: how many in a step, and how many in a pass."""

    length: int
    sequences: int
    rows: int
    #: Tokens that the sequences of a group begin with alike.
    shared: int = 0

    @property
    def tokens(self) -> int:
        return self.length * self.sequences

    @property
    def targets(self) -> int:
        """Trained tokens of a sequence."""
        return self.length - self.shared if self.shared else self.length // 3


PARTS = {
    "3k": Part(3072, 32, 8),
    "16k": Part(16384, 4, 1),
    "64k": Part(65536, 1, 1),
    "128k": Part(131072, 1, 1),
    "prompt": Part(3072, 32, 8, shared=2048),
    "agent": Part(14336, 8, 2, shared=12288),
}
#: Sequences that begin alike in the parts that have some.
GROUP = 8
#: Tokens of a pass of ours: those of a plain loop's, or of a group whose tokens are computed once.
PASS_TOKENS = 28672
OURS = ("ours", "packed", "lora")
LOOPS = (*OURS, "float32", "bfloat16", "compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model and sequences that a CPU can compute")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--loops", default=",".join(LOOPS), help=f"of {', '.join(LOOPS)}")
    parser.add_argument("--seconds", type=float, default=6.0, help="repeat a step for that long, at most five times")
    parser.add_argument("--compile", default="auto", choices=("auto", "on", "off"), help="of ours")
    parser.add_argument("--recompute", default="auto", choices=("auto", "none", "layers"), help="of ours")
    parser.add_argument("--offload", default="none", choices=("none", "optimizer"), help="of ours")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    torch.manual_seed(0)
    parts = {name: PARTS[name] for name in given.parts.split(",")}
    if given.tiny:
        parts = {
            name: Part(part.length // 256, min(part.sequences, 8), 1, part.shared // 256)
            for name, part in parts.items()
        }
    found: dict[str, Any] = {"device": _device_name(given.device), "torch": torch.__version__, "parts": {}}
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        shape = _build(Path(scratch), TINY if given.tiny else LARGE, given.device)
        print(f"{shape.parameters:,} parameters, built in {time.perf_counter() - began:.1f} s", flush=True)
        for loop in given.loops.split(","):
            began = time.perf_counter()
            run = _ours(Path(scratch), shape, loop, given) if loop in OURS else _plain(Path(scratch), loop, given)
            print(f"{loop}: ready in {time.perf_counter() - began:.1f} s", flush=True)
            for name, part in parts.items():
                if loop == "packed" and not part.shared:
                    continue  # that is ours
                if loop == "compiled":
                    torch._dynamo.reset()  # for this shape, as one would: code for any shape is slower
                row = _measured(run, part, shape, given, whole_warm_up=loop == "compiled")
                found["parts"].setdefault(name, {})[loop] = row
                print(f"{name:>5} {loop:>9}: " + ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            del run
            torch._dynamo.reset()  # compiled code keeps what it was compiled for
            _free()
    found["ratios"] = {
        f"{name}_vs_{loop}": round(rows["ours"]["tokens_s"] / rows[loop]["tokens_s"], 3)
        for name, rows in found["parts"].items()
        for loop in rows
        if loop != "ours" and "tokens_s" in rows[loop] and "tokens_s" in rows.get("ours", {})
    }
    print(json.dumps(found["ratios"]))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device


def _build(folder: Path, sizes: dict[str, Any], device: str) -> ModelShape:
    """Writes the checkpoint that every loop begins with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return ModelShape.of(model)


# -- ours --------------------------------------------------------------------------------------------------------------

#: Learns from one step's sequences; says what was foreseen, where it was.
Run = Callable[[Part], dict[str, Any]]


def _ours(folder: Path, shape: ModelShape, loop: str, given: argparse.Namespace) -> Run:
    tokens = 64 if given.tiny else PASS_TOKENS
    config = TrainerConfig(
        model=folder,
        run=folder,
        device=given.device,
        dtype="bfloat16",
        compile=given.compile,
        optimizer={"tokens": tokens, "lr": 1e-6, "share_prefixes": loop != "packed"},
        lora={"rank": 16} if loop == "lora" else None,
        memory={"recompute": given.recompute, "offload": given.offload},
    )
    learner = Learner(config, given.device)
    steps = 0

    def run(part: Part) -> dict[str, Any]:
        nonlocal steps
        learner.learn(_sequences(part, shape.vocabulary), steps, 0)
        steps += 1
        decoder = learner.policy.decoder
        if part.shared:
            return {"compiled": decoder.compiled}
        in_pass = max(part.length, min(part.sequences * part.length, tokens // part.length * part.length))
        recomputed = decoder.recompute_beyond is not None and in_pass > decoder.recompute_beyond
        use = replace(MemoryUse.of(config, compiled=decoder.compiled), recompute=recomputed)
        several = part.tokens > in_pass
        foreseen = memory.forecast(ModelShape.of(learner.policy.model), use, in_pass, in_pass // 3, several=several)
        return {
            "forecast_gib": round(sum(foreseen.values()) / GIB, 2),
            "recomputed": recomputed,
            "compiled": decoder.compiled,
        }

    return run


def _sequences(part: Part, vocabulary: int) -> list[Sequence]:
    """Sequences as a pool would hand them out; the recorded log-probs are those of an even distribution."""
    rng = np.random.default_rng(0)
    beginnings = rng.integers(0, vocabulary, (part.sequences, part.shared)).astype(np.int32)
    mask = np.arange(part.length) >= part.length - part.targets
    span = Span(
        step_index=0,
        start=part.length - part.targets,
        end=part.length,
        reward=None,
        trained=True,
        finish_reason="stop",
        sampling={"temperature": 1.0},
        temperature=1.0,
    )
    return [
        Sequence(
            tokens=np.concatenate(
                [beginnings[at // GROUP], rng.integers(0, vocabulary, part.length - part.shared).astype(np.int32)]
            ),
            loss_mask=mask,
            log_probs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            trajectory_uid=f"t{at}",
            prompt_uid=f"p{at // GROUP}",
            reward=float(at % 2),
            spans=(span,),
            advantages=np.where(mask, 1.0 if at % 2 else -1.0, 0).astype(np.float32),
        )
        for at in range(part.sequences)
    ]


# -- plain loops -------------------------------------------------------------------------------------------------------


def _plain(folder: Path, loop: str, given: argparse.Namespace) -> Run:
    from transformers import LlamaForCausalLM

    device = torch.device(given.device)
    dtype = torch.float32 if loop == "float32" else torch.bfloat16
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    decoder = torch.compile(model.model) if loop == "compiled" else model.model

    def run(part: Part) -> dict[str, Any]:
        sequences = _sequences(part, model.config.vocab_size)
        ids = torch.from_numpy(np.stack([one.tokens for one in sequences]).astype(np.int64)).to(device)
        gains = torch.tensor([1.0 if at % 2 else -1.0 for at in range(part.sequences)], device=device)
        first = part.length - part.targets
        for rows in torch.arange(part.sequences).split(part.rows):
            with torch.autocast(device.type, torch.bfloat16, enabled=loop == "float32"):
                states = decoder(input_ids=ids[rows], use_cache=False).last_hidden_state[:, first - 1 : -1]
                logits = model.lm_head(states).float()
            scores = torch.log_softmax(logits, -1).gather(-1, ids[rows, first:, None])[..., 0]
            ratio = torch.exp(scores - scores.detach())
            loss = -(ratio * gains[rows, None]).sum() / (part.sequences * part.targets)
            loss.backward()
            del states, logits, scores, ratio, loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {}

    return run


# -- measuring ---------------------------------------------------------------------------------------------------------


def _measured(
    run: Run, part: Part, shape: ModelShape, given: argparse.Namespace, *, whole_warm_up: bool = False
) -> dict[str, Any]:
    """One step to warm up, of fewer tokens where sequences are long and it need not be whole; then steps for
    `--seconds`."""
    on_gpu = torch.device(given.device).type == "cuda"
    _free()
    try:
        run(part if whole_warm_up or part.length < 16384 else Part(4096, 2, 1))
        _free()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds: list[float] = []
        told: dict[str, Any] = {}
        while not seconds or (len(seconds) < 5 and sum(seconds) < given.seconds):
            _wait(on_gpu)
            began = time.perf_counter()
            told = run(part)
            _wait(on_gpu)
            seconds.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except Exception as error:  # one loop that fails, as where nothing can be compiled, leaves the others
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    speed = part.tokens / statistics.median(seconds)
    attention = 6 * shape.layers * shape.heads * shape.head_dim * part.length
    share = round(speed * (6 * shape.parameters + attention) / PEAK, 4)
    row = {
        "tokens_s": round(speed, 1),
        **({} if part.shared else {"share_of_peak": share}),
        "seconds": round(statistics.median(seconds), 3),
        "steps": len(seconds),
        **told,
    }
    if on_gpu:
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        if "forecast_gib" in told:
            row["forecast_vs_measured"] = round(told["forecast_gib"] / row["peak_gib"], 3)
    return row


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
