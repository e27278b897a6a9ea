"""The pool at work, with what there is: agents that play at random, a pool that is killed, a consumer that counts.

No training: the trainer comes later. What is shown is real all the same: exact tokens go over HTTP into a journalled
pool in a process of its own; that process is killed with SIGKILL while agents and consumer are at work, and started
again on its journal. The consumer leases groups of eight and acknowledges them. In the end every step that the pool
acknowledged must have been handed out once, with the tokens that were sent, and the ledger must balance.
"""

from __future__ import annotations

import json
import queue
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.demo.game import NUMBERS, play_out, words
from headrace.demo.process import PoolProcess
from headrace.demo.score import Score
from headrace.demo.show import Show
from headrace.pool.connect import connect
from headrace.pool.errors import LeaseLost
from headrace.pool.readonly import JournalView

__all__ = ["play"]

ROLLOUTS = 8
BATCH = 2
LEASE_S = 60.0
#: Longest that one part of the demo waits for another.
PATIENCE_S = 60.0

#: One game to play: its trajectory, its group, the hidden number and the seed of its guesses.
Job = tuple[str, str, int, int]


def play(
    *, groups: int = 48, agents: int = 4, seed: int = 0, journal: Path | None = None, console: Console | None = None
) -> bool:
    """Runs all of it and prints the verdict, one JSON object, as the last line. True where nothing was lost."""
    if journal is not None and journal.exists() and any(journal.iterdir()):
        raise InvalidInput(f"--journal {journal} is not empty; the demo plays on a journal of its own")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as scratch:
        pool = PoolProcess(journal or Path(scratch) / "journal", channel=f"train:n_rollouts={ROLLOUTS}")
        score = Score(groups)
        show = Show(console or Console(), score)
        try:
            with show.running():
                verdict = _play(pool, score, show, _jobs(groups, seed), agents)
        finally:
            pool.end()
    verdict["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(verdict), flush=True)
    return not verdict["lost"] and bool(verdict["balanced"])


def _jobs(groups: int, seed: int) -> list[Job]:
    """Every game, group by group; the eight of a group look for the same number."""
    rng = random.Random(seed)
    found = []
    for group in range(groups):
        hidden = rng.randint(1, NUMBERS)
        found += [(f"g{group}-r{rollout}", f"g{group}", hidden, rng.getrandbits(32)) for rollout in range(ROLLOUTS)]
    return found


def _play(pool: PoolProcess, score: Score, show: Show, jobs: list[Job], agents: int) -> dict[str, Any]:
    pool.start()
    show.say(f"pool: process {pool.pid} on {pool.address}, journal {pool.journal}")
    show.say(f"{agents} agents play {len(jobs)} games, one consumer leases {BATCH} groups of {ROLLOUTS} at a time")
    first = next(play_out(*jobs[0][:3], random.Random(jobs[0][3])))
    show.say(f"a step: {words(first.prompt_ids.tolist())} -> {words(first.response_ids.tolist())}")
    left: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        left.put(job)
    threads = [_thread(_agent, score, pool.address, left) for _ in range(agents)]
    keep, go_on = threading.Event(), threading.Event()
    threads.append(_thread(_consumer, score, pool.address, keep, go_on))

    # The crash comes at a bad moment: groups are queued, agents are playing, the consumer holds a lease.
    score.wait(lambda: score.games >= 3 * len(jobs) // 8, "the first games", PATIENCE_S)
    keep.set()
    score.wait(
        lambda: (score.holding or score.groups == score.wanted) and score.games >= len(jobs) // 2,
        "half of the games",
        PATIENCE_S,
    )
    with connect(pool.address) as asking:
        show.ledger("before the kill", _flat(asking.stats()["ledger"]))
    pool.kill()
    acknowledged = len(score.acknowledged)
    show.say(f"kill -9 {pool.pid}: the pool's process is gone; {acknowledged} steps were acknowledged until then")
    with JournalView(pool.journal) as found:
        recovered = found.stats()["ledger"]
    show.ledger("in the journal", _flat(recovered))
    pool.start()
    go_on.set()
    show.say(f"pool: process {pool.pid} recovered from the journal; agents go on, the consumer acks the lease it held")

    score.wait(lambda: score.groups >= score.wanted, "every group to be consumed", PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
    with connect(pool.address) as asking:
        stats = asking.stats()
    show.ledger("at the end", _flat(stats["ledger"]))
    return _verdict(score, show, stats, recovered["submitted"], acknowledged)


def _verdict(score: Score, show: Show, stats: dict[str, Any], recovered: int, acknowledged: int) -> dict[str, Any]:
    lost = max(score.lost(), acknowledged - recovered)
    total = len(score.acknowledged)
    ledger = stats["ledger"]
    balanced = stats["balanced"] and ledger["submitted"] == ledger["consumed"] == total and not score.twice
    show.say(
        f"{total} steps acknowledged, {len(score.consumed)} handed out and consumed, {lost} lost, {score.twice} twice; "
        f"{score.hits / score.games:.0%} of the games won, at random"
    )
    return {"steps": total, "groups": score.groups, "recovered": recovered, "lost": lost, "balanced": balanced}


def _flat(ledger: dict[str, Any]) -> dict[str, int]:
    return {name: sum(count.values()) if isinstance(count, dict) else count for name, count in ledger.items()}


def _thread(work: Callable[..., None], score: Score, *args: Any) -> threading.Thread:
    def guarded() -> None:
        try:
            work(score, *args)
        except Exception as error:
            score.failed(error)

    thread = threading.Thread(target=guarded, name=work.__name__, daemon=True)
    thread.start()
    return thread


def _agent(score: Score, address: str, jobs: queue.SimpleQueue[Job]) -> None:
    """Plays games until none is left. A pool that does not answer is asked again: no step is skipped."""
    with connect(address, retry_s=PATIENCE_S) as pool:
        while True:
            try:
                trajectory_uid, prompt_uid, hidden, seed = jobs.get_nowait()
            except queue.Empty:
                return
            for step in play_out(trajectory_uid, prompt_uid, hidden, random.Random(seed)):
                pool.submit_step(step)
                score.sent(step)


def _consumer(score: Score, address: str, keep: threading.Event, go_on: threading.Event) -> None:
    """Stands where the trainer will: leases groups, looks at their steps, acknowledges them.

    Once `keep` is set, it does not acknowledge the next batch before `go_on`.
    """
    with connect(address, retry_s=PATIENCE_S) as pool:
        while score.groups < score.wanted:
            batch = pool.fetch_batch(min(BATCH, score.wanted - score.groups), lease_s=LEASE_S, timeout=PATIENCE_S)
            if batch is None:
                raise HeadraceError(f"no group became ready within {PATIENCE_S:g} s")
            if keep.is_set() and not go_on.is_set():
                score.hold(until=go_on)
            try:
                batch.ack()
            except LeaseLost:
                continue  # it comes again
            score.took(batch.steps, len(batch.groups), sum(group.deliveries > 1 for group in batch.groups))
