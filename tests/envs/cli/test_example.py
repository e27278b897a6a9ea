"""The examples of the documentation, as they stand, on a real engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.kit import Client

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "env_sums.py"
PAGE = ROOT / "docs" / "environments.md"


def run(engine: Client, model: Path, folder: Path, *args: str, example: Path = EXAMPLE) -> str:
    server = ["--openai.base_url", f"http://{engine.host}/v1", "--openai.model_name", "tiny"]
    server += ["--openai.server_type", "vllm", "--env.tokenizer_name", str(model), "--env.use_wandb", "false"]
    done = subprocess.run(
        [sys.executable, example, *args, *server], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


def test_the_example_makes_groups_whose_tokens_are_those_sampled(engine: Client, folder: Path, tmp_path: Path) -> None:
    said = run(engine, folder, tmp_path, "process", "--env.total_steps", "3", "--env.group_size", "2")
    assert said.endswith("\n3 groups in data/sums.jsonl, to be read in data/sums.html\n")
    for line in (tmp_path / "data/sums.jsonl").read_text().splitlines():
        group = json.loads(line)
        assert len(group["tokens"]) == 2
        for tokens, masks, log_probs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            assert len(tokens) == len(masks) == len(log_probs)
            trained = [at for at, label in enumerate(masks) if label != -100]
            assert 0 < len(trained) <= 16
            assert all(masks[at] == tokens[at] and log_probs[at] <= 0 for at in trained)
    assert "What is" in (tmp_path / "data/sums.html").read_text()


@pytest.mark.long
def test_the_example_is_evaluated(engine: Client, folder: Path, tmp_path: Path) -> None:
    assert "sums_eval" in run(engine, folder, tmp_path, "evaluate")
    samples = (tmp_path / "data/sums-evaluation/samples.jsonl").read_text().splitlines()
    assert len(samples) == 3
    results = json.loads((tmp_path / "data/sums-evaluation/metrics.json").read_text())["results"]
    assert results["all"]["eval/right"] == sum(json.loads(sample)["score"] for sample in samples) / 3


@pytest.mark.long
def test_the_environment_on_the_page_shows_its_scores(engine: Client, folder: Path, tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    assert len(code[1].splitlines()) <= 60
    (tmp_path / "my_env.py").write_text(code[1])
    flags = ["--env.total_steps", "8", "--env.answer_tokens", "32"]
    said = run(engine, folder, tmp_path, "process", *flags, example=tmp_path / "my_env.py")
    shown = re.search(r"letters: 8 of 8 groups, score (\d\.\d+)", said)
    assert shown is not None, said
    assert 0 < float(shown[1]) < 1
    assert "letters_eval" in run(engine, folder, tmp_path, "evaluate", *flags, example=tmp_path / "my_env.py")
