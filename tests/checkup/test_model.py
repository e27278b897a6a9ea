"""`headrace check-model`: what it finds, what it prints and how it ends."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.cli.command import COMMAND
from tests.tokens import models

from headrace.checkup.kept import kept
from headrace.checkup.model import BRIDGED, NONE, READ, check_model
from headrace.data.errors import InvalidInput
from headrace.tokens.forms import Grammar

#: A template without tool calls that writes something else of every answer once another turn comes in.
REWRITES = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content if loop.last else message.content | upper }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def check_model_command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, since it keeps torch out of its process."""
    return subprocess.run([*COMMAND, "check-model", *map(str, args)], capture_output=True, text=True, timeout=600)


def with_template(folder: Path, template: str, target: Path) -> Path:
    """A tokenizer's folder with another chat template."""
    target.mkdir()
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    return target


def test_a_model_of_which_everything_is_read_ends_with_0() -> None:
    done = check_model_command(models.folder("qwen2.5"))
    assert done.returncode == 0, done.stderr
    *rows, last = done.stdout.splitlines()
    assert last.endswith(": every turn is continued and everything is read")
    found = dict(row.split("\t") for row in rows)
    assert found["renderer"] == "template"
    assert found["tool calls: one"] == found["tool calls: several"] == READ
    assert found["bridged: results after several calls"] == BRIDGED
    assert found["kept against the template"] == NONE


@pytest.mark.long
def test_json_has_the_same() -> None:
    done = check_model_command(models.folder("qwen3"), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["renderer"], found["well"], found["trouble"]) == ("qwen3", True, [])
    assert found["kept"] == ["reasoning"]
    assert found["turns"] == 5


def test_no_tokenizer_ends_with_2(tmp_path: Path) -> None:
    done = check_model_command(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert str(tmp_path) in done.stderr
    with pytest.raises(InvalidInput):
        check_model(tmp_path)


def test_a_model_without_tools_has_none_and_is_well() -> None:
    report = check_model(models.folder("smollm2"))
    assert report.well
    assert set(report.tools.values()) == {NONE}
    assert report.bridged == {"a question after an answer": BRIDGED}


def test_what_differs_from_the_template_has_a_name() -> None:
    grammar = Grammar()
    assert kept("a b", "a b", (), (), grammar, {}) == set()
    assert kept("a  b", "a b", (), (), grammar, {}) == {"white space"}
    assert kept("TOOLS a b", "a TOOLS b", (), (), grammar, {"tools": "TOOLS "}) == {"tools"}
    assert kept("a x b", "a y b", (), (), grammar, {}) == {"'x' for 'y'"}
