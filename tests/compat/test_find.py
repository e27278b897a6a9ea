"""Which environment `headrace env` runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.compat.kit import FILES

from headrace.cli import main
from headrace.extras import install_command

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
        (
            "from headrace.envs import BaseEnv\nclass A(BaseEnv):\n    async def setup(self): ...\n",
            [],
            "has no environment: A lacks evaluate, get_next_item",
        ),
        ("import not_there_at_all", [], "needs the module 'not_there_at_all'"),
        ("x = 1\nimport json.not_there", [], "lost_env.py, line 2), which the 'json' in"),
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


def test_a_packages_missing_dependency_is_named_and_where_it_is_asked_for(
    apart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = apart / "packed_envs"
    package.mkdir()
    (package / "__init__.py").write_text("import not_there_at_all\n")
    (package / "one.py").write_text(ONE.format(name="A", base="BaseEnv"))
    monkeypatch.syspath_prepend(str(apart))
    with pytest.raises(SystemExit, match="1"):
        evaluated("packed_envs.one")
    err = capsys.readouterr().err
    assert "packed_envs.one needs the module 'not_there_at_all'" in err
    assert f"{package / '__init__.py'}, line 1" in err


def test_a_library_of_an_extra_is_asked_for_by_the_command_that_installs_it(
    apart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    file = apart / "data_env.py"
    file.write_text("from datasets import load_dataset\n")
    with pytest.raises(SystemExit, match="1"):
        evaluated(file)
    err = capsys.readouterr().err
    assert "data_env.py needs the module 'datasets'" in err
    assert install_command("datasets") in err


@pytest.mark.parametrize("where", ["setup", "import"])
def test_an_error_of_the_system_in_an_authors_code_keeps_its_traceback(
    where: str, apart: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = apart / f"{where}_env.py"
    text = ONE.format(name="A", base="BaseEnv")
    opening = "open('/not/there.csv')"
    file.write_text(text.replace("setup(self): ...", f"setup(self): {opening}") if where == "setup" else opening)
    with pytest.raises(SystemExit, match="1"):
        evaluated(file)
    assert opening in caplog.text
    assert "No such file or directory: /not/there.csv" in capsys.readouterr().err.splitlines()[-1]
