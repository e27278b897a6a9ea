"""kill -9 at every call that the journal makes to the file system: what was acknowledged is there again, by itself."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pool.journal.kit import Unsynced, check_rules, flip, frames, one, segment, uids

from headrace import DataPool
from headrace.data.frame import FrameKind, frame_bytes
from headrace.pool.journal.files import read_layout
from headrace.pool.journal.repair import repair, verify

ROOT = Path(__file__).parents[3]
KILLED = -signal.SIGKILL

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Has a process work until it kills itself; what it had acknowledged."""
    command = [sys.executable, "-m", "tests.pool.journal.victim"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def ask(what: str, folder: Path, **case: Any) -> dict[str, Any]:
            print(json.dumps({"what": what, "folder": str(folder), **case}), file=server.stdin, flush=True)
            return dict(json.loads(server.stdout.readline()))

        yield ask
        server.stdin.close()


def points(calls: dict[str, int]) -> list[tuple[str, int, str]]:
    """Before and after every call, and half-way through those that write."""
    return [
        (call, nth, when)
        for call, n in calls.items()
        for nth in range(1, n + 1)
        for when in ("before", "after", *(["half"] if call == "write" else []))
    ]


def told(answer: dict[str, Any], what: str) -> list[Any]:
    return [value for said, value in answer["told"] if said == what]


def flat(lists: list[list[str]]) -> list[str]:
    return [uid for uids in lists for uid in uids]


def check_recovered(folder: Path, answer: dict[str, Any], durability: Any) -> None:
    with DataPool(folder, durability=durability, files=Unsynced()) as pool:
        check_rules(pool._state)
        there, tombs = set(uids(pool)), set(pool._state.look("train").tombstones)
        kept, consumed = told(answer, "kept"), flat(told(answer, "consumed"))
        assert set(flat(kept)) <= there | tombs
        assert set(consumed) <= tombs
        for submitted in told(answer, "trying"):
            found = [uid in there | tombs for uid in submitted]
            assert all(found) or not any(found), "half of a submit is there"
        ledger = pool.stats("train")["ledger"]
        assert ledger["submitted"] >= len(flat(kept))
        for uid in told(answer, "rewarded"):
            assert uid not in there or pool.trajectory(uid).reward == 0.5
            assert uid not in there or pool.reward(uid, 0.1, source="model") == "kept"
        for uid in told(answer, "forgotten"):
            assert uid not in there
        for uid in told(answer, "failed"):
            (row,) = pool.list_trajectories(state="failed", trajectory_uid=uid)["items"]
            assert (row["reason"], pool.fail(uid, "again").status) == ("it broke", "ok")
        assert pool.submit_step(one("new")).accepted == 1
        for uid in consumed:  # a retry of what is consumed neither comes back nor fails
            assert pool.submit_step(one(uid, uid.split("/")[0])).duplicates == 1
    with DataPool(folder, durability=durability, files=Unsynced()) as pool:
        assert "new" in uids(pool)


@pytest.mark.parametrize("durability", ["fsync", pytest.param("os", marks=pytest.mark.long)])
def test_a_process_killed_at_any_call_loses_nothing_that_it_acknowledged(
    ask: Ask, tmp_path: Path, durability: str
) -> None:
    whole = ask("work", tmp_path / "whole", durability=durability)
    assert whole["code"] == 0
    calls = told(whole, "calls")[0]
    assert {"create", "write", "sync", "sync_dir", "rename", "unlink", "reserve"} <= calls.keys()
    for point in points(calls):
        folder = tmp_path / "-".join(map(str, point))
        answer = ask("work", folder, durability=durability, point=point)
        assert answer["code"] == KILLED, point
        check_recovered(folder, answer, durability)
        shutil.rmtree(folder)


def test_a_process_killed_while_it_recovers_recovers_the_next_time(ask: Ask, tmp_path: Path) -> None:
    """What it finds: a torn tail, a snapshot that was never finished, and a segment that a snapshot had replaced."""
    model = tmp_path / "model"
    with DataPool(model, durability="os") as pool:
        pool.submit_steps([one("a/0", "a"), one("a/1", "a")])
    shutil.copy(segment(model), tmp_path / "first")
    with DataPool(model, durability="os") as pool:
        pool.compact()
        pool.submit_step(one("b"))
    shutil.copy(tmp_path / "first", segment(model))
    (model / "000000000007.tmp").write_bytes(b"half a snapshot")
    with (segment(model, 2)).open("ab") as file:
        file.write(frame_bytes(FrameKind.COMMIT, b"the header of a commit")[:50])
    shutil.copytree(model, tmp_path / "whole")
    calls = told(ask("open", tmp_path / "whole"), "calls")[0]
    assert {"truncate", "sync", "sync_dir", "unlink"} <= calls.keys()
    for point in points(calls):
        folder = tmp_path / "-".join(map(str, point))
        shutil.copytree(model, folder)
        assert ask("open", folder, point=point)["code"] == KILLED
        with DataPool(folder) as pool:
            assert uids(pool) == ["a/0", "a/1", "b"]
            check_rules(pool._state)
        assert not read_layout(folder).outdated
        shutil.rmtree(folder)


def test_a_repair_killed_at_any_call_can_be_done_again(ask: Ask, tmp_path: Path) -> None:
    model = tmp_path / "model"
    with DataPool(model, durability="os") as pool:
        for uid in "abc":
            pool.submit_step(one(uid))
    flip(segment(model), frames(segment(model))[2][0] + 50)
    damaged = segment(model).read_bytes()
    shutil.copytree(model, tmp_path / "whole")
    calls = told(ask("repair", tmp_path / "whole"), "calls")[0]
    assert {"create", "write", "sync", "link", "rename", "unlink"} <= calls.keys()
    with DataPool(tmp_path / "whole") as pool:
        left = uids(pool)
    assert left == ["a", "c"]
    for point in points(calls):
        folder = tmp_path / "-".join(map(str, point))
        shutil.copytree(model, folder)
        assert ask("repair", folder, point=point)["code"] == KILLED
        assert any(kept.read_bytes() == damaged for kept in folder.rglob("000000000001.seg"))
        repair(folder)
        assert not verify(folder).damage
        with DataPool(folder) as pool:
            assert uids(pool) == left
            check_rules(pool._state)
        shutil.rmtree(folder)
