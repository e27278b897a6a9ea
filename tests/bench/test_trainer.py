"""The trainer's benchmark: its parts, at sizes that take a moment."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bench.trainer import measure, packing, plain
from headrace.data.errors import HeadraceError
from headrace.demo.recipe import RECIPES


def test_packed_and_padded_learn_from_the_same_tokens() -> None:
    load = packing.Load(sequences=3, places=2048, layers=1, width=32, heads=2, rounds=1)
    found = packing.packed_vs_padded(load)
    assert found["packed_vs_padded"] == pytest.approx(found["packed_tokens_s"] / found["padded_tokens_s"], rel=1e-6)


@pytest.mark.timeout(1800)
def test_the_plain_loop_learns_the_small_game(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = replace(RECIPES["number3"], steps=30)
    found = plain.measure(recipe, task="number3", seed=0, lag=0, model=None)
    assert found["steps"] <= 30
    first, last = found["rewards"][:5], found["rewards"][-5:]
    assert sum(last) / len(last) > sum(first) / len(first) + 0.2


def test_the_longest_hold_is_read_from_the_runs_own_rows(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    rows = [{"step": 1}, *({"step": at, "sync": {"hold_ms": float(at)}} for at in range(2, 103))]
    (tmp_path / "trainer" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert measure._held(measure._rows(tmp_path)) == pytest.approx(101)


def test_a_command_that_fails_is_named_with_what_it_said() -> None:
    with pytest.raises(HeadraceError, match=r"demo --task chess.*there are number"):
        measure._run("headrace", "demo", "--task", "chess", "--run", "never")


def test_a_run_that_does_not_learn_is_followed_by_another_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def run(*args: object, may_fail: bool = False) -> dict[str, float]:
        asked.append(args)
        return {"reward_end": 0.6 if len(asked) == 1 else 0.96}

    monkeypatch.setattr(measure, "_run", run)
    folder, verdict = measure._learned("number3", tmp_path)
    assert (folder, verdict["seed"]) == (tmp_path / "demo-1", 1)
    monkeypatch.setattr(measure, "_run", lambda *args, may_fail=False: {"reward_end": 0.6})
    with pytest.raises(HeadraceError, match="none of the seeds 0 to 2"):
        measure._learned("number3", tmp_path)
