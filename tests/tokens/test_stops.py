"""Stop strings: where they end a text, whatever pieces it comes in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tokens.models import vocabulary

from headrace.tokens import Detokenizer, Quarantine, check_step
from headrace.tokens.stops import StopCut, StoppedText

STOPS = ["STOP", "ab"]
PIECES = st.lists(st.sampled_from(["a", "b", "ST", "OP", "S", "T"]), max_size=12)


def cut_at_first(text: str, since: int = 0) -> str:
    """A text up to the first stop string that ends behind its first `since` characters."""
    ends = [text.find(stop, max(0, since - len(stop) + 1)) for stop in STOPS]
    return text[: min([at for at in ends if at >= 0], default=len(text))]


@given(PIECES)
def test_a_stop_string_ends_the_text_wherever_it_is_cut(pieces: list[str]) -> None:
    cut = StopCut(STOPS)
    assert "".join(map(cut.feed, pieces)) + cut.finish() == cut_at_first("".join(pieces))


@given(PIECES, PIECES)
def test_what_is_passed_over_ends_nothing(before: list[str], behind: list[str]) -> None:
    cut = StopCut(STOPS)
    got = "".join([*map(cut.pass_over, before), *map(cut.feed, behind)]) + cut.finish()
    assert got == cut_at_first("".join(before + behind), len("".join(before)))


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_no_stop_string_ends_an_answer_before_its_least_tokens(size: int) -> None:
    vocab = vocabulary("qwen3")
    ids = [vocab.encode(piece)[0] for piece in ("a", ".", "b", ".", "c", ".", "d")]
    text = StoppedText(Detokenizer(vocab), ["."], min_tokens=4)
    pieces = [text.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(pieces) + text.finish() == "a.b.c"


@pytest.mark.parametrize(
    ("answer", "min_tokens", "trouble"),
    [
        ("so</answer>", 0, None),
        ("so</answer> and more", 0, Quarantine.PAST_STOP),
        ("so</answer> and more", 100, None),
        ("so it goes on", 0, None),
    ],
)
def test_only_an_answer_of_several_requests_is_looked_at_for_what_they_overlooked(
    answer: str, min_tokens: int, trouble: Quarantine | None
) -> None:
    vocab = vocabulary("qwen3")
    prompt, response = np.asarray([1], np.int32), np.asarray(vocab.encode(answer), np.int32)
    for continued in (True, False):
        found = check_step(
            vocab,
            prompt=prompt,
            response=response,
            log_probs=[-1.0] * len(response),
            continued=continued,
            stop=["</answer>"],
            min_tokens=min_tokens,
        )
        assert found == (trouble if continued else None)
