"""Every part of `headrace bench gateway` in turn, and the bars that the figures are held against."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from headrace.bench.gateway import dialects, history, passthrough, stream
from headrace.bench.gateway.sizes import FULL, QUICK, Sizes
from headrace.bench.report import Bar, Part, Report

BARS = {
    "vs_passthrough": Bar("req/s of 64 callers, four turns to about 1,000 tokens, over a bare proxy's", at_least=0.4),
    "added_p50_ms_vs_passthrough": Bar("latency of a lone caller's call, less the bare proxy's"),
    "responses_vs_chat": Bar("CPU of a call in OpenAI's Responses over one in chat completions", at_most=1.3),
    "messages_vs_chat": Bar("CPU of a call in Anthropic's Messages over one in chat completions", at_most=1.3),
    "history_flat": Bar("CPU of a call at a history of 32,000 tokens over one of 1,000", at_most=4),
    "bridge_vs_full": Bar("CPU of a call at 32,000 tokens, bridged over rendered in full", at_most=0.25),
    "ray_vs_embedded": Bar("req/s with the pool as a Ray actor over embedded", at_least=0.8),
    "stream_vs_direct": Bar("time to the first token, less 2 ms, over the rollout server's own", at_most=1.3),
    "req_s": Bar("chat calls a second of 16 callers, the pool included"),
    "cpu_ms": Bar("CPU of the gateway's process for one of those calls, the pool included"),
}


def measure(quick: bool = False) -> Report:
    return measure_sizes(QUICK if quick else FULL)


def measure_sizes(sizes: Sizes, base: Path | None = None) -> Report:
    """Every part in turn, in folders of its own below `base`, each gone before the next begins."""
    from headrace.bench.gateway import ray  # needs the extra: said before anything is measured

    report = Report(f"headrace bench gateway ({sizes.name})", BARS, details={"sizes": sizes.as_dict()})
    console = Console(stderr=True)
    for part in (passthrough, dialects, history, ray, stream):
        console.print(f"{part.__name__.rpartition('.')[2]} ...", end=" ", style="dim")
        with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=base) as folder:
            found: Part = part.measure(sizes, Path(folder))
        console.print(", ".join(f"{key} {value:.3g}" for key, value in found.ratios.items()), highlight=False)
        report.add(found)
    return report
