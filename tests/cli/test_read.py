"""Reading a pool by its TARGET: a folder and a service give the same answers."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.command import COMMAND, Command, Served
from tests.pool.scored.kit import post, started

from headrace import DataPool, Step
from headrace.data.visible import INVISIBLE
from headrace.extras import install_command
from headrace.pool.export import read_steps


def test_stats_show_the_ledger_by_channel(headrace: Command, target: str) -> None:
    done = headrace("pool", "stats", target)
    assert done.code == 0
    train, other = done.rows
    assert {name: train[name] for name in ("channel", "submitted", "queued", "consumed", "balanced")} == {
        "channel": "train",
        "submitted": "15",
        "queued": "15",
        "consumed": "0",
        "balanced": "yes",
    }
    assert (train["groups queued"], train["groups ready"]) == ("4", "3")
    assert other["submitted"] == "1"
    assert "\njournal\t" in done.out
    assert done.err == ""


def test_stats_of_one_channel_as_json(headrace: Command, target: str) -> None:
    found = json.loads(headrace("pool", "stats", target, "--channel", "train", "--json").out)
    assert found["ledger"]["submitted"] == 15
    assert found["groups"]["ready"] == 3
    assert found["config"]["n_rollouts"] == 2


def test_stats_of_every_channel_as_json(headrace: Command, target: str) -> None:
    found = json.loads(headrace("pool", "stats", target, "--json").out)
    assert found["ledger"]["submitted"] == 16
    assert found["balanced"] is True
    assert set(found["channels"]) == {"train", "eval"}
    assert found["journal_bytes"] > 0


def test_a_journal_with_a_desk_is_read_like_any_other(headrace: Command, tmp_path: Path) -> None:
    with DataPool(tmp_path / "journal", durability="os") as pool:
        started(pool)
        for name in range(3):
            post(pool, name)
        assert pool.desk_batch() is not None
        pool.compact()
        post(pool, 3)
    assert "\ndesk\t2 queued, 0 buffered, 2 out, 0 served\n" in headrace("pool", "stats", tmp_path / "journal").out
    found = json.loads(headrace("pool", "stats", tmp_path / "journal", "--json").out)["desk"]
    assert (found["posted"], found["step"]) == (4, 1)
    assert headrace("pool", "ls", tmp_path / "journal").rows == []
    assert headrace("pool", "verify", tmp_path / "journal").code == 0


def test_groups_are_listed_oldest_first(headrace: Command, target: str) -> None:
    rows = headrace("pool", "ls", target).rows
    assert [(row["prompt_uid"], row["state"], row["steps"]) for row in rows] == [
        ("a", "ready", "5"),
        ("b", "ready", "4"),
        ("c", "ready", "4"),
        ("d", "waiting", "2"),
    ]
    assert [row["prompt_uid"] for row in headrace("pool", "ls", target, "--state", "waiting").rows] == ["d"]


def test_trajectories_are_filtered_by_reward_and_completeness(headrace: Command, target: str) -> None:
    rows = headrace("pool", "ls", target, "trajectories", "--min-reward", "0.5", "--complete").rows
    assert [(row["trajectory_uid"], row["reward"]) for row in rows] == [
        ("a-0", "0.5"),
        ("a-1", "1"),
        ("b-1", "1"),
        ("c-1", "1"),
    ]
    assert headrace("pool", "ls", target, "trajectories", "--no-complete").rows == []


def test_steps_are_filtered_by_trajectory_tag_and_trainability(headrace: Command, target: str) -> None:
    rows = headrace("pool", "ls", target, "steps", "--trajectory-uid", "b-1").rows
    assert [(row["step_index"], row["response_tokens"], row["trainable"]) for row in rows] == [
        ("0", "2", "yes"),
        ("1", "2", "no"),
    ]
    by_tag = headrace("pool", "ls", target, "steps", "--tag", "odd").rows
    assert [(row["trajectory_uid"], row["step_index"], row["note"]) for row in by_tag] == [("b-1", "1", "cut short")]
    assert headrace("pool", "ls", target, "steps", "--no-trainable").rows == by_tag
    assert headrace("pool", "ls", target, "steps", "--quarantined").rows == []
    assert len(headrace("pool", "ls", target, "steps", "--channel", "eval").rows) == 1


def test_pages_follow_one_another_by_cursor(headrace: Command, target: str) -> None:
    seen: list[str] = []
    cursor = 0
    for _ in range(4):
        page = json.loads(
            headrace("pool", "ls", target, "steps", "--limit", "4", "--cursor", str(cursor), "--json").out
        )
        seen += [f"{row['trajectory_uid']}/{row['step_index']}" for row in page["items"]]
        cursor = page["next"]
    assert cursor is None
    assert len(seen) == len(set(seen)) == 15
    at_once = headrace("pool", "ls", target, "steps", "--limit", "4", "--all").rows
    assert [f"{row['trajectory_uid']}/{row['step_index']}" for row in at_once] == seen


def test_a_page_that_is_not_the_last_says_how_to_go_on(headrace: Command, target: str) -> None:
    done = headrace("pool", "ls", target, "--limit", "2")
    assert len(done.rows) == 2
    assert "more with --cursor " in done.err


def test_a_trajectory_is_shown_as_a_tree(headrace: Command, target: str) -> None:
    lines = headrace("pool", "show", target, "a-0").out.splitlines()
    assert "reward\t0.5" in lines
    assert lines[-3:] == [
        "  step 0: 3 prompt (+3) + 2 response tokens, version 7, stop",
        "    step 1: 6 prompt (+1) + 2 response tokens, version 7, reward 0, stop",
        "    step 2: 7 prompt (+2) + 1 response tokens, version 7, reward 0.5, last",
    ]


def test_a_trajectory_of_more_turns_than_python_nests_calls_is_shown(headrace: Command, tmp_path: Path) -> None:
    turns = sys.getrecursionlimit() + 100
    ids = [1, *[2, 3] * turns]
    with DataPool(tmp_path / "journal", durability="os") as pool:
        pool.submit_steps(
            [
                Step(prompt_ids=ids[: 2 * turn + 1], response_ids=[2], trajectory_uid="long", step_index=turn)
                for turn in range(turns)
            ]
        )
    shown = headrace("pool", "show", tmp_path / "journal", "long")
    assert shown.code == 0, shown.err
    lines = [line for line in shown.out.splitlines() if line.startswith("  ")]
    assert len(lines) == turns
    last = f"step {turns - 1} after {turns - 2}: {2 * turns - 1} prompt (+1) + 1 response tokens"
    assert lines[-1].lstrip().startswith(last)
    # What is far down is not further in, so that all of it stays as long as its steps.
    assert max(map(len, lines)) < 200


def test_a_trajectory_that_failed_is_told_with_why(headrace: Command, tmp_path: Path) -> None:
    with DataPool(tmp_path / "journal", durability="os") as pool:
        pool.open("running", "p", "val")
        pool.open("broken", "p", "val", metadata={"a": 1})
        pool.fail("broken", "crashed: exit code 3")
    shown = headrace("pool", "show", tmp_path / "journal", "broken")
    assert shown.code == 0
    lines = dict(line.split("\t", 1) for line in shown.out.splitlines())
    told = ("prompt_uid", "channel", "state", "steps", "reason")
    assert [lines[name] for name in told] == ["p", "val", "failed", "0", "crashed: exit code 3"]
    found = json.loads(headrace("pool", "show", tmp_path / "journal", "broken", "--json").out)
    assert (found["state"], found["reason"]) == ("failed", "crashed: exit code 3")
    listing = ("pool", "ls", tmp_path / "journal", "trajectories", "--channel", "val")
    assert [row["trajectory_uid"] for row in headrace(*listing).rows] == ["running"]
    (row,) = headrace(*listing, "--state", "failed").rows
    assert (row["trajectory_uid"], row["reason"]) == ("broken", "crashed: exit code 3")


def test_a_trajectory_is_shown_with_the_tokens_that_each_step_added(headrace: Command, target: str) -> None:
    last = headrace("pool", "show", target, "a-0", "--tokens").out.splitlines()[-1]
    assert last.endswith("| 9 9 -> 5")


def test_what_people_decided_about_a_step_is_shown(headrace: Command, target: str) -> None:
    last = headrace("pool", "show", target, "b-1").out.splitlines()[-1]
    assert last.endswith("last, not trainable, tags odd, note cut short")


def test_a_trajectory_as_json(headrace: Command, target: str) -> None:
    found = json.loads(headrace("pool", "show", target, "a-0", "--json", "--tokens").out)
    assert (found["trajectory_uid"], found["prompt_uid"], found["complete"]) == ("a-0", "a", True)
    assert [(step["step_index"], step["parent"]) for step in found["steps"]] == [(0, None), (1, 0), (2, 0)]
    assert found["steps"][2]["response_ids"] == [5]
    assert found["steps"][2]["rollout_log_probs"] == [-1.0]
    assert found["sequences"] == 2


def test_an_unknown_trajectory_is_a_failure(headrace: Command, target: str) -> None:
    done = headrace("pool", "show", target, "nobody")
    assert (done.code, done.out, done.err) == (1, "", "headrace: no trajectory 'nobody'\n")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_steps_are_exported(headrace: Command, target: str, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"steps.{suffix}"
    done = headrace("pool", "export", target, "--to", path)
    assert done.code == 0
    assert done.out.startswith(f"15 steps of 7 trajectories in {path} (")
    found = list(read_steps(path))
    assert len(found) == 15
    branch = next(step for step in found if (step.trajectory_uid, step.step_index) == ("a-0", 2))
    assert branch.prompt_ids.tolist() == [1, 2, 3, 10, 20, 9, 9]


def test_sequences_are_exported(headrace: Command, target: str, tmp_path: Path) -> None:
    path = tmp_path / "sequences.jsonl"
    done = headrace("pool", "export", target, "--to", path, "--what", "sequences")
    assert done.out.startswith("8 sequences of 7 trajectories in ")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["tokens"] for row in rows if row["trajectory_uid"] == "a-1"] == [[1, 2, 3, 11, 20, 4, 11, 21]]


def test_another_suffix_is_bad_usage(headrace: Command, target: str, tmp_path: Path) -> None:
    done = headrace("pool", "export", target, "--to", tmp_path / "steps.csv")
    assert done.code == 2
    assert "end it with .parquet or .jsonl" in done.err


def test_an_export_without_pyarrow_says_what_to_install(
    headrace: Command, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    done = headrace("pool", "export", target, "--to", tmp_path / "steps.parquet")
    assert done.code == 1
    assert install_command("export") in done.err


def test_reading_a_folder_changes_nothing_in_it(headrace: Command, journal: Path, tmp_path: Path) -> None:
    with DataPool(journal, durability="os") as pool:
        pool.fetch_batch(1, lease_s=0.001)  # has run out when the folder is read
    segment = max(journal.glob("*.seg"))
    segment.write_bytes(segment.read_bytes() + b"torn")
    before = _content(journal)
    for args in (("stats",), ("ls",), ("show", "b-0"), ("export", "--to", str(tmp_path / "x.jsonl")), ("verify",)):
        command, *rest = args
        assert headrace("pool", command, journal, *rest).code == 0
    assert _content(journal) == before


def test_a_lease_that_ran_out_is_read_as_queued(headrace: Command, journal: Path) -> None:
    with DataPool(journal, durability="os") as pool:
        pool.fetch_batch(1, lease_s=0.001)
    row = headrace("pool", "stats", journal, "--channel", "train").rows[0]
    assert (row["queued"], row["leased"]) == ("15", "0")


def test_a_folder_without_a_journal_is_not_made_one(headrace: Command, tmp_path: Path) -> None:
    for name, said in (("missing", "there is no such folder"), ("empty", "it holds no segment and no snapshot")):
        folder = tmp_path / name
        if name == "empty":
            folder.mkdir()
        for command in (("stats",), ("ls",), ("show", "x"), ("verify",), ("repair",), ("compact",)):
            done = headrace("pool", command[0], folder, *command[1:])
            assert done.code == 1
            assert said in done.err
        done = headrace("dashboard", folder, "--port", 0)
        assert done.code == 1
        assert said in done.err
    assert not (tmp_path / "missing").exists()
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_service_that_does_not_answer_is_a_failure(headrace: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.common.RETRY_S", 0.0)
    done = headrace("pool", "stats", "http://127.0.0.1:1")
    assert done.code == 1
    assert "the pool at http://127.0.0.1:1 did not answer" in done.err
    assert done.err.count("\n") == 1


def test_a_terminal_gets_a_table_and_a_tree(served: Served) -> None:
    assert "───" in _on_terminal("pool", "ls", served.address)
    assert "submitted" in _on_terminal("pool", "stats", served.address)
    assert "└── step 2" in _on_terminal("pool", "show", served.address, "a-0")


def test_channels_of_any_name_stand_beside_each_other_on_a_terminal(
    headrace: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DataPool(tmp_path / "journal", durability="os") as pool:
        for channel in ("steps", "my_channel", "a  b"):
            pool.submit_step(Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t", is_last=True), channel=channel)
    for module in ("common", "pool.read"):
        monkeypatch.setattr(f"headrace.cli.{module}.on_terminal", lambda: True)
    lines = [line.strip() for line in headrace("pool", "stats", tmp_path / "journal").out.splitlines()]
    assert re.fullmatch(r"steps +steps +my_channel +a  b", lines[1])
    assert re.fullmatch(r"submitted( +1){3}", lines[3])


#: Sets a terminal's title, clears it, begins a row of its own and turns round what follows.
HOSTILE = "x\x1b]0;evil\x07\x1b[2J\x9b2J\rb\nforged\ty\u202e"
VISIBLE = "x<U+001B>]0;evil<U+0007><U+001B>[2J<U+009B>2J<U+000D>b forged y<U+202E>"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A journal whose every text from agents is `HOSTILE`."""
    with DataPool(tmp_path / "journal", durability="os") as pool:
        where = {"trajectory_uid": HOSTILE, "prompt_uid": HOSTILE, "metadata": {HOSTILE: HOSTILE}}
        pool.submit_step(Step(prompt_ids=[1], response_ids=[2], is_last=True, finish_reason=HOSTILE, **where))
        pool.curate(HOSTILE, 0, tags=[HOSTILE], note=HOSTILE)
        pool.open("broken", HOSTILE)
        pool.fail("broken", HOSTILE)
    return tmp_path / "journal"


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "elsewhere"])
@pytest.mark.parametrize(
    "asked",
    [
        ("pool", "ls", "JOURNAL"),
        ("pool", "ls", "JOURNAL", "steps"),
        ("pool", "ls", "JOURNAL", "trajectories", "--state", "failed"),
        ("pool", "show", "JOURNAL", HOSTILE),
        ("pool", "show", "JOURNAL", "broken"),
        ("why", HOSTILE, "JOURNAL"),
        ("why", "broken", "JOURNAL"),
    ],
    ids=" ".join,
)
def test_text_of_agents_has_no_power_over_a_terminal(
    headrace: Command, hostile: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...], terminal: bool
) -> None:
    for module in ("common", "pool.read"):
        monkeypatch.setattr(f"headrace.cli.{module}.on_terminal", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "2000")
    done = headrace(*(str(hostile) if arg == "JOURNAL" else arg for arg in asked))
    assert done.code == 0, done.err
    assert VISIBLE in done.out
    assert not [line for line in done.out.split("\n") if line.startswith("forged")]
    assert INVISIBLE.search(done.out) is None


