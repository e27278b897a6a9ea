"""Functions of users: whatever they do, it stays with the samples that it happened to."""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.data.errors import InvalidInput
from headrace.rewards import Reward, RewardConfig, RewardFailure, Sample, Score

#: Seconds after which a call that hangs is ended, where one does; the others take milliseconds once they have begun.
LIMIT_S = 4.0

FUNCTIONS = """
import asyncio, math, os, time
import numpy
from headrace.rewards import RewardFailure

def one(sample):
    said = sample.text
    if said == "hang":
        time.sleep(3600)
    if said == "exit":
        os._exit(3)
    if said == "raise":
        raise KeyError("no such thing")
    if said == "print":
        print("a line that is no answer")
        return 0.25
    return {"none": None, "nan": math.nan, "inf": math.inf, "text": "0.5", "list": [1.0], "true": True,
            "numpy": numpy.float32(0.5), "parts": {"score": 0.5, "style": 1, "note": "fine"},
            "wrong": {"points": 1}}.get(said, 1.0)

async def waiting(sample):
    if sample.text == "hang":
        await asyncio.sleep(3600)
    if sample.text == "block":
        time.sleep(3600)
    if sample.text == "exit":
        await asyncio.sleep(0.2)
        os._exit(3)
    await asyncio.sleep(0.5)
    return 1.0

def batch(samples):
    if any(sample.text == "raise" for sample in samples):
        raise ValueError("one of them is bad")
    if any(sample.text == "short" for sample in samples):
        return [1.0]
    return [None if sample.text == "none" else float(len(samples)) for sample in samples]

def once(sample):
    with open(sample.metadata["file"], "a") as file:
        file.write("x")
    return 1.0 if os.path.getsize(sample.metadata["file"]) > 2 else None

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth and data_source == "sums" and extra_info == {"index": 7})

def unsendable(sample):
    if sample.text == "refuse":
        raise RewardFailure("it said \\ud83d", "bad_answer")
    return {"score": 1.0, "seen": {"number": {"ids": [2**70]}, "half": "\\ud83d"}.get(sample.text, "fine")}

async def unsendable_soon(sample):
    return unsendable(sample)

def unsendable_batch(samples):
    return [unsendable(sample) for sample in samples]

def started(sample):
    import subprocess
    child = subprocess.Popen(["sleep", "3600"])
    told = sample.metadata["file"]
    with open(told + ".part", "w") as file:
        file.write(str(child.pid))
    os.replace(told + ".part", told)
    time.sleep(3600)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return path


@asynccontextmanager
async def reward(file: Path, function: str, **options: Any) -> AsyncIterator[Reward]:
    common = {name: options.pop(name) for name in ("retries",) if name in options}
    config = {"functions": [{"use": f"{file.name}:{function}", **options}], "retries": 0}
    async with Reward(RewardConfig.of(config | common, file.parent)) as made:
        yield made


def samples(*texts: str) -> list[Sample]:
    return [Sample(text=text) for text in texts]


def values(outcomes: Sequence[Score | RewardFailure]) -> list[float | str]:
    return [one.value if isinstance(one, Score) else one.reason for one in outcomes]


async def test_what_a_function_returns_is_a_score_or_a_failure_of_that_sample(file: Path) -> None:
    said = ("good", "none", "nan", "inf", "text", "list", "wrong", "raise", "true", "numpy", "print", "good")
    async with reward(file, "one") as made:
        outcomes = await made.score(samples(*said))
    wanted = [1.0, "none", "not_a_number", "not_a_number", "wrong_type", "wrong_type", "wrong_type", "error", 1.0, 0.5]
    assert values(outcomes) == [*wanted, 0.25, 1.0]
    assert made.counters.scored == 5
    assert made.counters.failed == {"none": 1, "not_a_number": 2, "wrong_type": 3, "error": 1}
    raised = outcomes[7]
    assert isinstance(raised, RewardFailure)
    assert raised.source == "one"
    assert "KeyError" in raised.detail
    assert "reward.py, line" in raised.detail


async def test_a_mappings_numbers_are_parts_and_the_rest_is_info(file: Path) -> None:
    async with reward(file, "one", weight=2.0) as made:
        (outcome,) = await made.score(samples("parts"))
    assert outcome == Score(1.0, {"one": 0.5, "one.style": 1.0}, {"one.note": "fine"})
    assert outcome.extra_info == {"one": 0.5, "one.style": 1.0, "one.note": "fine"}


@pytest.mark.parametrize("function", ["one", "waiting"])
async def test_a_call_that_hangs_is_ended_and_costs_no_other(file: Path, function: str) -> None:
    for limit_s in (LIMIT_S, 15 * LIMIT_S):  # a busy machine may take longer than the first for those that do not hang
        async with reward(file, function, workers=1, timeout_s=limit_s) as made:
            found = values(await made.score(samples("good", "hang", "good")))
            found += values(await made.score(samples("good")))
        if found.count("timeout") == 1:
            break
    assert found == [1.0, "timeout", 1.0, 1.0]


@pytest.mark.parametrize("function", ["waiting", pytest.param("one", marks=pytest.mark.long)])
async def test_a_call_that_ends_its_process_fails_alone(file: Path, function: str) -> None:
    async with reward(file, function) as made:
        outcomes = await made.score(samples("good", "exit", "good"))
    assert values(outcomes) == [1.0, "error", 1.0]
    assert "ended with code 3" in str(outcomes[1])


async def test_a_coroutine_that_blocks_its_loop_is_ended_with_its_process(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.rewards.functions.CANCEL_S", 0.2)
    async with reward(file, "waiting", timeout_s=LIMIT_S) as made:
        (outcome,) = await made.score(samples("block"))
        assert isinstance(outcome, RewardFailure)
        assert outcome.reason == "timeout"
        assert values(await made.score(samples("good"))) == [1.0]


async def test_the_one_other_call_in_a_process_that_a_blocking_coroutine_ended_with_it_is_called_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.rewards.functions.CANCEL_S", 0.0)
    async with reward(file, "waiting") as made:
        await made.ready()
        (source,) = made._sources
        (process,) = source._all
        blocking = asyncio.create_task(made.score(samples("block")))
        while len(process._waiting) < 1:
            await asyncio.sleep(0)
        other = asyncio.create_task(made.score(samples("good")))
        while len(process._waiting) < 2:
            await asyncio.sleep(0)
        blocking.cancel()  # as its time limit would, which depends on the machine
        assert values(await other) == [1.0]


#: A sample of which two are more than a pipe and its writer hold: while nobody reads, the second is not written.
LONG = Sample(text="good", metadata={"page": "x" * (1 << 20)})


async def test_a_time_limit_holds_for_calls_that_a_blocking_coroutine_leaves_unread(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.rewards.functions.CANCEL_S", 0.2)
    async with reward(file, "waiting", timeout_s=LIMIT_S) as made:
        blocked, *others = values(await made.score([*samples("block"), LONG, LONG, LONG]))
        assert blocked == "timeout"
        assert set(others) <= {"timeout", 1.0}  # by which of them came to its limit before the process was ended
        assert values(await made.score(samples("good"))) == [1.0]


async def test_calls_that_a_blocking_coroutine_leaves_unread_are_made_again_once_it_is_cancelled(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.rewards.functions.CANCEL_S", 0.0)
    async with reward(file, "waiting") as made:
        await made.ready()
        (source,) = made._sources
        (process,) = source._all
        blocking = asyncio.create_task(made.score(samples("block")))
        while len(process._waiting) < 1:
            await asyncio.sleep(0)
        others = asyncio.create_task(made.score([LONG, LONG]))
        while len(process._waiting) < 3:
            await asyncio.sleep(0)
        blocking.cancel()
        assert values(await others) == [1.0, 1.0]


async def test_a_row_that_has_no_form_on_the_wire_is_a_failure_of_that_sample(file: Path) -> None:
    async with reward(file, "one") as made:
        outcomes = await made.score([Sample(text="good", metadata={"ids": [2**70]}), *samples("good")])
    assert values(outcomes) == ["error", 1.0]
    assert "it raised OverflowError" in str(outcomes[0])


async def test_coroutines_run_side_by_side_in_one_process(file: Path) -> None:
    async with reward(file, "waiting") as made:
        await made.ready()
        (source,) = made._sources
        assert values(await made.score(samples(*["good"] * 40))) == [1.0] * 40
        assert len(source._all) == 1


@pytest.mark.parametrize("function", ["unsendable", "unsendable_soon", "unsendable_batch"])
async def test_what_has_no_form_on_the_wire_is_a_failure_of_that_sample_and_not_tried_again(
    file: Path, function: str
) -> None:
    async with reward(file, function, batch=function == "unsendable_batch", retries=2) as made:
        await made.ready()
        (source,) = made._sources
        (process,) = source._all
        outcomes = await made.score(samples("good", "number", "half", "good"))
        assert process.alive
    assert values(outcomes) == [1.0, "wrong_type", "wrong_type", 1.0]
    assert "it returned 'seen', which cannot be sent: OverflowError: \"can't serialize ints" in str(outcomes[1])
    assert "it returned 'seen', which cannot be sent: UnicodeEncodeError" in str(outcomes[2])
    assert made.counters.retried == 0


async def test_a_failure_whose_words_have_no_form_on_the_wire_is_that_failure(file: Path) -> None:
    async with reward(file, "unsendable") as made:
        outcomes = await made.score(samples("refuse", "good"))
    assert values(outcomes) == ["bad_answer", 1.0]
    assert r"it said \ud83d" in str(outcomes[0])


async def test_a_batch_that_fails_is_scored_one_by_one(file: Path) -> None:
    async with reward(file, "batch", batch=True, batch_size=3, retries=1) as made:
        outcomes = await made.score(samples("a", "b", "c", "a", "raise", "c", "a", "none", "short"))
    assert values(outcomes) == [3.0, 3.0, 3.0, 1.0, "error", 1.0, 1.0, "none", 1.0]


async def test_a_failure_is_tried_again_and_counted(file: Path, tmp_path: Path) -> None:
    async with reward(file, "once", retries=2) as made:
        outcomes = await made.score([Sample(metadata={"file": str(tmp_path / "tries")})])
    assert values(outcomes) == [1.0]
    assert made.counters.retried == 2
    assert made.counters.failed == {}


async def test_verls_functions_are_called_as_verl_does(file: Path) -> None:
    row = {"data_source": "sums", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 7}}
    async with reward(file, "compute_score") as made:
        outcomes = await made.score([Sample.of_row(row, text="4"), Sample.of_row(row, text="5")])
    assert values(outcomes) == [1.0, 0.0]


async def test_what_a_function_started_ends_with_it(file: Path, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    async with reward(file, "started", timeout_s=3600) as made:
        call = asyncio.create_task(made.score([Sample(metadata={"file": str(told)})]))
        while not told.exists():
            assert not call.done(), values(await call)
            await asyncio.sleep(0.01)
        child = psutil.Process(int(told.read_text()))
        call.cancel()  # as its time limit would, which depends on the machine
        with pytest.raises(asyncio.CancelledError):
            await call
        assert psutil.wait_procs([child], timeout=240)[1] == []


async def test_closing_leaves_no_process(file: Path) -> None:
    before = {child.pid for child in psutil.Process(os.getpid()).children()}
    async with reward(file, "one", workers=2) as made:
        await made.score(samples("good", "good", "good"))
        assert {child.pid for child in psutil.Process(os.getpid()).children()} - before
    assert {child.pid for child in psutil.Process(os.getpid()).children()} <= before


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ("reward.py:won", "has no function 'won'; did you mean one?"),
        ("rewards.py:one", "there is no file"),
        ("one", "FILE.py:FUNCTION"),
        ("reward.py:not-a-name", "FILE.py:FUNCTION"),
    ],
)
def test_a_function_that_is_not_there_is_named(file: Path, use: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words.replace("?", "\\?")):
        RewardConfig.of({"functions": [use]}, file.parent)


async def test_a_file_that_cannot_be_imported_is_told_at_the_start_and_fails_its_samples(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module\n\ndef score(sample):\n    return 1.0\n")
    async with Reward(RewardConfig.of({"functions": ["broken.py:score"]}, tmp_path)) as made:
        with pytest.raises(InvalidInput, match=r"no_such_module.*broken\.py, line 1"):
            await made.ready()
        assert values(await made.score(samples("a", "b"))) == ["unavailable", "unavailable"]
