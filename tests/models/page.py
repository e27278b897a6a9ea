"""Writes docs/models.md from what `headrace check-model` finds about each family: `python -m tests.models.page`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.models import corpus

from headrace.checkup.kept import KINDS
from headrace.checkup.model import BRIDGED, NONE, READ, ModelReport, check_renderer

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
#: The line after which the table of families begins.
HEADING = "| model | vocabulary | renderer | tool calls | several | reasoning | bridged | kept |"
#: How a form of calls is called on the page.
FORMS = {
    "json": "JSON object",
    "named": "name, then JSON",
    "parameters": "a tag for each parameter",
    "python": "Python call",
    "keyvalues": "keys and values",
    "channels": "channels",
}


def row(name: str, report: ModelReport) -> str:
    """A family's line of the table."""
    family = corpus.FAMILIES[name]
    refused = [kind for kind, found in report.bridged.items() if found != BRIDGED]
    cells = [
        name,
        "borrowed" if family.borrowed else "own",
        f"`{report.renderer}`",
        FORMS.get(report.form, report.form) if report.tools["one"] == READ else report.tools["one"],
        {READ: "yes", NONE: ""}.get(report.tools["several"], report.tools["several"]),
        {READ: "yes", NONE: ""}.get(report.reasoning, report.reasoning),
        f"all but {', '.join(refused)} ({report.bridged[refused[0]]})" if refused else "every turn",
        ", ".join(report.kept),
    ]
    return "| " + " | ".join(cells) + " |"


def kept_by(name: str) -> set[str]:
    """What the page says is kept against a family's template."""
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    return {kind.strip() for kind in line.split("|")[-2].split(",") if kind.strip()}


def write() -> None:
    """Writes the table anew, and leaves the words around it."""
    rows = []
    for name in corpus.FAMILIES:
        rows.append(row(name, check_renderer(corpus.renderer(name), name)))
        print(rows[-1], flush=True)
        corpus.forget()
    text = PAGE.read_text()
    before, _, after = text.partition(HEADING)
    behind = re.sub(r"^(\n\|[^\n]*)+", "", after)
    rule = re.sub(r"[^|]+", " --- ", HEADING)
    PAGE.write_text(before + "\n".join([HEADING, rule, *rows]) + behind)


if __name__ == "__main__":
    assert set(KINDS)
    write()
