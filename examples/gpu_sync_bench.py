"""How long weights take from a trainer to an engine on the same GPU: by files, by shared memory and by CUDA IPC.

    PYTHONPATH=src python examples/gpu_sync_bench.py --json sync.json                  # about a minute on an H200
    PYTHONPATH=src python examples/gpu_sync_bench.py --device cpu --tiny               # whether it runs at all

Two Llamas with random weights in bfloat16, of SmolLM2-135M's shape (embeddings tied) and of 1.15 B parameters. An
engine in a process of its own serves each; its weights are published `--runs` times each way, the ways in turn, and
verified by a probe of 256 tokens. Medians of `seconds` (all of it) and of `hold_s` (from the pause to the resume: how
long calls would wait), without the first of each way, which compiles kernels and fills caches.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headrace.engine import tiny
from headrace.trainer.sync import Probe, Publisher, SyncConfig

SHAPES: dict[str, dict[str, Any]] = {
    "135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "1.15B": {
        "vocab_size": 32768,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
}
WAYS = ("files", "shared_memory", "cuda_ipc")
PROBE_TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="one model that a CPU can compute")
    parser.add_argument("--runs", type=int, default=6, help="publishes each way, the first of which is not counted")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    ways = WAYS if given.device != "cpu" else WAYS[:-1]
    found: dict[str, Any] = {"device": given.device, "torch": torch.__version__}
    if given.device != "cpu":
        found["device"] = torch.cuda.get_device_name(given.device)
    for name, shape in {"tiny": {}}.items() if given.tiny else SHAPES.items():
        with tempfile.TemporaryDirectory() as scratch:
            found[name] = _measured(Path(scratch), shape, given.device, ways, given.runs)
        print(name, json.dumps(found[name]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


def _measured(scratch: Path, shape: dict[str, Any], device: str, ways: tuple[str, ...], runs: int) -> dict[str, Any]:
    model = _build(scratch / "model", shape, device)
    weights = model.state_dict()
    ids = torch.randint(0, 300, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids[None].to(device)).logits[0, :-1].float().cpu()
    log_probs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].tolist()
    probe = Probe(ids.tolist(), log_probs, "bfloat16", model.config.num_hidden_layers)
    rows: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    gaps = []
    with _engine(scratch / "model", device) as address:
        for run in range(runs):
            for at, way in enumerate(ways):
                config = SyncConfig(servers=[address], via=way, folder=scratch / "weights")
                report = Publisher(config).publish(weights, run * len(ways) + at, probe)
                rows[way].append((report.seconds, report.hold_s))
                gaps.append(report.gap_max or 0.0)
    size = sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in weights.values()}.values())
    return {"bytes": size, "gap_max": round(max(gaps), 4)} | {
        way: {
            "seconds": round(statistics.median(seconds for seconds, _ in took[1:]), 4),
            "hold_s": round(statistics.median(hold for _, hold in took[1:]), 4),
        }
        for way, took in rows.items()
    }


def _build(folder: Path, shape: dict[str, Any], device: str) -> Any:
    """Writes the checkpoint that the engine serves, with a tokenizer; returns it as the trainer holds it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny.build(folder)
    config = LlamaConfig.from_pretrained(folder)
    config.update(shape)
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    return model


@contextmanager
def _engine(folder: Path, device: str) -> Iterator[str]:
    command = [sys.executable, "-m", "headrace", "engine", "--model", str(folder), "--port", "0", "--device", device]
    with subprocess.Popen([*command, "--dtype", "bfloat16"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        process.stdout.readline()  # it is ready
        try:
            yield found[0]
        finally:
            process.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
