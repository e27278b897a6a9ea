"""`headrace new`: a small project that runs as it is, on a laptop's CPU, in a minute or two, and learns.

The task is one that a model with random weights can learn in thirty steps: asked for a colour (or an animal, a fruit, a
number), to say one. A word is a token, so an answer is a single sampled token, and four of thirty-odd are right: chance
finds one in most groups of eight. Held-out rows ask in a way that no row of the training data does.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Literal

from headrace.data.errors import InvalidInput

Kind = Literal["agent", "command", "flow", "environment"]

#: What may be asked for, and the words that are right.
ANSWERS = {
    "colour": ("red", "green", "blue", "black"),
    "animal": ("dog", "cat", "horse", "cow"),
    "fruit": ("apple", "pear", "plum", "fig"),
    "number": ("two", "three", "four", "five"),
}
#: Ways to ask, and one that is held out.
ASKED = ("{}", "a {}", "any {}", "some {}")
HELD_OUT = "{} please"
WORDS = (" ", "a", "any", "some", "please", *ANSWERS, *(word for words in ANSWERS.values() for word in words))
#: Of the model's weights.
SEED = 0

#: Of each kind: its file, what it does, and its part of run.yaml.
DATA = """\
data: {train: train.jsonl, val: val.jsonl, n_rollouts: 8, val_rollouts: 4}
agent: @AGENT@
reward: {functions: [{use: "reward.py:score"}]}
evaluate: {every: 10}"""
KINDS: dict[Kind, tuple[str, str, str]] = {
    "agent": (
        "agent.py",
        "the agent: a coroutine that is given a task and a base URL",
        DATA.replace("@AGENT@", '{run: "agent.py:solve"}'),
    ),
    "command": (
        "agent.py",
        "the agent: a program of its own",
        DATA.replace("@AGENT@", '{command: "python3 agent.py"}'),
    ),
    "flow": (
        "flow.py",
        "the flow: plays with ids and log-probs in its hands",
        DATA.replace("@AGENT@", '{flow: {name: words, _target_: "flow.py:WordFlow"}}'),
    ),
    "environment": (
        "my_env.py",
        "the environment: items, rollouts and scores",
        "agent: {env: my_env.py}\nevaluate: {every: 10}",
    ),
}


def create(folder: Path, kind: Kind) -> list[Path]:
    """Writes the project; returns its files. Raises `InvalidInput` where the folder has something in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInput(f"{folder} is not empty; name a folder that is, or that is not there yet")
    from headrace.engine import words

    folder.mkdir(parents=True, exist_ok=True)
    for name, text in project(folder.absolute().name, kind).items():
        (folder / name).write_text(text)
    words.build(folder / "model", WORDS, SEED)
    return sorted(folder.iterdir())


def project(name: str, kind: Kind) -> dict[str, str]:
    """The texts of a project's files, by their names. Pure but for the templates that are read."""
    agent, does, players = KINDS[kind]
    marks = {"@NAME@": name, "@AGENT@": agent, "@DOES@": does, "@PLAYERS@": players}
    found = {}
    for folder in ("common", kind):
        for template in files("headrace.run").joinpath("templates", folder).iterdir():
            text = template.read_text()
            for mark, value in marks.items():
                text = text.replace(mark, value)
            found[template.name.removesuffix(".txt")] = text
    return found | {
        "train.jsonl": _rows([way.format(asked) for way in ASKED for asked in ANSWERS]),
        "val.jsonl": _rows([HELD_OUT.format(asked) for asked in ANSWERS]),
    }


def _rows(prompts: list[str]) -> str:
    asked = {prompt: next(kind for kind in ANSWERS if kind in prompt.split()) for prompt in prompts}
    rows = [
        {"prompt": prompt, "ground_truth": list(ANSWERS[kind]), "data_source": kind} for prompt, kind in asked.items()
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)
