"""Running files on both sides, and their groups in a form to compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILES = HERE / "files"
Group = dict[str, Any]

#: Fields with an entry a sequence.
BY_SEQUENCE = (
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "inference_logprobs",
    "messages",
    "overrides",
    "images",
    "distill_token_ids",
    "distill_logprobs",
)


def flags(model: str, tokenizer: Path, *, groups: int = 3) -> list[str]:
    """What a file is run with: the same words on both sides."""
    given = {
        "env.total_steps": groups,
        "env.group_size": 4,
        "env.tokenizer_name": tokenizer,
        "env.use_wandb": "false",
        "openai.base_url": f"{model}/v1",
        "openai.model_name": "scripted",
        "openai.tokenizer_name": tokenizer,
        "openai.api_key": "x",
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def original(python: Path, script: str, *args: str, cwd: Path, given: str = "") -> str:
    """What a script of `inside` printed in atroposlib's own Python."""
    command = [str(python), str(HERE / "inside" / script), *args]
    return _run(command, cwd, given, {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"})


def ours(script: str, *args: str, cwd: Path, given: str = "") -> str:
    """The same on Headrace."""
    return _run([sys.executable, str(HERE / "inside" / script), *args], cwd, given, {})


def _run(command: list[str], cwd: Path, given: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=cwd, input=given, capture_output=True, text=True, timeout=300, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def groups_in(path: Path) -> list[Group]:
    return ordered([json.loads(line) for line in path.read_text().splitlines()])


def ordered(groups: list[Group]) -> list[Group]:
    """Groups, and the sequences in each, in an order that does not depend on what was ready first."""
    return sorted(map(_sorted, groups), key=lambda group: json.dumps(group["tokens"]))


def _sorted(group: Group) -> Group:
    count = len(group["tokens"])
    order = sorted(range(count), key=lambda at: (group["tokens"][at], group["scores"][at]))
    listed = {key for key in BY_SEQUENCE if isinstance(group.get(key), list) and len(group[key]) == count}
    return {key: [value[at] for at in order] if key in listed else value for key, value in group.items()}
