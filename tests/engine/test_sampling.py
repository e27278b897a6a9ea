"""Tokens are drawn as asked: by seed, temperature, cuts, penalties and bias; log-probs are raw or processed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.kit import Client, Reference, gap, serving

from headrace.engine.sampler import LOWEST_LOGPROB, Sampler, uniform
from headrace.engine.sequence import EngineSequence, SamplingParams

PROMPT = [1, 50, 60, 70]


class NoText:
    """Text of sequences that nobody reads."""

    value = ""

    def take(self, output: list[int]) -> None:
        pass


def draw(
    logits: list[float], *, seed: int = 0, output: tuple[int, ...] = (), processed: bool = True, **asked: object
) -> tuple[int, float]:
    """The token and the log-prob for one row of logits."""
    sampling = SamplingParams(max_tokens=99, **asked)  # type: ignore[arg-type]
    sequence = EngineSequence("r", 0, [0], sampling, seed=seed, eos=frozenset([1]), text=NoText())  # type: ignore[arg-type]
    sequence.output = list(output)
    found = Sampler(processed=processed)(torch.tensor([logits]), [sequence])
    return found.tokens[0], found.logprobs[0]


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(engine: Client) -> None:
    first, again, other = (engine.complete(PROMPT, max_tokens=12, seed=seed) for seed in (5, 5, 6))
    assert first["token_ids"] == again["token_ids"]
    assert first["token_ids"] != other["token_ids"]


def test_choices_of_one_request_differ_and_are_reproducible(engine: Client) -> None:
    asked = {"prompt": PROMPT, "n": 4, "seed": 3, "max_tokens": 8, "return_token_ids": True, "ignore_eos": True}
    first, again = (engine.post("/v1/completions", asked)["choices"] for _ in range(2))
    ids = [tuple(choice["token_ids"]) for choice in first]
    assert ids == [tuple(choice["token_ids"]) for choice in again]
    assert len(set(ids)) == 4
    assert [choice["index"] for choice in first] == [0, 1, 2, 3]


def test_an_engine_with_the_same_seed_answers_unseeded_requests_alike(folder: Path) -> None:
    answers = []
    for _ in range(2):
        with serving(model=str(folder), seed=11) as client:
            answers.append([client.complete(PROMPT, max_tokens=6)["token_ids"] for _ in range(3)])
    assert answers[0] == answers[1]
    assert len({tuple(ids) for ids in answers[0]}) > 1


def test_tokens_come_as_often_as_their_probability_says() -> None:
    logits = [0.0, 1.0, 2.0, -1.0]
    counts = Counter(draw(logits, seed=seed)[0] for seed in range(4000))
    for token, chance in enumerate(torch.tensor(logits).softmax(-1).tolist()):
        assert abs(counts[token] / 4000 - chance) < 4 * math.sqrt(chance * (1 - chance) / 4000)


def test_random_numbers_of_neighbouring_seeds_and_places_are_unrelated() -> None:
    seeds, places = np.meshgrid(np.arange(100), np.arange(100))
    found = uniform(seeds.ravel().tolist(), places.ravel().tolist()).reshape(100, 100)
    assert abs(found.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(found[:-1].ravel(), found[1:].ravel())[0, 1]) < 0.04
    assert abs(np.corrcoef(found[:, :-1].ravel(), found[:, 1:].ravel())[0, 1]) < 0.04
    assert len(np.unique(found)) == 10_000


@given(seed=st.integers(-(2**63), 2**63 - 1), place=st.integers(0, 2**31))
def test_a_random_number_lies_in_the_unit_interval(seed: int, place: int) -> None:
    assert 0.0 <= uniform([seed], [place])[0] < 1.0


@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=4, max_size=12),
    seed=st.integers(0, 1000),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 1.0),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
)
def test_what_is_cut_off_is_never_drawn(
    logits: list[float], seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    token, logprob = draw(logits, seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    chances = (torch.tensor(logits) / (temperature or 1.0)).softmax(-1).double()
    assert LOWEST_LOGPROB < logprob <= 1e-6
    assert chances[token] >= min_p * chances.max() * (1 - 1e-5)
    if top_k:
        assert (chances > chances[token]).sum() < top_k
    if temperature == 0.0:
        assert logits[token] == max(logits)


def test_top_p_keeps_the_fewest_tokens_that_hold_the_mass() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    seen = {draw(logits, seed=seed, top_p=0.7)[0] for seed in range(200)}
    assert seen == {0, 1}
    token, logprob = draw(logits, seed=1, top_p=0.7)
    assert logprob == pytest.approx(math.log([0.5, 0.3][token] / 0.8), abs=1e-5)


def test_raw_log_probs_know_nothing_of_what_was_applied() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().tolist()
    token, logprob = draw(logits, seed=4, top_k=2, temperature=0.5, logit_bias={0: -3.0}, processed=False)
    assert logprob == pytest.approx(logits[token], abs=1e-6)


def test_penalties_weigh_what_was_said() -> None:
    logits = [1.0, 0.0, 2.0, -1.0]
    said = (2, 2, 3)
    token, logprob = draw(logits, output=said, temperature=0.0, frequency_penalty=1.0, presence_penalty=0.5)
    table = torch.tensor([1.0, 0.0, 2.0 - 2 * 1.0 - 0.5, -1.0 - 1.0 - 0.5]).log_softmax(-1)
    assert (token, logprob) == (0, pytest.approx(table[0].item(), abs=1e-6))
    # Repetition counts the prompt, here token 0, and pushes both signs down.
    token, logprob = draw(logits, output=said, temperature=0.0, repetition_penalty=4.0)
    table = torch.tensor([0.25, 0.0, 0.5, -4.0]).log_softmax(-1)
    assert (token, logprob) == (2, pytest.approx(table[2].item(), abs=1e-6))


def test_bias_and_allowed_tokens_decide() -> None:
    assert draw([0.0] * 5, logit_bias={3: 100.0})[0] == 3
    assert {draw([9.0, 0.0, 0.0, 0.0], seed=seed, allowed_token_ids=(1, 3))[0] for seed in range(50)} == {1, 3}


def test_an_answer_does_not_end_before_its_least_length(engine: Client) -> None:
    asked = {"logit_bias": {"2": 100.0}, "max_tokens": 9}
    assert len(engine.complete(PROMPT, **asked)["token_ids"]) == 1
    found = engine.complete(PROMPT, min_tokens=5, **asked)
    assert len(found["token_ids"]) == 6
    assert 2 not in found["token_ids"][:5]
    assert engine.complete(PROMPT, ignore_eos=True, **asked)["token_ids"] == [2] * 9


@pytest.fixture(scope="module")
def processed(folder: Path) -> Iterator[Client]:
    with serving(model=str(folder), logprobs_mode="processed_logprobs") as client:
        yield client


def test_processed_log_probs_are_those_of_the_temperature(processed: Client, reference: Reference) -> None:
    found = processed.complete(PROMPT, max_tokens=12, seed=2, temperature=0.7, ignore_eos=True)
    expected = reference.logprobs(PROMPT, found["token_ids"], temperature=0.7)
    assert gap(found["logprobs"]["token_logprobs"], expected) < 1e-4


def test_raw_log_probs_are_those_of_temperature_one(engine: Client, reference: Reference) -> None:
    found = engine.complete(PROMPT, max_tokens=12, seed=2, temperature=0.7, ignore_eos=True)
    expected = reference.logprobs(PROMPT, found["token_ids"])
    assert gap(found["logprobs"]["token_logprobs"], expected) < 1e-4


def test_a_checkpoints_own_defaults_are_taken_where_a_request_has_none(folder: Path, tmp_path: Path) -> None:
    import json
    import shutil

    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temperature": 0.0}))
    with serving(model=str(tmp_path / "model")) as client:
        answers = [client.complete(PROMPT, max_tokens=5, seed=seed)["token_ids"] for seed in (1, 2)]
        assert answers[0] == answers[1]
        assert client.complete(PROMPT, max_tokens=5, seed=1, temperature=1.5)["token_ids"] != answers[0]
