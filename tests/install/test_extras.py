"""A wheel of this tree, alone and with each extra: every command answers, or names what it lacks and how to get it."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.install.kit import ROOT, Clean

from headrace.extras import EXTRAS, NEEDS

DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
#: `gym` has no wheels for some of what it brings, and `dev` is a clone's.
TRIED = ("", *(extra for extra in DECLARED if extra not in ("gym", "dev")))
RUN_EACH = Path(__file__).with_name("run_each.py")
SERVER = ("--port", "0", "--vllm-addresses", "http://127.0.0.1:9", "--tokenizer-path", ".")

#: A start of each command that needs an extra, as the doctor names it.
STARTS: dict[str, tuple[str, ...]] = {
    "gateway": ("gateway", *SERVER),
    "gateway --reward-worker-name": ("gateway", "--reward-worker-name", "judge", *SERVER),
    "serve": ("serve", *SERVER),
    "env": ("env", "number_guess", "probe"),
    "check-model": ("check-model", "."),
    "replay": ("replay", "."),
    "storm": ("storm", "--quick"),
    "storm --learner": ("storm", "--quick", "--learner"),
    "engine": ("engine", "--port", "0"),
    "train": ("train", "none.yaml"),
    "train --workers": ("train", "none.yaml", "--workers", "2"),
    "run": ("run", "none.yaml"),
    "new": ("new", "project"),
    "demo": ("demo",),
    "demo --ray": ("demo", "--ray"),
    "pool start": ("pool", "start"),
    "pool stop": ("pool", "stop", "ray-actor://data_pool"),
    "reward start": (
        "reward",
        "start",
        "--reward",
        "none.yaml",
        "--pool",
        "http://127.0.0.1:9",
        "--tokenizer-path",
        ".",
    ),
    "reward start --name": ("reward", "start", "--reward", "none.yaml", "--name", "judge"),
    "reward stop": ("reward", "stop", "judge"),
    "reward try": ("reward", "try", "none.yaml", "--pool", ".", "--tokenizer-path", "."),
    "bench pool": ("bench", "pool", "--quick"),
    "bench gateway": ("bench", "gateway", "--quick"),
    "bench trainer": ("bench", "trainer", "--quick"),
    "bench run": ("bench", "run", "--quick"),
}
#: What a file or a pool asks for, as their own tests show.
ASKED_FOR_LATER = {"run on Ray", "rollout on Ray", "pool export --to FILE.parquet"}
#: The one line of a command that lacks something: what, and the extras that bring it.
ASKS = r"headrace[\w -]*: this needs ([^:]*): (?:\S+ -m )?pip install \S+headrace-\S+\.whl\[([a-z,-]+)\]'?\n"


@dataclass(frozen=True)
class Answer:
    """What a command said and did."""

    code: int
    out: str
    err: str
    left: list[str]


def test_a_start_of_every_command_that_needs_an_extra_is_tried() -> None:
    assert set(STARTS) | ASKED_FOR_LATER == set(NEEDS)


#: Runs one command of an environment.
Ask = Callable[..., Answer]


@contextmanager
def asking(clean: Clean) -> Iterator[Ask]:
    """Runs commands of an environment, in processes that begin with everything imported."""
    command = [str(clean.folder / "bin" / "python"), str(RUN_EACH)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, env=clean.variables(), cwd=clean.folder, **pipes) as runner:

        def ask(*args: str) -> Answer:
            print(json.dumps(args), file=runner.stdin)
            return Answer(**json.loads(runner.stdout.readline()))

        yield ask


@pytest.fixture(scope="module")
def alone(built: Path, uv: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """An environment with the wheel and no extra."""
    clean = Clean.made(tmp_path_factory.mktemp("alone") / "venv", pip=False)
    clean.install(uv, *map(str, built.glob("*.whl")))
    return clean


@pytest.fixture(scope="module")
def commands(alone: Clean) -> list[str]:
    """Every command that the help names. What they import is compiled now, which copies of the environment share."""
    with asking(alone) as ask:
        page = ask("--help")
    found = re.findall(r"^  ([a-z-]+) {2,}\S", page.out.partition("subcommands:")[2], re.MULTILINE)
    assert {name.split()[0] for name in NEEDS} <= set(found)
    return found


@pytest.mark.parametrize("extra", TRIED, ids=lambda extra: extra or "alone")
def test_every_command_answers_or_names_what_it_lacks(
    alone: Clean, commands: list[str], built: Path, uv: Path, tmp_path: Path, extra: str
) -> None:
    clean = alone
    if extra:
        clean = alone.copy(tmp_path / "venv")
        clean.install(uv, *(f"{wheel}[{extra}]" for wheel in built.glob("*.whl")))
    with asking(clean) as ask:
        for name in commands:
            page = ask(name, "--help")
            assert (page.code, page.err) == (0, ""), name
            assert page.out.startswith(f"usage: headrace {name}"), name

        doctor = ask("doctor", "--json")
        assert doctor.code == 0, doctor.err
        lacking = {found["name"]: set(found["missing"]) for found in json.loads(doctor.out)["commands"]}
        if extra:
            assert not set(EXTRAS[extra]) & set().union(*lacking.values())
        for name in (name for name in STARTS if lacking[name]):
            refused = ask(*STARTS[name])
            said = re.fullmatch(ASKS, refused.err)
            assert said is not None, f"{name}: {refused.err}"
            needs, hint = said.groups()
            assert set(re.findall(r"[\w]+", needs)) & lacking[name], name
            assert lacking[name] <= {library for one in hint.split(",") for library in EXTRAS[one]}, name
            assert (refused.code, refused.out, refused.left) == (1, "", []), name
