"""Every command that the pages show is one, with flags that it has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.cli.command import Command

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Commands whose second word is one too.
FAMILIES = ("pool", "bench")


def shown(page: Path) -> list[str]:
    """The commands of a page's blocks, a line each."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(text for kind, text in blocks if kind in ("", "sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("headrace ")]


COMMANDS = [(page.name, line) for page in PAGES for line in shown(page)]


def test_there_are_some() -> None:
    assert {"README.md", "gateway.md", "pool.md"} <= {page for page, _ in COMMANDS}


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_that_a_page_shows_has_the_flags_it_is_shown_with(headrace: Command, page: str, line: str) -> None:
    _, *words = shlex.split(line, comments=True)
    command = words[: 2 if words[0] in FAMILIES else 1]
    told = headrace(*command, "--help")
    assert told.code == 0, told.err
    if command != ["env"]:  # whose flags are the environment's own
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= set(re.findall(r"--[\w-]+", told.out))
