"""`jsonl_qa`: what is right, checks that would never end, and files that hold no questions."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.data.errors import InvalidInput
from headrace.envs.conversation import Questions
from headrace.envs.jsonl_qa import JsonlQaConfig, JsonlQaEnv
from headrace.envs.jsonl_qa.checker import Checker
from headrace.envs.jsonl_qa.compare import is_right
from headrace.envs.jsonl_qa.env import SAMPLE
from headrace.envs.testing import EnvConformance


class TestConformance(EnvConformance):
    env_cls = JsonlQaEnv

    def say(self, asked: str, chance: random.Random) -> str:
        return chance.choice(["So \\boxed{7/2}.", "\\boxed{42}", "\\boxed{", "I cannot tell."])


@pytest.mark.parametrize(
    ("said", "gold"),
    [
        ("\\boxed{0.5}", "1/2"),
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("It is 7: no, <b>7</b>.</think> The answer is 42.", "42"),
        ("\\boxed{(x-3)(x-2)}", "(x-2)(x-3)"),
        ("\\boxed{carbon  Dioxide}", "carbon dioxide"),
        ("Paris.", "Paris"),
    ],
)
def test_an_answer_is_right_however_it_is_written(said: str, gold: str) -> None:
    assert is_right(said, gold)


@pytest.mark.parametrize(
    ("said", "gold"),
    [
        ("", "42"),
        ("\\boxed{41}", "42"),
        ("\\boxed{41} \\boxed{42}", "42"),
        ("\\boxed{42}</think>\\boxed{41}", "42"),
        ("\\boxed{Siarp}", "Paris"),
    ],
)
def test_another_answer_or_several_are_wrong(said: str, gold: str) -> None:
    assert not is_right(said, gold)


def test_the_sample_is_right_by_its_own_answers() -> None:
    questions = Questions(JsonlQaConfig(), SAMPLE, answered=True)
    for item in questions.trained + questions.held_out:
        assert is_right(f"\\boxed{{{item['answer']}}}", item["answer"]), item


@pytest.fixture
def checker() -> Iterator[Checker]:
    found = Checker(processes=1, seconds=4)
    yield found
    found.close()


async def test_a_check_that_would_not_end_is_wrong_and_holds_nothing_up(checker: Checker) -> None:
    endless = checker.is_right("\\boxed{9^{9^{9^{9}}}}", "42")
    assert await asyncio.gather(endless, checker.is_right("\\boxed{42}", "42")) == [False, True]


async def test_a_check_that_is_given_up_does_not_answer_the_next_one(checker: Checker) -> None:
    assert await checker.is_right("\\boxed{42}", "42")
    given_up = asyncio.create_task(checker.is_right("\\boxed{1}", "1"))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait([given_up])
    assert not await checker.is_right("\\boxed{41}", "42")


async def test_ctrl_c_on_a_terminal_is_not_the_checkers(checker: Checker) -> None:
    assert await checker.is_right("\\boxed{42}", "42")
    (process,) = checker._idle
    assert os.getpgid(process.pid) != os.getpgrp()  # a terminal sends it to a whole group


async def test_an_answer_is_right_though_the_process_that_would_check_it_has_ended(checker: Checker) -> None:
    assert await checker.is_right("\\boxed{42}", "42")
    (process,) = checker._idle
    process.terminate()
    process.wait()
    assert await checker.is_right("\\boxed{42}", "42")


async def test_a_check_whose_process_is_ended_in_the_middle_of_it_is_made_again(checker: Checker) -> None:
    assert await checker.is_right("\\boxed{42}", "42")
    (process,) = checker._idle
    process.send_signal(signal.SIGSTOP)  # it does not answer before it is ended
    checking = asyncio.create_task(checker.is_right("\\boxed{42}", "42"))
    await asyncio.sleep(0)
    assert not checker._idle
    process.kill()
    assert await checking


@pytest.mark.parametrize(
    ("lines", "because"),
    [
        (["{"], "line 1 is no JSON"),
        (['{"question": "?", "answer": "1"}', "[]"], "line 2 has no text 'question'"),
        (['{"question": "?"}'], "line 1 has no text or number 'answer'"),
        (['{"question": "?", "answer": 1}'] * 8, "has 8 questions, and 8 are held out"),
    ],
)
def test_a_file_without_questions_is_refused_by_its_line(tmp_path: Path, lines: list[str], because: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(InvalidInput, match=because):
        Questions(JsonlQaConfig(path=str(path)), SAMPLE, answered=True)


def test_every_question_is_asked_once_before_any_again_and_those_held_out_never(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    rows: list[Any] = [{"q": f"question {n}", "a": n} for n in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = JsonlQaConfig(path=str(path), question_key="q", answer_key="a", eval_items=2)
    asked = iter(Questions(config, SAMPLE, answered=True))
    rounds = [sorted(int(next(asked)["answer"]) for _ in range(10)) for _ in range(2)]
    assert rounds == [list(range(10))] * 2
