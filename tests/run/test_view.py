"""What one sees of a run of the whole stack: what its trainer skipped, and why."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from headrace.run.progress import METRICS, RunProgress
from headrace.run.view import RunView

#: Counts of rows as the trainer writes them.
MEDIA, NOTHING = {"groups": 4, "skipped_media": 6, "skipped_zero_variance": 1}, {"groups": 4}


def progress(folder: Path, *rows: dict[str, Any]) -> RunProgress:
    whole = {"reward": 0.5, "queue": 3, "staleness_mean": 0.5, "tokens_s": 12.0, "seconds": 2.0}
    (folder / METRICS).write_bytes(b"".join(orjson.dumps({**whole, **row}) + b"\n" for row in rows))
    found = RunProgress(folder)
    found.refresh()
    return found


def test_the_panel_names_what_was_skipped_and_why(tmp_path: Path) -> None:
    console = Console(file=StringIO(), width=120, record=True)
    console.print(RunView(console, progress(tmp_path, MEDIA, NOTHING, MEDIA), steps=50).panel())
    shown = " ".join(console.export_text().replace("│", " ").split())
    assert (
        "skipped out of 12 groups: 2 groups with equal rewards only; "
        "12 sequences with images or other media, which this model does not read"
    ) in shown


def test_a_line_names_it_too(tmp_path: Path) -> None:
    file = StringIO()
    RunView(Console(file=file, width=80), progress(tmp_path, MEDIA), steps=50).update()
    assert file.getvalue().startswith("step 1: reward 0.500")
    assert "; skipped out of 4 groups: 1 group with equal rewards only; 6 sequences with images" in file.getvalue()


def test_nothing_is_said_where_nothing_was_skipped(tmp_path: Path) -> None:
    console = Console(file=StringIO(), width=120, record=True)
    view = RunView(console, progress(tmp_path, NOTHING, {**NOTHING, "skipped_long": 0}), steps=50)
    view.update()
    console.print(view.panel())
    assert "skipped" not in console.export_text()
