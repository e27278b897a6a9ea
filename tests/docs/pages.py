"""The fenced blocks of the README and of the documentation.

What a block is, its language says:

- ```` ``` ````, `sh`, `bash`: pasted into the page's one shell. What it starts with `&` runs until the page's end.
- `python`: pasted into the page's one Python session, which keeps the names of earlier blocks.
- `python` or `yaml` whose first line is a comment with a file's name (`# first.yaml`): saved under that name.
- `json`, `yaml`: read.
- `text`: output, a layout, a signature; nothing to run.

A block that cannot run here has `<!-- not run: REASON -->` on the line before it, which no reader sees; REASON is one
of `REASONS`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = ("", "sh", "bash")
#: Why a block may be left out. Each names what a reader has and a test has not.
REASONS = {
    "installs",  # what CI's first step does
    "needs vLLM",
    "needs verl",
    "needs a run of yours",
    "needs npm",  # Claude Code, Codex
    "needs several machines",
    "takes minutes",
}

_MARK = "not run: "
_BLOCK = re.compile(r"^(?:<!-- (?P<mark>.*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w-]+\.(?:py|yaml))\b")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language, and why it is not run where it is not."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name under which a reader saves it, where it tells one."""
        named = _FILE.match(self.text) if self.language in ("python", "yaml") else None
        return named[1] if named else None


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            page.name,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            found["text"],
            found["mark"].removeprefix(_MARK) if (found["mark"] or "").startswith(_MARK) else None,
        )
        for found in _BLOCK.finditer(text)
    ]
