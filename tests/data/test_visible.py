"""Text from outside is printed and logged without power over a terminal."""

from __future__ import annotations

import logging

import pytest

from headrace.data.visible import log_to_stderr, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a plain word, señor 你好 🙂", "a plain word, señor 你好 🙂"),
        ("\x1b]0;title\x07\x1b[2J", "<U+001B>]0;title<U+0007><U+001B>[2J"),
        ("\x9b2J\x7f\x00", "<U+009B>2J<U+007F><U+0000>"),
        ("a\rb\x0bc\x85d\u2028e", "a<U+000D>b<U+000B>c<U+0085>d<U+2028>e"),
        ("\u202eabc\u2066\u200b", "<U+202E>abc<U+2066><U+200B>"),
        ("one\ttwo\nthree", "one two three"),
    ],
)
def test_what_a_terminal_would_obey_is_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_text_of_several_lines_keeps_them() -> None:
    assert visible("one\n\ttwo\r\n", lines=True) == "one\n\ttwo<U+000D>\n"


def test_log_lines_are_visible_with_their_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    log_to_stderr()
    try:
        raise ValueError("\x1b[31mred")
    except ValueError:
        logging.getLogger("agents").exception("trajectory %s", "t\x1b[2J")
    said = capfd.readouterr().err
    assert said.startswith("ERROR agents: trajectory t<U+001B>[2J\nTraceback (most recent call last):\n")
    assert said.endswith("\nValueError: <U+001B>[31mred\n")
