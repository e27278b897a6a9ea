"""What a run says of itself, for its page: what it was, what it came to, and where its files are.

A run writes it into its folder when it ends. It is data and no markup: the page shows it with elements of its own.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.files import write_whole

#: Its file, in a run's folder.
ABOUT_FILE = "about.json"

Cell = str | int | float | None


class AboutTable(msgspec.Struct, frozen=True):
    """A table. With `bars`, the last number of each row is drawn beside it as well."""

    columns: list[str]
    rows: list[list[Cell]]
    bars: bool = False


class AboutToken(msgspec.Struct, frozen=True):
    """A token of a call; one that was sampled has the log-prob that was recorded for it."""

    id: int
    text: str
    log_prob: float | None = None


class AboutCall(msgspec.Struct, frozen=True):
    """One call, token by token, and what came of it."""

    tokens: list[AboutToken]
    note: str = ""


class AboutSection(msgspec.Struct, frozen=True):
    """A part of it: texts, tables, calls, and a text that is shown as it is, such as a configuration file."""

    title: str
    text: list[str] = []
    tables: list[AboutTable] = []
    calls: list[AboutCall] = []
    code: str | None = None


class About(msgspec.Struct, frozen=True):
    """All of it. `outcome` is the one sentence that stands first."""

    title: str
    outcome: str
    sections: list[AboutSection] = []


def write_about(run: Path, about: About) -> Path:
    """Writes it into a run's folder; its path."""
    path = run / ABOUT_FILE
    write_whole(path, msgspec.json.format(msgspec.json.encode(about), indent=1))
    return path


def read_about(path: Path) -> About | None:
    """What a run says of itself; None where the file is not there, or is none of this kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=About)
    except (OSError, msgspec.MsgspecError):
        return None
