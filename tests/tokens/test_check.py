"""What must hold of a step before it may be trained on, and of a server before it is used."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.tokens.kit import STOPS, Talk
from tests.tokens.models import MODELS, NAMES, SENTENCEPIECE, renderer, vocabulary

from headrace.tokens import (
    SAMPLE,
    Quarantine,
    check_step,
    log_prob_mode,
    same_text,
    tokenization_trouble,
    vocabulary_trouble,
)

VOCAB = "qwen2.5"


def step(**changed: Any) -> Quarantine | None:
    vocab = vocabulary(VOCAB)
    response = np.asarray(vocab.encode("so it is<|im_end|>"), np.int32)
    given: dict[str, Any] = {
        "prompt": np.asarray([1, 2, 3], np.int32),
        "response": response,
        "log_probs": [-0.5] * len(response),
        "text": "so it is",
        "stop_ids": renderer(VOCAB).stop_ids,
    }
    return check_step(vocab, **{**given, **changed})


def test_a_good_step_passes() -> None:
    assert step() is None
    assert step(text=None, consumed=np.asarray([1, 2, 3], np.int32)) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"response": np.asarray([], np.int32), "log_probs": []}, Quarantine.NO_TOKENS),
        ({"prompt": np.asarray([], np.int32)}, Quarantine.NO_TOKENS),
        ({"log_probs": [-0.5]}, Quarantine.LOG_PROB_COUNT),
        ({"log_probs": None}, Quarantine.LOG_PROB_COUNT),
        ({"log_probs": [-0.5, -1.0, math.nan, -2.0]}, Quarantine.LOG_PROB_VALUE),
        ({"log_probs": [-0.5, -1.0, -math.inf, -2.0]}, Quarantine.LOG_PROB_VALUE),
        ({"log_probs": [-0.5, 0.7, -1.0, -2.0]}, Quarantine.LOG_PROB_VALUE),
        ({"response": np.asarray([5, 200_000, 6, 7], np.int32)}, Quarantine.UNKNOWN_TOKEN),
        ({"response": np.asarray([5, -1, 6, 7], np.int32)}, Quarantine.UNKNOWN_TOKEN),
        ({"consumed": np.asarray([1, 2], np.int32)}, Quarantine.PROMPT_CHANGED),
        ({"text": "so it was"}, Quarantine.TEXT_DIFFERS),
        ({"text": "so it"}, Quarantine.TEXT_DIFFERS),
        ({"text": "so it is now"}, Quarantine.TEXT_DIFFERS),
    ],
)
def test_a_bad_step_is_quarantined_with_its_reason(changed: dict[str, Any], reason: Quarantine) -> None:
    assert step(**changed) is reason


def test_a_prompt_that_does_not_begin_with_its_parent_is_quarantined() -> None:
    talk = Talk(renderer(VOCAB))
    _, node = talk.say([{"role": "user", "content": "one"}], "so", STOPS[VOCAB])
    whole = node.whole()
    longer = np.concatenate([whole, [7]]).astype(np.int32)
    assert step(prompt=longer, parent=node) is None
    broken = longer.copy()
    broken[3] += 1
    for prompt in (broken, whole, whole[:-1]):
        assert step(prompt=prompt, parent=node) is Quarantine.PARENT_NOT_EXTENDED


@pytest.mark.parametrize("name", MODELS)
def test_a_servers_text_may_end_where_the_server_cuts_it(name: str) -> None:
    vocab, stops = vocabulary(name), renderer(name).stop_ids
    ids = vocab.encode("one STOP two")
    assert same_text(vocab, ids, "one ", ["STOP"])
    assert same_text(vocab, ids, "one STOP", ["STOP"])
    assert not same_text(vocab, ids, "one ", ["HALT"])
    assert not same_text(vocab, ids, "on", ["STOP"])
    end = vocab.id_of(STOPS[name])
    assert same_text(vocab, [*ids, end], "one STOP two", stop_ids=stops)  # type: ignore[list-item]
    half = vocab.encode("one\U0001fae0")[:-1]
    assert vocab.decode(half).endswith("\ufffd")
    assert same_text(vocab, half, vocab.decode(half).rstrip("\ufffd"))


def test_the_sample_text_tells_tokenizers_apart() -> None:
    for ours in NAMES:
        for theirs in NAMES:
            ids = vocabulary(theirs).encode(SAMPLE)
            assert (tokenization_trouble(vocabulary(ours), ids) is None) == (ours == theirs), (ours, theirs)
    for name in SENTENCEPIECE:
        ids = vocabulary(name).hf.encode(SAMPLE, add_special_tokens=False)
        assert tokenization_trouble(vocabulary(name), ids) is None
        assert tokenization_trouble(vocabulary(name), [1, *ids]) is None
        assert tokenization_trouble(vocabulary(name), vocabulary(name).encode_after(SAMPLE)) is not None
    assert tokenization_trouble(vocabulary("llama3.2"), [128000, *vocabulary("llama3.2").encode(SAMPLE)]) is None
    assert "--tokenizer-path" in (tokenization_trouble(vocabulary("llama3.2"), []) or "")


def test_a_servers_vocabulary_may_be_padded_and_not_smaller() -> None:
    vocab = vocabulary("qwen3")
    assert vocabulary_trouble(vocab, vocab.size + 267) is None
    assert vocabulary_trouble(vocab, None) is None
    assert "has 1000 tokens" in (vocabulary_trouble(vocab, 1000) or "")


def log_softmax(logits: list[float]) -> dict[int, float]:
    total = math.log(sum(map(math.exp, logits)))
    return {i: value - total for i, value in enumerate(logits)}


def test_log_probs_tell_how_they_were_taken() -> None:
    logits = [1.0, 0.2, -0.7, -2.0]
    at_one, at_half = log_softmax(logits), log_softmax([2 * value for value in logits])
    assert log_prob_mode(at_one, at_half, 0.5) == "processed"
    assert log_prob_mode(at_one, at_one, 0.5) == "raw"
    assert log_prob_mode(at_one, log_softmax([1.5 * value for value in logits]), 0.5) == "unknown"
    assert log_prob_mode({1: -0.5, 2: -0.5}, {1: -0.5, 2: -0.5}, 0.5) == "unknown"
    assert log_prob_mode({1: -0.5}, {1: -0.5}, 0.5) == "unknown"
