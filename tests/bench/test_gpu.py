"""examples/gpu_bench.py and examples/gpu_sync_bench.py, at sizes that a CPU computes in a moment."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from headrace.trainer.memory import ModelShape

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return loaded("gpu_bench")


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_it_measures_ours_beside_a_plain_loop(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told.json"
    parts = ["--parts", "3k", "--loops", "ours,float32", "--seconds", "0"]
    monkeypatch.setattr("sys.argv", ["gpu_bench", "--device", "cpu", "--tiny", *parts, "--json", str(told)])
    bench.main()
    found = json.loads(told.read_text())
    ours, plain = found["parts"]["3k"]["ours"], found["parts"]["3k"]["float32"]
    assert ours["tokens_s"] > 0
    assert not ours["compiled"]
    assert found["ratios"]["3k_vs_float32"] == pytest.approx(ours["tokens_s"] / plain["tokens_s"], rel=1e-2)


def test_its_model_has_the_parameters_that_it_says(bench: ModuleType) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        shape = ModelShape.of(LlamaForCausalLM(LlamaConfig(**bench.LARGE)))
    assert shape.parameters == pytest.approx(1.15e9, rel=0.05)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_the_ways_of_weights_are_measured_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told.json"
    monkeypatch.setattr("sys.argv", ["gpu_sync_bench", "--device", "cpu", "--tiny", "--runs", "2", "--json", str(told)])
    loaded("gpu_sync_bench").main()
    found = json.loads(told.read_text())["tiny"]
    for way in ("files", "shared_memory"):
        assert found[way]["seconds"] >= found[way]["hold_s"] > 0
