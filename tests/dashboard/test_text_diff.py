"""What stands in one text and not in another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.dashboard.text_diff import MAX_CHANGED, MAX_SAME, Piece, text_diff

WORDS = st.lists(st.sampled_from(["a", "b", "cat", "dog", " ", "\n", "."]), max_size=30).map("".join)


def side(pieces: list[Piece], kind: str) -> str:
    return "".join(text for one, text in pieces if one in ("same", kind))


@given(WORDS, WORDS)
def test_the_pieces_are_both_texts(before: str, after: str) -> None:
    pieces = text_diff(before, after)
    if before == after:
        assert pieces == []
    else:
        assert (side(pieces, "removed"), side(pieces, "added")) == (before, after)


def test_a_word_is_told_from_those_around_it() -> None:
    assert text_diff("the old answer stays", "the new answer stays") == [
        ("same", "the "),
        ("removed", "old"),
        ("added", "new"),
        ("same", " answer stays"),
    ]


def test_texts_that_share_but_their_spaces_are_one_change() -> None:
    assert text_diff("let me see", "what do they want") == [("removed", "let me see"), ("added", "what do they want")]


def test_a_text_that_was_cut_and_one_that_went_on() -> None:
    assert text_diff("one two", "one") == [("same", "one"), ("removed", " two")]
    assert text_diff("", "one") == [("added", "one")]


def test_what_stays_is_shortened_around_a_change() -> None:
    before = "x " * 1000 + "old" + " y" * 1000
    pieces = text_diff(before, before.replace("old", "new"))
    assert [kind for kind, _ in pieces] == ["same", "removed", "added", "same"]
    assert pieces[0][1].startswith("…")
    assert pieces[3][1].endswith("…")
    assert max(len(text) for _, text in pieces) <= 2 * MAX_SAME + 1


def test_texts_that_have_nothing_in_common_are_bounded_in_time_and_length() -> None:
    pieces = text_diff("a b " * 200_000, "c d " * 200_000)
    assert [kind for kind, _ in pieces] == ["removed", "added"]
    assert all(len(text) < MAX_CHANGED + 100 for _, text in pieces)


def test_one_line_more_among_thousands_is_found() -> None:
    lines = [f"line {number}\n" for number in range(5_000)]
    pieces = text_diff("".join(lines), "".join([*lines[:2_500], "another\n", *lines[2_500:]]))
    assert "".join(text for kind, text in pieces if kind == "removed") == ""
    assert "".join(text for kind, text in pieces if kind == "added").strip().startswith("another")
