"""Which environment `headrace env` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.compat.kit import FILES

from headrace.cli import main

ONE = """
from headrace.envs import BaseEnv
class {name}({base}):
    async def setup(self): ...
    async def get_next_item(self): return None
    async def evaluate(self, *args, **kwargs): print("{name}")
"""
RUN = "\nif __name__ == '__main__':\n    {name}.cli()\n"


def evaluated(path: Path | str, *args: str) -> None:
    main(["env", str(path), *args, "evaluate", "--env.use_wandb", "false"])


@pytest.mark.parametrize(
    ("text", "args", "said"),
    [
        (ONE.format(name="A", base="BaseEnv"), [], "A"),
        (ONE.format(name="A", base="BaseEnv") + ONE.format(name="B", base="A") + RUN.format(name="B"), [], "B"),
        (ONE.format(name="A", base="BaseEnv") + ONE.format(name="B", base="A"), ["--class", "A"], "A"),
    ],
    ids=["the only one", "the one that the file runs itself", "the one that is named"],
)
def test_the_environment_of_a_file_is_found(
    text: str, args: list[str], said: str, apart: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = apart / "found_env.py"
    file.write_text(text)
    with pytest.raises(SystemExit, match="0"):
        evaluated(file, *args)
    assert capsys.readouterr().out.splitlines()[0] == said


@pytest.mark.parametrize(
    ("text", "args", "said"),
    [
        (ONE.format(name="A", base="BaseEnv") + ONE.format(name="B", base="A"), [], "say which by --class: A, B"),
        (ONE.format(name="Aa", base="BaseEnv"), ["--class=Ab"], "no environment 'Ab'; did you mean Aa?"),
        ("x = 1", [], "has no environment: a class that inherits from BaseEnv"),
        ("import not_there_at_all", [], "needs the module 'not_there_at_all'"),
        ("from atroposlib.api import server", [], "atroposlib.api is not covered by headrace.compat.atropos"),
        ("def", [], "is no Python file"),
        (None, [], "there is no file"),
    ],
)
def test_one_that_cannot_be_found_is_an_error_of_one_line(
    text: str | None, args: list[str], said: str, apart: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = apart / "lost_env.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit, match=r"[12]"):
        evaluated(file, *args)
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_help_is_the_environments_own(apart: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["env", str(FILES / "group_at_once.py"), "process", "--help"])
    assert "--env.largest N" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["env", "--help"])
    assert "probe" in capsys.readouterr().out
