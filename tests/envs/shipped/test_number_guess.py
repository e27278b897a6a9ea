"""`number_guess`: how it scores, and that it is an environment like any other."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from headrace.envs import APIServerConfig
from headrace.envs.number_guess import NumberGuessConfig, NumberGuessEnv
from headrace.envs.number_guess.env import guess_of
from headrace.envs.server import ChatCompletion
from headrace.envs.testing import EnvConformance


class TestConformance(EnvConformance):
    env_cls = NumberGuessEnv

    def say(self, asked: str, chance: random.Random) -> str:
        return chance.choice([f"Maybe {chance.randint(1, 100)}?", "I give up."])


class Player:
    """Says what `guess` makes of the range that is left."""

    def __init__(self, guess: Any) -> None:
        self.guess = guess

    async def chat_completion(self, *, messages: list[dict[str, Any]], **asked: Any) -> ChatCompletion:
        low, high = 1, 100
        for said, heard in zip(messages[1::2], messages[2::2], strict=True):
            (number,) = re.findall(r"\d+", said["content"])
            low, high = (int(number) + 1, high) if heard["content"] == "higher" else (low, int(number) - 1)
        said = self.guess(low, high)
        return ChatCompletion.model_validate({"choices": [{"message": {"content": said}}]})


@pytest.fixture
def env() -> NumberGuessEnv:
    return NumberGuessEnv(NumberGuessConfig(), [APIServerConfig(base_url="http://127.0.0.1:9/v1")])


async def test_binary_search_always_finds_it_and_sooner_is_worth_more(env: NumberGuessEnv) -> None:
    searching = Player(lambda low, high: f"Is it {(low + high) // 2}?")
    played = [await env.play(searching, env.game(hidden)) for hidden in range(1, 101)]
    guesses = [len(messages) // 2 for messages, _ in played]
    assert sorted(set(guesses)) == [1, 2, 3, 4, 5, 6, 7]
    assert [score for _, score in played] == [pytest.approx(1 - (count - 1) / 14) for count in guesses]


async def test_guessing_upwards_mostly_fails(env: NumberGuessEnv) -> None:
    counting = Player(lambda low, high: str(low))
    scores = [(await env.play(counting, env.game(hidden)))[1] for hidden in (7, 8)]
    assert scores == [pytest.approx(4 / 7), 0.0]


def test_naming_every_number_is_one_guess() -> None:
    assert guess_of(" ".join(map(str, range(1, 101)))) == 100


def test_an_answer_without_a_number_uses_up_a_guess(env: NumberGuessEnv) -> None:
    assert env.hint("no idea", 50) == "Say a number from 1 to 100."
    assert env.hint("not 12, but 1" + "0" * 5000, 50) == "higher"
