"""The configuration file: what cannot work fails when it is read, naming the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.data.errors import InvalidInput
from headrace.trainer.config import TrainerConfig, load


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_a_file_of_two_lines_is_enough(tmp_path: Path) -> None:
    config = load(written(tmp_path, "model: some/model\nrun: runs/x\n"))
    assert (config.algorithm.advantage, config.algorithm.weighting, config.pool.channel) == ("grpo", "token", "train")


def test_what_is_given_beside_the_file_wins(tmp_path: Path) -> None:
    assert load(written(tmp_path, "model: m\nrun: r\nsteps: 9\n"), steps=3).steps == 3


def test_dr_grpo_divides_by_a_constant_unless_told_otherwise(tmp_path: Path) -> None:
    head = "model: m\nrun: r\nalgorithm:\n  advantage: dr_grpo\n"
    assert load(written(tmp_path, head)).algorithm.weighting == "constant"
    assert load(written(tmp_path, head + "  aggregation: token\n")).algorithm.weighting == "token"


@pytest.mark.parametrize("loss", ["tis", "cispo", "sft", "mine.py:loss"])
def test_replays_are_for_losses_that_keep_their_gradient(tmp_path: Path, loss: str) -> None:
    config = load(written(tmp_path, f"model: m\nrun: r\npool: {{order: mixed}}\nalgorithm: {{loss: {loss}}}\n"))
    assert config.pool.order == "mixed"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: m\n", "run"),
        ("model: m\nrun: r\nmodle: x\n", "modle"),
        ("model: m\nrun: r\noptimizer: {lr: -1}\n", r"optimizer\.lr"),
        ("model: m\nrun: r\nalgorithm: {advantage: gpo}\n", r"algorithm\.advantage.*grpo"),
        ("model: m\nrun: r\npool: {order: mixed}\n", "tis"),
        ("model: m\nrun: r\npool: {order: mixed}\nalgorithm: {loss: gspo}\n", "old: proximal with loss: gspo"),
        ("model: m\nrun: r\nvalidation: {every: 5, channel: train}\n", r"validation\.channel"),
        ("- model\n", "mapping"),
        ("model: [\n", "cannot be read"),
    ],
)
def test_what_cannot_work_is_refused_by_its_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        load(written(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nothing\.yaml"):
        load(tmp_path / "nothing.yaml")


def test_what_is_shown_of_a_configuration_holds_no_key(tmp_path: Path) -> None:
    given = {
        "model": tmp_path,
        "run": tmp_path,
        "pool": {"key": "pool-secret"},
        "sync": {"gateway": "http://127.0.0.1:8100", "admin_key": "admin-secret", "server_key": "server-secret"},
    }
    shown = TrainerConfig.model_validate(given).shown()
    assert "secret" not in str(shown)
    assert shown["pool"]["key"] == shown["sync"]["admin_key"] == shown["sync"]["server_key"] == "***"
