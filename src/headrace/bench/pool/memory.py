"""`memory_vs_unique` and `journal_vs_unique`: what a trajectory costs against its length.

200 trajectories of 50 turns grow to 32,768 tokens each in a `headrace pool serve` with a journal. Every turn is
submitted over HTTP with its whole prompt, turn after turn of all trajectories. The bytes of all distinct ids and
log-probs are compared with the growth of the server's resident memory, after `malloc_trim`, since it answered its first
submit, and with the bytes of all files in the journal's folder.
"""

from __future__ import annotations

import time
from pathlib import Path

from headrace.bench.pool.load import Conversations, Load
from headrace.bench.pool.served import Served
from headrace.bench.pool.sizes import Sizes
from headrace.bench.report import Part
from headrace.pool.connect import connect


def measure(sizes: Sizes, folder: Path) -> Part:
    journal = folder / "journal"
    conversations = Conversations(sizes)
    with Served("--journal", journal) as server, connect(server.address) as pool:
        pool.submit_steps(Load(sizes).steps(1), channel="warm-up")
        before = server.memory()
        start = time.perf_counter()
        sent = 0
        for steps in conversations.submits():
            pool.submit_steps(steps)
            sent += sum(step.prompt_ids.nbytes + step.response_ids.nbytes for step in steps)
        took = time.perf_counter() - start
        grown = server.memory() - before
        kept = pool.stats("train")["ledger"]["queued"]
        on_disk = sum(path.stat().st_size for path in journal.iterdir())
    if kept != sizes.trajectories * sizes.turns:
        raise AssertionError(f"the pool holds {kept} of {sizes.trajectories * sizes.turns} steps")
    unique = conversations.unique_bytes
    return Part(
        {"memory_vs_unique": grown / unique, "journal_vs_unique": on_disk / unique},
        {
            "unique_mb": unique / 1e6,
            "memory_growth_mb": grown / 1e6,
            "journal_mb": on_disk / 1e6,
            "turns_per_s": kept / took,
            "turns_mb_per_s": sent / 1e6 / took,
        },
    )
