"""Every block of the README and of the documentation runs, in order, as someone pastes them who has nothing else."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.command import Command
from tests.docs.pages import PAGES, REASONS, SHELL, Block, blocks
from tests.docs.reader import Reader

pytestmark = pytest.mark.system

#: The page that says how `headrace` comes onto the path. Who reads the others has done it.
ENTRANCE = "README.md"
#: The page for those who have a cluster.
CLUSTER = "ray.md"
#: Pages that train for minutes.
TRAINING = ("environments.md", "trainer.md", "atropos.md")
BIN = Path(sys.prefix) / "bin"
BLOCKS = [block for page in PAGES for block in blocks(page)]
#: Commands whose second word is one too.
FAMILIES = ("pool", "bench", "reward")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with Reader(tmp_path_factory.mktemp("pages")) as found:
        yield found


def _pages() -> list[object]:
    marks = {CLUSTER: [pytest.mark.ray], **{name: [pytest.mark.long] for name in TRAINING}}
    return [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow, *marks.get(page.name, [])])
        for page in PAGES
        if blocks(page)
    ]


@pytest.mark.parametrize("page", _pages())
def test_a_page_runs_as_it_stands(page: Path, reader: Reader, request: pytest.FixtureRequest) -> None:
    env = None
    if page.name == ENTRANCE:
        path = [folder for folder in os.environ["PATH"].split(os.pathsep) if Path(folder).resolve() != BIN.resolve()]
        env = {"PATH": os.pathsep.join(path)}
    if page.name == CLUSTER:
        env = {"RAY_ADDRESS": request.getfixturevalue("ray_cluster")}
    with reader.page(page.stem, env=env) as opened:
        opened.read(blocks(page))
    assert "Traceback" not in opened.said(), opened.said()


def test_most_blocks_run() -> None:
    left = [block.place for block in BLOCKS if block.not_run is not None]
    assert len(left) <= len(BLOCKS) / 4, left


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.not_run is not None], ids=lambda block: block.place
)
def test_a_block_is_left_out_for_a_reason_that_is_one(block: Block) -> None:
    assert block.not_run in REASONS


def _commands() -> list[object]:
    """The `headrace` commands of the blocks that are not run, a line each."""
    left = [block for block in BLOCKS if block.not_run is not None and block.language in SHELL]
    lines = [(block, line) for block in left for line in block.text.replace("\\\n", " ").splitlines()]
    return [pytest.param(line, id=f"{block.place} {line}") for block, line in lines if line.startswith("headrace ")]


@pytest.mark.parametrize("line", _commands())
def test_a_command_that_is_not_run_has_the_flags_it_is_shown_with(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    _, *words = shlex.split(line, comments=True)
    command = words[: 2 if words[0] in FAMILIES else 1]
    told = Command(capfd)(*command, "--help")
    assert told.code == 0, told.err
    if command != ["env"]:  # whose flags are the environment's own
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= set(re.findall(r"--[\w-]+", told.out))
