"""The dashboard as one file: what is in it, and that nothing of anybody's becomes markup."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.dashboard.test_follow import submit

from headrace import DataPool, Step
from headrace.cli import main


def answers_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="answers">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    answers: dict[str, Any] = orjson.loads(found[1])
    return answers


def test_a_journal_becomes_one_file_that_loads_nothing(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script>"
    with DataPool(tmp_path / "journal", durability="os", defaults={"n_rollouts": 2}) as pool:
        for group in range(3):
            submit(pool, group)
        pool.submit_steps(
            [Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t", prompt_uid=hostile, note=hostile)]
        )
        pool.fetch_batch(1, timeout=0)
    command = ["dashboard", str(tmp_path / "journal"), "--export", str(tmp_path / "run.html")]
    # A process of its own: the command does without torch, which other tests need.
    done = subprocess.run([sys.executable, "-m", "headrace", *command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("7 trajectories, 7 of them whole, in ")
    page = (tmp_path / "run.html").read_text()
    answers = answers_of(page)
    assert len(answers["trajectories"]) == 7
    whole = answers["whole"]["train\ng0-1"]
    assert whole["detail"]["trajectory"]["state"] == "consumed"
    assert whole["tokens"]["0"]["ids"] == [1, 2, 7, 8]
    assert whole["why"][0]["verdict"].startswith("It was trained on")
    assert answers["consumption"]["total"] == 1
    assert hostile not in page
    # Every address is in the file itself, and its policy names the one inline script and the style by their digests.
    assert set(re.findall(r'(?:src|href)="([a-z]+:|[^#"]{0,12})', page)) <= {"data:", ""}
    policy = re.search(r'http-equiv="content-security-policy" content="([^"]*)"', page)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert policy is not None
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy[1]
    assert "unsafe-inline" not in policy[1]


def test_an_export_into_a_folder_that_is_not_there_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = tmp_path / "missing" / "run.html"
    with pytest.raises(SystemExit) as ended:
        main(["dashboard", str(tmp_path / "no journal"), "--export", str(export)])
    assert ended.value.code == 2
    assert f"{export} cannot be written: there is no folder {export.parent}" in capsys.readouterr().err


def test_an_export_that_is_no_page_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dashboard", str(tmp_path), "--export", "run.pdf"])
    assert ended.value.code == 2
    assert "end it with .html" in capsys.readouterr().err
