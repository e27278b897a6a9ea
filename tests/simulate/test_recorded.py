"""A recorded run becomes a scenario, whose simulation does what the run did."""

from __future__ import annotations

import heapq
import json
from pathlib import Path

import orjson
import pytest
from tests.cli.command import Command

from headrace.data.errors import InvalidInput
from headrace.data.step import Step
from headrace.pool.embedded import DataPool
from headrace.simulate import recorded, simulate
from headrace.simulate.recorded import most_at_once, overlapping, weighted_line

#: A run of 8 agents whose rollouts have two calls of 20 tokens, half a second each, and a quarter of a second between
#: them; groups of 2, batches of 4 groups, each learned from in 0.9 s; a reward comes 0.3 s after the end.
AGENTS, CALL_S, BETWEEN_S, REWARD_S, TOKENS = 8, 0.5, 0.25, 0.3, 20
ROLLOUTS, GROUPS, LEARN_S, PUBLISH_S, RUN_S = 2, 4, 0.9, 0.1, 60.0


def record_run(folder: Path) -> None:
    """Writes what such a run leaves: a journal, and the trainer's metrics."""
    now = 1000.0
    rows: list[dict[str, object]] = []
    learns_until = waits_since = now
    pool = DataPool(
        folder / "journal",
        durability="os",
        channels={"train": {"n_rollouts": ROLLOUTS, "require_reward": True}},
        clock=lambda: now,
        monotonic=lambda: now,
    )
    with pool:
        for at, name, number in play_times():
            now = 1000 + at
            uid, prompt = f"r{number}", f"g{number // ROLLOUTS}"
            if name == "reward":
                pool.reward(uid, 1.0)
            else:
                last = name == "second"
                prompt_ids = list(range(1, 2 * TOKENS + 1 if last else TOKENS + 1))
                step = Step(
                    prompt_ids=prompt_ids + ([7] * TOKENS if last else []),
                    response_ids=[7] * TOKENS,
                    rollout_log_probs=[-0.5] * TOKENS,
                    trajectory_uid=uid,
                    prompt_uid=prompt,
                    is_last=last,
                    created_at=now,
                    metadata={"timings": {"first_token_s": 0.1, "total_s": CALL_S}, "server": "http://one"},
                )
                pool.submit_step(step)
            if now >= learns_until and (batch := pool.fetch_batch(GROUPS, lease_s=600.0, timeout=0)):
                batch.ack()
                began = max(waits_since, learns_until)
                learns_until = now + LEARN_S + PUBLISH_S
                pool.set_version(len(rows) + 1)
                times = {"wait": now - began, "learn": LEARN_S, "publish": PUBLISH_S}
                row = {"step": len(rows), "groups": GROUPS, "seconds": now - began + LEARN_S + PUBLISH_S}
                rows.append({**row, "staleness_mean": 1.0, "times": times, "sync": {"hold_ms": 0.0}})
                waits_since = learns_until
    (folder / "trainer").mkdir()
    (folder / "trainer" / "metrics.jsonl").write_bytes(b"\n".join(orjson.dumps(row) for row in rows) + b"\n")


def play_times() -> list[tuple[float, str, int]]:
    """What happens when: the end of a rollout's first and second call, and its reward."""
    found: list[tuple[float, str, int]] = []
    free = [(0.05 * agent, agent) for agent in range(AGENTS)]
    number = 0
    while free[0][0] < RUN_S:
        at, agent = heapq.heappop(free)
        first, second = at + CALL_S, at + CALL_S + BETWEEN_S + CALL_S
        found += [(first, "first", number), (second, "second", number), (second + REWARD_S, "reward", number)]
        heapq.heappush(free, (second, agent))
        number += 1
    return sorted(found)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    record_run(folder)
    return folder


def test_a_run_is_described_as_it_was(run: Path) -> None:
    found = recorded(run).scenario
    assert found.agents == AGENTS
    assert (found.trainer.batch_size, found.trainer.n_rollouts) == (GROUPS, ROLLOUTS)
    assert found.servers.count == 1
    play = found.plays[0]
    assert [turn.response_tokens for turn in play.turns] == [TOKENS, TOKENS]
    assert [turn.wait_s for turn in play.turns] == pytest.approx([0, BETWEEN_S], abs=1e-3)
    assert play.reward_s == pytest.approx(REWARD_S, abs=1e-3)
    assert found.trainer.step_s.samples[0] == pytest.approx(LEARN_S, abs=1e-6)
    assert found.trainer.sync_s == pytest.approx(PUBLISH_S)


def test_its_simulation_does_what_the_run_did(run: Path) -> None:
    found = recorded(run)
    outcome = simulate(found.scenario)
    for name in ("rollouts_s", "calls_s", "sampled_tokens_s", "steps_h"):
        assert getattr(outcome, name) == pytest.approx(getattr(found.rates, name), rel=0.15), name
    assert outcome.trainer_waiting == pytest.approx(found.rates.trainer_waiting, abs=0.15)


def test_the_command_shows_the_run_its_simulation_and_what_ifs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = Command(capsys)("simulate", run, "--set", "agents=4,16", "--json", tmp_path / "found.json")
    assert [row["run"] for row in done.rows] == ["recorded", "simulated", "agents=4", "agents=16"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert [each.get("changed") for each in found] == [None, {}, {"agents": 4}, {"agents": 16}]
    assert found[2]["rollouts_s"] < found[1]["rollouts_s"]


@pytest.mark.parametrize(
    ("left", "words"),
    [("journal", "metrics.jsonl is not there"), ("nothing", "has 1 training steps")],
)
def test_a_run_that_tells_too_little_is_refused(run: Path, tmp_path: Path, left: str, words: str) -> None:
    if left == "nothing":
        (tmp_path / "trainer").mkdir()
        first = (run / "trainer" / "metrics.jsonl").read_bytes().splitlines()[0]
        (tmp_path / "trainer" / "metrics.jsonl").write_bytes(first + b"\n")
    with pytest.raises(InvalidInput, match=words):
        recorded(tmp_path)


def test_spans_are_counted_where_they_overlap() -> None:
    spans = [(0.0, 4.0), (1.0, 2.0), (3.0, 5.0)]
    assert most_at_once(spans, 0.0) == 2
    assert overlapping(spans) == [1, 2, 1]


def test_a_line_has_no_part_below_zero() -> None:
    assert weighted_line([(1, 3.0, 1), (2, 5.0, 1), (3, 7.0, 1)]) == (pytest.approx(1), pytest.approx(2))
    assert weighted_line([(1, 5.0, 1), (2, 3.0, 1)]) == (pytest.approx(4), 0.0)
    assert weighted_line([(4, 8.0, 3)]) == (0.0, 2.0)


def test_a_recorded_pace_has_the_gateway_s_time_in_it_already(run: Path) -> None:
    assert recorded(run).scenario.gateway.call_ms == 0
