"""The numbers of the API's groups, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What became of groups, as `stats()["desk"]` counts them.
ENDS = ("posted", "served", "moved", "cleared", "duplicates")
#: Where those that are here are.
PLACES = ("queued", "buffered", "out")
KIND = b"text/plain; version=0.0.4"


def prometheus(desk: Mapping[str, Any]) -> str:
    """The text that a Prometheus server scrapes, from the pool's `stats()["desk"]`."""
    dead = [("why", why, count) for why, count in sorted(desk["dead_letters"].items())]
    return "".join(
        (
            _metric("groups_total", "counter", "groups by what became of them", [("end", e, desk[e]) for e in ENDS]),
            _metric("dead_letters_total", "counter", "groups that no batch can hold, or that were damaged", dead),
            _metric("groups", "gauge", "groups that are here, by where", [("place", p, desk[p]) for p in PLACES]),
            _metric("step", "gauge", "batches handed out, from the step that the trainer began with", desk["step"]),
            _metric("environments", "gauge", "environments that registered", desk["environments"]),
            _metric("memory_bytes", "gauge", "bytes of groups in memory", desk["memory_bytes"]),
            _metric("spilled_bytes", "gauge", "bytes of groups on the disk", desk["spilled_bytes"]),
        )
    )


def _metric(name: str, kind: str, meaning: str, found: int | list[tuple[str, str, int]]) -> str:
    full = f"headrace_api_{name}"
    samples = [f"{full} {found}"] if isinstance(found, int) else [f'{full}{{{k}="{v}"}} {n}' for k, v, n in found]
    return "\n".join([f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", *samples]) + "\n"
