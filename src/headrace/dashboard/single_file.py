"""The dashboard as one HTML file: the same page, with what it would ask for in it. It needs no server, no network."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from importlib import resources
from typing import Any

import msgspec

from headrace.dashboard.about import About
from headrace.dashboard.dashboard import Dashboard
from headrace.dashboard.detail import MAX_STEPS, with_few_images
from headrace.dashboard.records import MAX_ROWS, GroupRecord, TrajectoryQuery, TrajectoryRecord
from headrace.data.errors import HeadraceError

#: Trajectories and groups that are listed in a file, newest first: some 300 bytes each.
MAX_LISTED, MAX_GROUPS = 20_000, 2_000
#: Trajectories that a file holds whole: the newest, the best and the worst, as many of each.
WHOLE_OF_EACH = 60
#: Tokens that a file holds: some 30 bytes each. Trajectories beyond have their steps and conversation alone.
MAX_TOKENS = 400_000
#: Bytes of trajectories that a file holds whole: a browser is slow with more.
MAX_WHOLE_BYTES = 64_000_000
#: Groups of which a file holds what their trajectories share.
MAX_GROUP_DETAILS = 200
#: Tokens of a step, and branches of a trajectory, that are held.
STEP_TOKENS, BRANCHES = 500, 8
#: Characters of a conversation's images that are held.
CONVERSATION_IMAGES = 100_000

#: The page's modules; `offline.js` answers in a file what `api.js` asks the server for.
MODULES = (
    "main",
    "about",
    "overview",
    "trajectories",
    "trajectory",
    "groups",
    "consumption",
    "compare",
    "curate",
    "charts",
    "dom",
)
#: Files that a module may import, by what stands in its source.
_IMPORT = re.compile(r'from "\./([a-z/]+)\.js"')


async def collect(dashboard: Dashboard, *, all_whole: bool = False) -> dict[str, Any]:
    """All that the file shows, as the views answer it. With `all_whole`, every trajectory that is listed is held whole,
    as far as there is room, and not some alone."""
    await dashboard.read_once()
    listed = await _all(dashboard)
    groups: list[GroupRecord] = []
    while len(groups) < MAX_GROUPS:
        page = await dashboard.groups(None, "", len(groups), MAX_ROWS)
        groups += page.rows
        if not page.rows or len(groups) >= page.total:
            break
    whole, room, size = {}, MAX_TOKENS, 0
    for row in listed if all_whole else _chosen(listed):
        try:
            found, used = await _whole(dashboard, row, room)
        except HeadraceError:
            continue  # it has left the pool
        room -= used
        size += len(msgspec.json.encode(found))
        if size > MAX_WHOLE_BYTES:
            break
        whole[f"{row.channel}\n{row.uid}"] = found
    answers = {
        "overview": await dashboard.overview(),
        "about": await dashboard.about() or About("", ""),
        "curves": await dashboard.curves(),
        "survivors": await dashboard.survivors(),
        "choices": {**await dashboard.choices(), "editable": False, "beside": None},
        "consumption": await dashboard.consumption(0, MAX_ROWS),
        "trajectories": listed,
        "groups": groups[:MAX_GROUPS],
        "group_details": await _group_details(dashboard, groups[:MAX_GROUP_DETAILS]),
        "whole": whole,
    }
    builtins: dict[str, Any] = msgspec.to_builtins(answers)
    return builtins


async def _group_details(dashboard: Dashboard, groups: Iterable[GroupRecord]) -> dict[str, Any]:
    """What the trajectories of each group share, where they can still be read."""
    found = {}
    for one in groups:
        try:
            found[f"{one.channel}\n{one.prompt_uid}"] = await dashboard.group(one.channel, one.prompt_uid)
        except HeadraceError:
            continue
    return found


async def _all(dashboard: Dashboard) -> list[TrajectoryRecord]:
    listed: list[TrajectoryRecord] = []
    while len(listed) < MAX_LISTED:
        page = await dashboard.trajectories(TrajectoryQuery(offset=len(listed), limit=MAX_ROWS))
        listed += page.rows
        if not page.rows or len(listed) >= page.total:
            break
    return listed


def _chosen(listed: list[TrajectoryRecord]) -> Iterable[TrajectoryRecord]:
    """The newest, the best and the worst."""
    rewarded = sorted((row for row in listed if row.reward is not None), key=lambda row: row.reward or 0.0)
    some = [*listed[:WHOLE_OF_EACH], *rewarded[-WHOLE_OF_EACH:][::-1], *rewarded[:WHOLE_OF_EACH]]
    return {(row.channel, row.uid): row for row in some}.values()


async def _whole(dashboard: Dashboard, row: TrajectoryRecord, room: int) -> tuple[dict[str, Any], int]:
    """A trajectory with its conversations, its steps' tokens as far as there is room, and what became of it."""
    name = (row.channel, row.uid)
    found = await dashboard.trajectory(*name, 0)
    talks = {
        leaf: with_few_images(await dashboard.conversation(*name, leaf), CONVERSATION_IMAGES)
        for leaf in found.leaves[-BRANCHES:]
    }
    tokens, used = {}, 0
    for step in found.steps[:MAX_STEPS]:
        if used + STEP_TOKENS > room:
            break
        tokens[step.step_index] = await dashboard.tokens(*name, step.step_index, None, STEP_TOKENS)
        used += len(tokens[step.step_index].ids)
    try:
        became = await dashboard.why(row.uid, row.channel)
    except HeadraceError:
        became = []  # there is no journal
    return {"detail": found, "conversations": talks, "tokens": tokens, "why": became}, used


def single_file(answers: dict[str, Any]) -> bytes:
    """The page with those answers in it. It loads nothing: its policy lets no request out."""
    folder = resources.files("headrace.dashboard") / "static"

    def source(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    def address(text: str) -> str:
        return "data:text/javascript;base64," + base64.b64encode(text.encode()).decode()

    modules = {name: _IMPORT.sub(r'from "headrace/\1"', source(f"{name}.js")) for name in (*MODULES, "vendor/uplot")}
    modules["api"] = source("offline.js")
    imports = {f"headrace/{name}": address(text) for name, text in modules.items() if name != "main"}
    importmap = msgspec.json.encode({"imports": imports}).decode()
    style = source("vendor/uplot.css") + source("dashboard.css")
    icon = "data:image/svg+xml;base64," + base64.b64encode(source("icon.svg").encode()).decode()
    policy = (
        f"default-src 'none'; script-src data: '{_digest(importmap)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = msgspec.json.encode(answers).decode().replace("<", "\\u003c")
    page = source("index.html")
    head = (
        f'<meta http-equiv="content-security-policy" content="{policy}">\n'
        f'<link rel="icon" href="{icon}">\n<style>{style}</style>\n'
        f'<script type="importmap">{importmap}</script>\n'
        f'<script type="application/json" id="answers">{data}</script>\n'
        f'<script type="module" src="{address(modules["main"])}"></script>\n'
    )
    begins, ends = page.index('<link rel="icon"'), page.index("</head>")
    return (page[:begins] + head + page[ends:]).encode()


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
