"""What the demo says of itself when it ends, and that its page is the dashboard's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from tests.dashboard.test_single_file import answers_of

from headrace.dashboard.about import ABOUT_FILE, read_about
from headrace.demo.games import GAMES_FILE, Game, append_game
from headrace.demo.progress import FirstAndLast, RecordedCall, RecordedGame
from headrace.demo.recipe import RECIPES
from headrace.demo.report import write_report
from headrace.demo.run import DemoRun
from headrace.demo.services import DemoSettings

GAME = Game(0, 5, [{"role": "user", "content": "go"}, {"role": "assistant", "content": "5"}], 1.0)


@pytest.fixture
def demo(tmp_path: Path) -> DemoRun:
    (tmp_path / "trainer").mkdir()
    rows = [{"step": step, "reward": 0.97, "times": {"learn": 0.5}} for step in range(1, 13)]
    (tmp_path / "trainer" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "trainer.yaml").write_text("steps: 12\n")
    with (tmp_path / GAMES_FILE).open("ab") as file:
        append_game(file, GAME)
    settled = DemoSettings(task="number", recipe=RECIPES["number"], steps=12)
    found = DemoRun(settled, tmp_path, Console())
    found.progress.refresh()
    return found


def written(demo: DemoRun) -> Path:
    game = RecordedGame("s0-g0-r0", GAME, [RecordedCall([3, 4], [9], [-0.25], 2)])
    verdict = demo.verdict(seconds=9.0)
    return write_report(demo.run, demo.settled, demo.progress, verdict, {"engine": 4.0}, FirstAndLast(last=game))


def test_the_page_is_the_dashboards_with_the_game_its_tokens_and_where_all_of_it_is(demo: DemoRun) -> None:
    page = written(demo)
    assert page == demo.run / "report.html"
    answers = answers_of(page.read_text())
    about = answers["about"]
    assert about["outcome"].startswith("Learned: the mean reward of the last 10 steps is 0.970, after 12 steps")
    sections = {section["title"]: section for section in about["sections"]}
    assert "A number from 1 to 6 is hidden." in sections["The game"]["text"][0]
    assert sections["Games"]["tables"][0]["rows"] == [[5, "5 hit", 1.0]]
    (call,) = sections["One of the last games: 5 is hidden"]["calls"]
    assert [(token["id"], token["log_prob"]) for token in call["tokens"]] == [(3, None), (4, None), (9, -0.25)]
    assert call["note"] == "log-prob -0.250, p 0.78; policy version 2; answered: hit"
    assert sections["Where the time went"]["tables"][1]["rows"][1] == ["learning", 6.0]
    assert [row[0] for row in sections["Where to look"]["tables"][0]["rows"]] == [
        *("trainer/metrics.jsonl", "trainer", "trainer.yaml", GAMES_FILE)
    ]
    assert sections["The trainer's configuration"]["code"] == "steps: 12\n"
    assert (demo.run / "reward.png").read_bytes()[:4] == b"\x89PNG"


def test_a_page_that_cannot_be_made_costs_no_result(
    demo: DemoRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = subprocess.CompletedProcess[str]([], 1, "", "headrace: no room\n")
    monkeypatch.setattr("headrace.run.report.subprocess.run", lambda *args, **options: failed)
    page = written(demo)
    assert f"{page} was not written: headrace: no room" in caplog.text
    assert read_about(demo.run / ABOUT_FILE) is not None
