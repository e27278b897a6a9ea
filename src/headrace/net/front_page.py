"""The page that a server shows at its root to a browser: what runs here, how it is, and where to look.

It is one file without scripts or anything from elsewhere. Whatever is shown is escaped; what needs a key is shown only
to who has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from starlette.requests import Request

from headrace.version import __version__

KIND = "text/html; charset=utf-8"
#: What stands in for the numbers of a pool or a gateway where the caller has no key for them.
KEY_NEEDED = "Shown to who presents the key, as Authorization: Bearer KEY."

STYLE = """
:root{color-scheme:light dark;--ink:#1c2733;--soft:#5b6b7b;--line:#d9e0e7;--back:#fff;--good:#1a7f4b;--wait:#b35c00}
@media(prefers-color-scheme:dark){:root{--ink:#e6ebf0;--soft:#9aa8b6;--line:#33404d;--back:#12181f;--good:#4cc38a;
--wait:#f0a35e}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:60rem;margin:3rem auto;
padding:0 1.5rem}
h1{font-size:1.6rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}p{margin:.25rem 0}
.soft{color:var(--soft)}.good{color:var(--good);font-weight:600}.wait{color:var(--wait);font-weight:600}
table{border-collapse:collapse;width:100%;font-size:.92rem}th{text-align:left;color:var(--soft);font-weight:500}
th,td{padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
code{font:.9em ui-monospace,monospace}a{color:inherit}
"""


def wants_page(request: Request) -> bool:
    """Whether a client asks for a page by name, as browsers do; `*/*` is what programs send."""
    return "text/html" in request.headers.get("accept", "").lower()


def page(title: str, state: str, sections: Iterable[str], *, good: bool = True) -> bytes:
    """A whole page; `state` says how it is in a line, and `sections` come from the functions below."""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>Headrace: {escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p class=soft>Headrace {escape(__version__)}</p>"
        f"<p class={'good' if good else 'wait'}>{escape(state)}</p>{''.join(sections)}</body></html>\n"
    ).encode()


def text(heading: str, *paragraphs: str) -> str:
    """A section of words."""
    return f"<h2>{escape(heading)}</h2>" + "".join(f"<p>{escape(words)}</p>" for words in paragraphs)


def table(heading: str, rows: Sequence[Mapping[str, Any]], empty: str) -> str:
    """A section of rows that have the same keys, which are its columns; `empty` stands where there are none."""
    if not rows:
        return text(heading, empty)
    numeric = {name for name in rows[0] if all(type(row[name]) in (int, float) for row in rows)}

    def cells(tag: str, row: Mapping[str, Any]) -> str:
        shown = ((name, "" if value is None else str(value)) for name, value in row.items())
        return "".join(f"<{tag}{' class=n' * (name in numeric)}>{escape(value)}</{tag}>" for name, value in shown)

    head = cells("th", {name: name for name in rows[0]})
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<h2>{escape(heading)}</h2><table><tr>{head}</tr>{body}</table>"


def links(heading: str, to: Mapping[str, str]) -> str:
    """A section of this server's own paths, each with what is there."""
    rows = "".join(
        f'<tr><td><a href="{escape(path)}"><code>{escape(path)}</code></a></td><td>{escape(what)}</td></tr>'
        for path, what in to.items()
    )
    return f"<h2>{escape(heading)}</h2><table>{rows}</table>"


def code(heading: str, lines: Mapping[str, str]) -> str:
    """A section of what is to be typed, each with what it does."""
    rows = "".join(
        f"<tr><td>{escape(what)}</td><td><code>{escape(typed)}</code></td></tr>" for what, typed in lines.items()
    )
    return f"<h2>{escape(heading)}</h2><table>{rows}</table>"


def channels(stats: Mapping[str, Any]) -> str:
    """A section with the counts of a pool's channels, out of its `stats`."""
    rows = [
        {
            "channel": name,
            "trajectories": found["trajectories"],
            "groups ready": found["groups"]["ready"],
            **{f"steps {column}": found["ledger"][column] for column in ("submitted", "queued", "leased", "consumed")},
            "policy version": found["policy_version"],
        }
        for name, found in stats["channels"].items()
    ]
    return table("Channels", rows, "None yet: the first step begins one.")
