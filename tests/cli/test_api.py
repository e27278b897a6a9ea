"""`headrace api`: what is refused before anything starts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest
from tests.cli.command import Command


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--pool", "http://127.0.0.1:1", "--journal", "x"), "--journal is for a pool in this process"),
        (("--pool", "somewhere"), "is no pool's address"),
        (("--max-body-mb", "0"), "--max-body-mb"),
        (("--serve-channel", ""), "--serve-channel"),
        (("--allow-origin", "*"), "'*' is no origin"),
        (("--allow-origin", "http://page.example/x"), "'http://page.example/x' is no origin"),
        (("--host", "256.0.0.1"), "cannot listen on 256.0.0.1"),
        (("--dashboard", "off"), "'edit' or 'read-only'"),
    ],
)
def test_what_could_not_work_is_said(headrace: Command, args: tuple[str, ...], said: str) -> None:
    done = headrace("api", "--port", "0", *args)
    assert done.code != 0
    assert said in done.err
    assert "Traceback" not in done.err


def test_run_api_is_a_script_of_ours_and_means_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    monkeypatch.setattr("sys.argv", ["run-api", "--max-body-mb", "0"])
    with pytest.raises(SystemExit) as ended:
        resolve_name(project["scripts"]["run-api"])()
    assert ended.value.code != 0
    assert "--max-body-mb" in capsys.readouterr().err
