"""Text from outside, such as an agent's, as it may be printed: without power over the terminal of who reads it."""

from __future__ import annotations

import logging
import re

#: Characters that are obeyed and not shown: controls (C0 but for tab and newline, DEL, C1), ends of lines beside
#: newline, what has no width, and what turns the text after it around.
INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def visible(text: str, *, lines: bool = False) -> str:
    """The text with each character that a terminal would obey shown as `<U+001B>`, and a tab or newline as a space.
    `lines`: tabs and newlines stay, for text of several lines."""
    shown = INVISIBLE.sub(lambda found: f"<U+{ord(found[0]):04X}>", text)
    return shown if lines else shown.replace("\t", " ").replace("\n", " ")


class VisibleFormatter(logging.Formatter):
    """Formats a log's records: those with an exception in several lines, and all of them visible."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), lines=True)


def log_to_stderr(words: str = "%(levelname)s %(name)s: %(message)s") -> None:
    """Sets the log of this process: from INFO on, on stderr, in these words."""
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter(words))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
