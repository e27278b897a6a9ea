"""Tied embeddings: an engine of ours takes them either way; a copy without them is the same model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.kit import serving
from tests.engine.test_forward import family
from tests.trainer.sync.kit import IDS, Trained, address, publisher

from headrace.data.errors import InvalidInput
from headrace.trainer.sync.untie import untie


@pytest.fixture(scope="module")
def tied(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    made = tmp_path_factory.mktemp("families") / "tied"
    return Trained(family(folder, made, model_type="llama", tie_word_embeddings=True))


def test_an_untied_copy_is_the_same_model_with_a_head_of_its_own(tied: Trained, tmp_path: Path) -> None:
    untie(tied.folder, tmp_path / "untied")
    copy = Trained(tmp_path / "untied")
    assert copy.config.tie_word_embeddings is False
    assert torch.equal(copy.reference.logits(IDS), tied.reference.logits(IDS))
    tensors = load_file(tmp_path / "untied" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    others = {file.name for file in tied.folder.iterdir()}
    assert {file.name for file in (tmp_path / "untied").iterdir()} == others


def test_the_command_does_the_same(tied: Trained, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace.trainer.sync.untie", str(tied.folder), str(tmp_path / "untied")]
    first = subprocess.run(command, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert json.loads((tmp_path / "untied" / "config.json").read_bytes())["tie_word_embeddings"] is False
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1
    assert "is not empty" in again.stderr
    assert "Traceback" not in again.stderr


def test_what_cannot_be_untied_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not tie"):
        untie(folder, tmp_path / "a")
    with pytest.raises(InvalidInput, match="no checkpoint"):
        untie(tmp_path, tmp_path / "b")


@pytest.mark.parametrize("served", ["tied", "untied"])
def test_a_tied_model_is_published_to_an_engine_that_ties_and_to_one_that_does_not(
    tied: Trained, tmp_path: Path, served: str
) -> None:
    folder = tied.folder
    if served == "untied":
        folder = tmp_path / "untied"
        untie(tied.folder, folder)
    changed = Trained(tied.folder)
    with torch.no_grad():
        for parameter in changed.reference.model.parameters():
            parameter.mul_(1.3)
    weights = dict(changed.reference.model.named_parameters())
    assert "lm_head.weight" not in weights
    with serving(model=str(folder)) as engine:
        with publisher(servers=[address(engine)]) as found:
            found.check(changed.config)
            found.publish(weights, 1, changed.probe)
        assert changed.sampled(engine) < 1e-4
        assert tied.sampled(engine) > 1e-2