def test_an_error_that_names_such_text_has_none_either(headrace: Command, tmp_path: Path) -> None:
    done = headrace("pool", "stats", tmp_path / "x\x1b[2J\u202e")
    assert done.code == 1
    assert "x<U+001B>[2J<U+202E>" in done.err
    assert INVISIBLE.search(done.err) is None


def test_json_stays_exact_and_on_a_terminal_without_power(
    headrace: Command, hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("pool", "show", hostile, HOSTILE, "--json")
    exact = json.loads(headrace(*asked).out)
    assert (exact["trajectory_uid"], exact["steps"][0]["note"]) == (HOSTILE, HOSTILE)
    monkeypatch.setattr("headrace.cli.common.on_terminal", lambda: True)
    shown = headrace(*asked).out
    assert INVISIBLE.search(shown) is None
    assert json.loads(shown) == exact


def test_a_reader_that_had_enough_is_no_error(served: Served) -> None:
    listing = [*COMMAND, "pool", "ls", served.address, "steps"]
    process = subprocess.Popen(listing, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == ""
    process.wait(120)


def _content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def _on_terminal(*args: str) -> str:
    """What the command prints on a terminal of 200 columns."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": "200", "TERM": "xterm"}
    process = subprocess.Popen([*COMMAND, *args], stdout=theirs, stderr=subprocess.STDOUT, env=env)
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other side is gone
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    assert process.wait(120) == 0
    return b"".join(parts).decode()
