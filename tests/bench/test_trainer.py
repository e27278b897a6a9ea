"""The trainer's benchmark: its parts, at sizes that take a moment."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from headrace import bench
from headrace.bench.trainer import measure, packing, plain, sharing
from headrace.data.errors import HeadraceError, InvalidInput
from headrace.demo.recipe import RECIPES


def test_packed_and_padded_learn_from_the_same_tokens() -> None:
    load = packing.PackingLoad(sequences=3, places=2048, layers=1, width=32, heads=2, rounds=1)
    found = packing.packed_vs_padded(load)
    assert found["packed_vs_padded"] == pytest.approx(found["packed_tokens_s"] / found["padded_tokens_s"], rel=1e-6)


def test_shared_tokens_are_timed_against_the_same_sequences_packed() -> None:
    small = packing.PackingLoad(layers=1, width=32, heads=2)
    found = sharing.tree_vs_packed(sharing.SharingLoad(divisor=128, rounds=1, demo_rounds=1, model=small))
    for name, shape in (("tree_vs_packed", ""), ("tree_vs_packed_long", "_long"), ("tree_vs_packed_demo", "_demo")):
        assert found[name] == pytest.approx(found[f"tree{shape}_tokens_s"] / found[f"unshared{shape}_tokens_s"])


@pytest.mark.long
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
    assert measure._held(measure.rows_of(tmp_path)) == pytest.approx(101)


def test_a_command_that_fails_is_named_with_what_it_said() -> None:
    with pytest.raises(HeadraceError, match=r"demo --task chess.*there are number"):
        measure.verdict_of("headrace", "demo", "--task", "chess", "--run", "never")


def test_the_share_of_runs_that_learned_and_the_slowest_quiet_one_are_told() -> None:
    runs = [
        {"seed": 0, "busy": False, "stolen": None, "reward_end": 0.953, "steps": 120, "calls": 100, "seconds": 80.0},
        {"seed": 1, "busy": False, "stolen": 0.25, "reward_end": 0.95, "steps": 140, "calls": 200, "seconds": 90.0},
        {"seed": 2, "busy": True, "stolen": 0.0, "reward_end": 0.8545, "steps": 400, "calls": 900, "seconds": 467.0},
    ]
    found = measure._report("number", runs)
    assert found.ratios == {"learned_share": pytest.approx(2 / 3), "quiet_seconds_max": 90.0}
    assert found.absolute["busy_runs"] == 1
    assert found.absolute["steps_max"] == 400
    assert found.absolute["stolen_max"] == 0.25
    assert found.as_dict()["environment"]["demo_runs"] == runs
    assert "stolen_max" not in measure._report("number", runs[:1]).absolute  # what no system told is no figure


def test_what_other_machines_took_of_the_cpu_is_a_share_of_all() -> None:
    assert measure._stolen([0, 0, 0, 100, 0, 0, 0, 10], [40, 0, 10, 120, 0, 0, 0, 40]) == 0.3
    assert measure._stolen(None, None) is None


def test_more_busy_runs_than_runs_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"--busy is 3: how many of --runs \(2\)"):
        measure.measure(runs=2, busy=3)


def test_runs_are_the_trainers_alone() -> None:
    with pytest.raises(InvalidInput, match="for the benchmark trainer"):
        bench.benchmark("pool", runs=3)


def test_a_load_ends_with_its_block() -> None:
    with measure._load(1):
        (spinning,) = multiprocessing.active_children()
        assert spinning.is_alive()
    assert not multiprocessing.active_children()
