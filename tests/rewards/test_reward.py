"""Rewards as a whole: samples of rows, weighted sums, configurations, workers."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from headrace.data.errors import InvalidInput
from headrace.rewards import LocalRewardWorker, Reward, RewardConfig, RewardFailure, Sample, Score
from headrace.rewards.sample import score_of


@pytest.mark.parametrize(
    ("row", "column", "wanted"),
    [
        ({"answer": "4"}, None, "4"),
        ({"answer": "4", "ground_truth": 5}, None, 5),
        ({"answer": "4", "reward_model": {"ground_truth": 6, "style": "rule"}}, None, 6),
        ({"answer": "4", "label": 7}, "label", 7),
        ({"answer": "4", "reward_model": {"ground_truth": 6, "style": "rule"}}, "reward_model", 6),
        ({"question": "?"}, None, None),
    ],
)
def test_where_a_rows_ground_truth_is(row: dict[str, Any], column: str | None, wanted: Any) -> None:
    sample = Sample.of_row({**row, "data_source": "sums"}, ground_truth=column, text="4", prompt_uid="p")
    assert (sample.ground_truth, sample.data_source, sample.text, sample.prompt_uid) == (wanted, "sums", "4", "p")
    assert Sample(metadata=row, ground_truth=wanted).with_truth(column).ground_truth == wanted


def test_a_column_that_is_missing_is_named_with_the_nearest() -> None:
    with pytest.raises(InvalidInput, match=r"no column 'anwser'.*; did you mean answer\?"):
        Sample.of_row({"question": "?", "answer": "4"}, ground_truth="anwser")


def test_a_failure_survives_the_way_between_processes() -> None:
    failure = pickle.loads(pickle.dumps(RewardFailure("it hung", "timeout", "judge", again=False)))
    assert (failure.reason, failure.source, failure.detail, failure.again) == ("timeout", "judge", "it hung", False)
    assert str(failure) == "judge: timeout: it hung"


def test_a_score_with_a_part_that_is_no_number_is_none() -> None:
    with pytest.raises(RewardFailure, match="finite"):
        score_of(Score(1.0, {"style": float("nan")}))


async def test_sources_are_summed_by_weight_and_a_failure_is_never_half_a_sum() -> None:
    rules = [
        {"use": "exact_match", "weight": 0.75},
        {"use": "length", "unit": "characters", "most": 2, "weight": 0.25},
        {"use": "repetition", "words": 1, "weight": -1.0, "name": "repeats"},
    ]
    async with Reward(RewardConfig.of({"rules": rules})) as reward:
        right, wrong, unknown = await reward.score(
            [Sample(text="42", ground_truth="42"), Sample(text="7 7 7", ground_truth="42"), Sample(text="42")]
        )
    assert right == Score(1.0, {"exact_match": 1.0, "length": 1.0, "repeats": 0.0}, {"length.characters": 2})
    assert isinstance(wrong, Score)
    assert wrong.value == pytest.approx(2 / 3)  # two of its three words were said before, at a weight of -1
    assert isinstance(unknown, RewardFailure)
    assert (reward.counters.scored, reward.counters.failed) == (2, {"error": 1})


async def test_what_a_rule_raises_is_a_failure_of_that_sample_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with Reward(RewardConfig.of({"rules": ["number_closeness"]})) as reward:
        odd, good = await reward.score([Sample(text="4", ground_truth=10**400), Sample(text="4", ground_truth=4)])
    assert good == Score(1.0, {"number_closeness": 1.0})
    assert isinstance(odd, RewardFailure)
    assert (odd.source, odd.reason) == ("number_closeness", "error")
    assert "it raised OverflowError" in odd.detail
    assert "Traceback" in caplog.text


async def test_a_source_that_raises_fails_for_the_samples_of_that_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scores(samples: Any) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(lambda: {}["verdict"]))

    async with Reward(RewardConfig.of({"rules": ["format", "repetition"]})) as reward:
        monkeypatch.setattr(reward._sources[1], "scores", scores)
        outcomes = await reward.score([Sample(text="a"), Sample(text="b")])
    assert [str(outcome) for outcome in outcomes] == ["repetition: error: it raised KeyError: 'verdict'"] * 2
    assert reward.counters.failed == {"error": 2}
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "there is nothing that gives a reward"),
        ({"rule": []}, "rule is not known; did you mean rules?"),
        ({"rules": ["format", "format"]}, "two sources are called 'format'"),
        ({"rules": ["format"], "retries": -1}, "retries"),
        ({"rules": [{"use": "format", "weight": float("nan")}]}, "weight"),
        ({"judge": {}, "judges": []}, "`judge` and `judges` are both given"),
        ({"judge": {"model": "m"}}, "address"),
    ],
)
def test_a_configuration_that_cannot_work_is_told(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as told:
        RewardConfig.of(config, source="run.yaml")
    assert str(told.value).startswith("run.yaml: ")
    assert words in str(told.value)


def test_a_file_is_read_with_its_functions_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(sample):\n    return 1.0\n")
    (tmp_path / "reward.yaml").write_text("rules: [format]\nfunctions: [mine.py:score]\non: step\n")
    config = RewardConfig.read(tmp_path / "reward.yaml")
    assert config.names == ["format", "score"]
    assert config.functions[0].use == f"{tmp_path / 'mine.py'}:score"
    assert config.on == "step"


async def test_a_worker_bounds_what_is_under_way_over_all_its_calls(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import asyncio\nnow = most = 0\nasync def score(sample):\n    global now, most\n    now += 1\n"
        "    most = max(now, most)\n    await asyncio.sleep(0.02)\n    now -= 1\n    return most\n"
    )
    worker = LocalRewardWorker(RewardConfig.of({"functions": ["slow.py:score"], "concurrency": 4}, tmp_path))
    try:
        await worker.ready()
        calls = await asyncio.gather(*(worker.score([Sample(text="a")] * 5) for _ in range(4)))
        found = [outcome.value for call in calls for outcome in call if isinstance(outcome, Score)]
        assert len(found) == 20
        assert 1 < max(found) <= 4
        assert worker.counters.scored == 20
    finally:
        await worker.aclose()


async def test_a_call_that_is_cancelled_frees_its_place(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "import time\ndef score(sample):\n    if sample.text == 'hang':\n        open(sample.metadata['file'], 'w')\n"
        "        time.sleep(3600)\n    return 1.0\n"
    )
    options = {"functions": [{"use": "odd.py:score", "workers": 1}], "concurrency": 1}
    worker = LocalRewardWorker(RewardConfig.of(options, tmp_path))
    try:
        begun = tmp_path / "begun"
        call = asyncio.create_task(worker.score([Sample(text="hang", metadata={"file": str(begun)})]))
        while not begun.exists():
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await worker.score([Sample(text="good")]) == [Score(1.0, {"score": 1.0})]
    finally:
        await worker.aclose()


def test_environments_rewards_bring_no_pool() -> None:
    import grimp

    graph = grimp.build_graph("headrace")
    assert not graph.find_shortest_chain("headrace.rewards", "headrace.pool", as_packages=False)
    assert not graph.find_shortest_chain("headrace.rewards.worker", "headrace.pool", as_packages=False)
