"""`headrace engine` as a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.engine.kit import Reference, gap
from tests.engine.test_forward import CLOSE, FAMILIES, family

from headrace.cli import main

COMMAND = [sys.executable, "-m", "headrace", "engine"]


def test_it_says_where_it_is_serves_and_ends_on_sigterm(folder: Path) -> None:
    args = ["--model", str(folder), "--port", "0", "--served-model-name", "small", "--threads", "1"]
    with subprocess.Popen([*COMMAND, *args], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.fullmatch(r"engine listening on (http://127\.0\.0\.1:\d+)\n", process.stdout.readline())
        assert found is not None
        assert process.stdout.readline() == f"engine ready on {found[1]}\n"
        with urllib.request.urlopen(f"{found[1]}/v1/models", timeout=120) as answer:
            card = json.loads(answer.read())["data"][0]
        assert (card["id"], card["root"], card["max_model_len"]) == ("small", str(folder), 2048)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def test_it_imports_no_models_of_transformers_and_computes_what_they_do(folder: Path, tmp_path: Path) -> None:
    """They would take longer than all the rest of its start; scaled rotations take functions from beside them."""
    made = family(folder, tmp_path / "model", **FAMILIES["llama with scaled rope"])
    imports = tmp_path / "imports"
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], "--model", str(made), "--port", "0"]
    with (
        imports.open("w") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as process,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        assert process.stdout.readline() == f"engine ready on {address}\n"
        prompt = list(range(100))  # past the positions from which on they are scaled
        asked = {"prompt": prompt, "max_tokens": 8, "temperature": 1.0, "seed": 1, "logprobs": 1}
        body = json.dumps({**asked, "return_token_ids": True, "ignore_eos": True}).encode()
        with urllib.request.urlopen(f"{address}/v1/completions", body, timeout=120) as answer:
            choice = json.loads(answer.read())["choices"][0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    expected = Reference(made).logprobs(prompt, choice["token_ids"])
    assert gap(choice["logprobs"]["token_logprobs"], expected) < CLOSE
    imported = set(re.findall(r"\| *(transformers\S*)$", imports.read_text(), re.MULTILINE))
    assert "transformers.tokenization_utils_base" in imported
    assert "transformers.integrations.hub_kernels" not in imported  # what every model of theirs imports


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--model", "no/such/model"], f"there is no folder {Path.cwd() / 'no/such/model'}"),
        (["--model", "./nowhere"], f"there is no folder {Path.cwd() / 'nowhere'}"),
        (["--model", __file__], f"{__file__} is a file"),
        (["--model", str(Path(__file__).parent)], "it has no config.json"),
        (["--max-model-len", "4096"], "longest context is 2048"),
        (["--dtype", "int8"], "--dtype"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    folder: Path, args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = args if "--model" in args else ["--model", str(folder), *args]
    with pytest.raises(SystemExit) as ended:
        main(["engine", *given])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_name_is_looked_for_on_the_hub(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as ended:
        main(["engine", "--model", "someone/no-such-model", "--port", "0"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "and no model someone/no-such-model could be fetched from the hub" in said


def test_it_answers_503_while_it_loads_and_a_signal_ends_it(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time\n\ntime.sleep(3600)\n")  # it is never loaded
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [*COMMAND, "--port", "0"], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with pytest.raises(urllib.error.HTTPError, match="503") as loading:
            urllib.request.urlopen(f"{address}/health", timeout=120)
        assert json.loads(loading.value.read())["error"]["message"] == "the model tiny is being loaded"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        assert process.stdout.read() == ""
