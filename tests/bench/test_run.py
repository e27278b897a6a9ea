"""Every part of `headrace bench run` at sizes at which the figures mean nothing, and their shape everything."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from headrace.bench.gateway.load import GatewaySizes
from headrace.bench.gateway.servers import start_stub
from headrace.bench.report import Figures
from headrace.bench.run import measure
from headrace.bench.run.load import FULL, QUICK, RULE_S, RolloutAgents, RunSizes, compute, samples
from headrace.bench.run.measure import BARS, PARTS, measure_sizes
from headrace.bench.server_process import ServerProcess

pytestmark = pytest.mark.system

TINY = RunSizes(
    "tiny",
    rollouts=4,
    n_rollouts=2,
    calls=2,
    first_words=20,
    more_words=5,
    sampled=8,
    delay_ms=5,
    gather_rounds=1,
    few_samples=4,
    many_samples=8,
    reward_rounds=1,
    start_rounds=1,
)

KEYS = {
    "gather": {"vs_gather"},
    "gather at once": {"vs_gather_at_once"},
    "rewards": {"reward_flat"},
    "start": {"run_start_s"},
}
#: Parts that make bench shows to work, as others here and in tests/run do.
MARKS = {"gather at once": [pytest.mark.long], "start": [pytest.mark.long]}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, [])) for name in KEYS])
@pytest.mark.timeout(1800)
def test_a_part_measures_its_keys(name: str, tmp_path: Path) -> None:
    part = PARTS[name](TINY, tmp_path)
    assert set(part.ratios) == KEYS[name]
    for figure in (*part.ratios.values(), *part.absolute.values()):
        assert type(figure) is float
        assert math.isfinite(figure)
        assert figure > 0


def test_the_parts_cover_the_bars() -> None:
    assert set(KEYS) == set(PARTS)
    assert set().union(*KEYS.values()) == set(BARS)


def test_quick_takes_fewer_rounds_of_the_same_sizes() -> None:
    quick, full = asdict(QUICK), asdict(FULL)
    changed = {name for name in full if quick[name] != full[name]}
    assert changed == {"name"} | {name for name in changed if name.endswith("rounds")}


def test_the_sizes_are_those_that_the_bars_name() -> None:
    assert (FULL.rollouts, FULL.calls, FULL.delay_ms) == (256, 5, 1000)
    assert (FULL.few_samples, FULL.many_samples, RULE_S) == (1_000, 10_000, 0.001)
    assert FULL.rows * FULL.n_rollouts == FULL.rollouts


def test_the_json_has_every_key_and_the_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(keys: set[str], sizes: RunSizes, folder: Path) -> Figures:
        return Figures(dict.fromkeys(keys, 1.5), {})

    parts = {name: partial(figures, keys) for name, keys in KEYS.items()}
    monkeypatch.setattr(measure, "PARTS", parts)
    measure_sizes(TINY, tmp_path).write(tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == [*BARS, "absolute", "environment"]
    assert all(found[key] == 1.5 for key in BARS)
    assert found["environment"]["sizes"]["delay_ms"] == TINY.delay_ms


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("tokenizer")
    with start_stub(folder, GatewaySizes("stub", sampled=TINY.sampled)) as child:
        yield child


def test_a_call_that_fails_ends_the_rollout(stub: ServerProcess) -> None:
    async def played() -> None:
        agents = RolloutAgents(TINY)
        try:
            await agents.solve(agents.data()[0], stub.address + "/nowhere")
        finally:
            await agents.aclose()

    with pytest.raises(RuntimeError, match="/nowhere/v1/chat/completions was answered 404"):
        asyncio.run(played())


def test_every_rollout_of_the_data_is_of_a_row_of_its_own() -> None:
    data = RolloutAgents(TINY).data()
    assert len(data) == TINY.rows == 2
    assert len({row["prompt"] for row in data}) == TINY.rows


def test_the_rule_finds_the_right_answers_right() -> None:
    right, other = samples(2)
    assert compute(right) == 1.0
    assert compute(type(right)(text=right.text, ground_truth=other.text)) == 0.0
