"""`headrace storm`: a log is checked, findings are told, the last line is JSON, and the exit code says whether all is
well. Playing one is `make test-storm`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.command import Command
from tests.storm.kit import ALONE, append, clean_log, find

from headrace.data.json import to_json
from headrace.storm.log import SUFFIX, Event
from headrace.version import __version__


@pytest.fixture
def headrace(capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(capfd)


def write(folder: Path, events: list[Event]) -> Path:
    (folder / f"storm{SUFFIX}").write_bytes(b"".join(to_json(event) + b"\n" for event in events))
    return folder


def test_a_clean_log_is_zero_findings_and_exit_code_0(headrace: Command, tmp_path: Path) -> None:
    done = headrace("storm", "--check", write(tmp_path, clean_log()))
    assert done.code == 0, done.err
    figures = json.loads(done.out.splitlines()[-1])
    assert figures["version"] == __version__
    assert {name: figures[name] for name in ("kills", "calls", "steps", "lost", "twice", "stuck")} == {
        **{"kills": 1, "calls": 4, "steps": 4},
        **{"lost": 0, "twice": 0, "stuck": 0},
    }


def test_a_finding_is_told_and_is_exit_code_1(headrace: Command, tmp_path: Path) -> None:
    events = clean_log()
    find(events, "trained", trajectory=ALONE)["steps"][0]["log_probs"] = [0.0, 0.0]
    append(events, "stuck", what="call", target=ALONE, call="q1", waited_s=120)
    done = headrace("storm", "--check", write(tmp_path, events))
    assert done.code == 1
    assert f"stuck: {ALONE}: call took more than 120 s" in done.err
    figures = json.loads(done.out.splitlines()[-1])
    assert (figures["tokens"], figures["stuck"], figures["lost"]) == (1, 1, 0)


def test_a_log_that_ends_before_its_storm_is_not_clean(headrace: Command, tmp_path: Path) -> None:
    half = clean_log()
    half = half[: half.index(find(half, "fault"))]
    done = headrace("storm", "--check", write(tmp_path, half))
    assert done.code == 1
    assert "unfinished: storm: the log has no end" in done.err
    assert json.loads(done.out.splitlines()[-1])["unfinished"] == 1


def test_a_folder_without_a_storms_log_is_not_checked(headrace: Command, tmp_path: Path) -> None:
    other = clean_log()
    other.remove(find(other, "begin"))
    for name, events in (("empty", []), ("other", other)):
        (tmp_path / name).mkdir()
        done = headrace("storm", "--check", write(tmp_path / name, events))
        assert (done.code, done.out) == (2, "")
        assert f"there is no storm's log in {tmp_path / name}" in done.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--check", "/nowhere/at/all"), "--check is '/nowhere/at/all'"),
        (("--kills", "-1"), "kills"),
        (("--other-python", "/nowhere/python"), "--other-python is '/nowhere/python'"),
        (("--pool", "cloud"), "pool"),
    ],
)
def test_what_cannot_be_is_refused_by_name(headrace: Command, flags: tuple[str, ...], said: str) -> None:
    done = headrace("storm", *flags)
    assert done.code == 2
    assert said in done.err


def test_a_folder_that_holds_something_is_refused(headrace: Command, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    done = headrace("storm", "--quick", "--folder", tmp_path)
    assert done.code == 1
    assert "is not empty" in done.err
