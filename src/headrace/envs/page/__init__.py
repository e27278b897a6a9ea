"""The page of a run's groups: one HTML file that needs nothing beside it, to read rollouts with their scores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import orjson

from headrace.data.json import to_json

__all__ = ["write_page"]

#: A browser takes its time over more; the rest stays in the JSON lines.
MOST_BYTES = 64_000_000
MASKED = -100


def write_page(lines: Path, page: Path | None = None, *, title: str | None = None) -> Path:
    """Writes the page of the groups in a JSON lines file, by default beside it, whole or not at all."""
    page = page or lines.with_suffix(".html")
    groups, size, unread, left = [], 0, 0, 0
    for group in _groups(lines):
        if group is None:
            unread += 1
            continue
        encoded = to_json(group)
        size += len(encoded)
        if size > MOST_BYTES:
            left += 1
            continue
        groups.append(encoded)
    about = {"title": title or lines.stem, "source": lines.name, "unread": unread, "left": left}
    data = b'{"about":' + to_json(about) + b',"groups":[' + b",".join(groups) + b"]}"
    # Inside a script element only its end could be misread.
    text = data.decode().replace("<", "\\u003c")
    template = resources.files(__name__).joinpath("page.html").read_text(encoding="utf-8")
    draft = page.with_name(page.name + ".part")
    draft.write_text(template.replace("%DATA%", text), encoding="utf-8")
    os.replace(draft, page)
    return page


def _groups(lines: Path) -> Iterator[dict[str, Any] | None]:
    """What the page shows of each line; None for one that is not a group."""
    with lines.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                yield _group(orjson.loads(line))
            except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError):
                yield None


def _group(group: dict[str, Any]) -> dict[str, Any]:
    messages = group.get("messages") or [None] * len(group["tokens"])
    return {
        "rollouts": [
            {
                "score": group["scores"][at],
                "tokens": len(tokens),
                "trained": sum(label != MASKED for label in group["masks"][at]),
                "messages": messages[at],
            }
            for at, tokens in enumerate(group["tokens"])
        ]
    }
