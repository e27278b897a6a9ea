"""Every part of `headrace bench pool` at sizes at which the figures mean nothing, and their shape everything."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from headrace.bench.pool.load import FULL, QUICK, ConversationSource, PoolSizes, StepSource
from headrace.bench.pool.measure import BARS, all_parts, memory

TINY = PoolSizes(
    "tiny",
    prompt=16,
    response=8,
    submit=8,
    writers=2,
    submits_a_writer=2,
    durable_rounds=2,
    few_groups=16,
    many_groups=40,
    fetch_groups=4,
    flat_rounds=2,
    recovered_steps=20,
    recover_rounds=1,
    trajectories=4,
    turns=3,
    final_tokens=96,
    rollouts=4,
    http_rounds=2,
    ray_submits=2,
    naive_calls=4,
    ray_rounds=1,
    million_steps=64,
    million_turns=2,
    million_tokens=40,
    few_million_groups=2,
    million_rounds=2,
    compacted_groups=24,
    compaction_rounds=2,
    many_channels=6,
    channel_rounds=2,
)

KEYS = {
    "durable": {"durable_vs_raw"},
    "flat": {"fetch_flat", "submit_flat"},
    "memory": {"memory_vs_unique", "journal_vs_unique"},
    "http": {"http_vs_json"},
    "recover": {"recover_vs_read"},
    "million": {"pool_million_gib", "million_submit_flat", "million_fetch_flat"},
    "compaction": {"lock_ms_max"},
    "channels": {"channels_flat"},
    "ray": {"ray_vs_naive"},
}


#: A part that make bench, which CI runs too, shows to work.
MARKS = {"ray": [pytest.mark.ray, pytest.mark.long]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, [])) for name in KEYS])
@pytest.mark.timeout(1800)
def test_a_part_measures_its_keys(name: str, tmp_path: Path) -> None:
    part = all_parts()[name](TINY, tmp_path)
    assert set(part.ratios) == KEYS[name]
    for figure in (*part.ratios.values(), *part.absolute.values()):
        assert type(figure) is float
        assert math.isfinite(figure)
        assert figure > 0 or name in ("memory", "million")  # so few tokens that nothing need grow


def test_the_parts_cover_the_bars() -> None:
    assert set().union(*KEYS.values()) == set(BARS)


def test_the_journal_holds_what_was_sent_and_little_more(tmp_path: Path) -> None:
    part = memory(TINY, tmp_path)
    assert part.absolute["unique_mb"] == pytest.approx(4 * (96 * 4 + 3 * 8 * 4) / 1e6)
    assert part.ratios["journal_vs_unique"] > 1


def test_quick_takes_fewer_rounds_of_the_same_sizes() -> None:
    quick, full = asdict(QUICK), asdict(FULL)
    changed = {name for name in full if quick[name] != full[name]}
    fewer = {name for name in changed if name.endswith("rounds") or name == "naive_calls"}
    assert changed == {"name", "million_steps"} | fewer  # the million is told from 100,000, and says so


def test_uids_never_repeat_though_tokens_do() -> None:
    load = StepSource(PoolSizes("small", prompt=4, response=2, submit=8), rollouts=4)
    steps = [step for some in load.submits(2000) for step in some]
    assert len({step.trajectory_uid for step in steps}) == len(steps) == 16_000
    assert len({step.prompt_uid for step in steps}) == 4000
    assert np.array_equal(steps[0].prompt_ids, steps[8192].prompt_ids)


def test_a_conversations_prompt_is_all_that_was_said_and_something_new() -> None:
    conversations = ConversationSource(TINY)
    by_uid: dict[str, list[np.ndarray]] = {}
    for step in (step for some in conversations.submits() for step in some):
        said = by_uid.setdefault(step.trajectory_uid, [])
        if said:
            assert len(step.prompt_ids) > len(said[-1])
            assert np.array_equal(step.prompt_ids[: len(said[-1])], said[-1])
        assert step.step_index == len(said)
        assert step.is_last == (len(said) == TINY.turns - 1)
        said.append(np.concatenate([step.prompt_ids, step.response_ids]))
    assert len(by_uid) == TINY.trajectories
    assert {len(said[-1]) for said in by_uid.values()} == {TINY.final_tokens}
