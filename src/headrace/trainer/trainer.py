"""The loop: take a batch, learn from it, publish the weights, keep a checkpoint, acknowledge. At its own pace.

The order is the promise. A batch is acknowledged after a checkpoint that learned from it is on disk, so a crash loses
no batch and repeats none; a version is told after its weights are on the servers and were verified there, so no step
claims a policy that did not sample it.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from headrace.data.errors import InvalidInput
from headrace.trainer import metrics
from headrace.trainer.checkpoint import Checkpoints, Leases, Progress
from headrace.trainer.config import TrainerConfig
from headrace.trainer.feed import Feed, Fetched
from headrace.trainer.learner import Learner
from headrace.trainer.scoring import GatewayScorer
from headrace.trainer.sync import Probe, Publisher, Report

log = logging.getLogger(__name__)

#: Longest beginning of a sequence that a server is probed with.
PROBE = 256


class Trainer:
    """One run. `run()` returns once all steps are done, the channel is shut down and empty, or `stop()` was called."""

    def __init__(self, config: TrainerConfig, *, resume: bool = False, pool: Any = None) -> None:
        self.config = config
        self.checkpoints = Checkpoints(config.run, config.model, config.checkpoint.keep)
        if not resume and self.checkpoints.latest is not None:
            raise InvalidInput(f"{config.run} holds a run already; go on with --resume, or name another folder")
        config.run.mkdir(parents=True, exist_ok=True)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.learner = Learner(config, device_of(config.device))
        self.progress = Progress(began=time.time())
        self.pool = pool if pool is not None else config.pool.connected()
        self.publisher = Publisher(config.sync) if config.sync is not None else None
        self._publishing = ThreadPoolExecutor(1, "headrace-publish")
        self._published: Future[Report] | None = None
        self._report: Report | None = None
        self._probe = _first_probe(self.learner.policy.model.config.vocab_size)
        self._times: dict[str, float] = {}
        self._told = time.monotonic()
        self._stopped = False
        latest = self.checkpoints.latest
        if latest is not None:
            self.progress, weights, state = self.checkpoints.load(latest)
            self.learner.restore(weights, state)
        metrics.cut(config.run, self.progress.step)
        self.metrics = metrics.Metrics(config.run, config.log, config.shown())
        scorer = None
        if config.score_unrewarded and config.sync is not None and config.sync.gateway is not None:
            scorer = GatewayScorer(config.sync.gateway, config.sync.presented_key)
        self.feed = Feed(self.pool, config, Leases(config.run), self.progress.repeats, scorer)

    def run(self, ready: Callable[[Progress], None] | None = None) -> Progress:
        """`ready` is called once the servers have this run's weights."""
        try:
            self.feed.recover(self.progress.leases)
            self.progress.leases = {}
            self._begin()
            if ready is not None:
                ready(self.progress)
            self._told = time.monotonic()
            while self.progress.step < self.config.steps and not self._stopped and not self._reached():
                with self._timed("wait"):
                    began = time.monotonic()
                    batch = self.feed.next(last=self.progress.step + 1 == self.config.steps)
                    ended = time.monotonic()
                if batch is None:
                    break
                self._times["idle"] = _without((began, ended), batch.starved, batch.converted)
                self._step(batch)
            self._keep(always=True)
            self._await_published()
            return self.progress
        finally:
            self._close()

    def _reached(self) -> bool:
        """Whether the reward is where it was asked to be."""
        goal, rewards = self.config.stop_at_reward, self.progress.rewards
        return goal is not None and len(rewards) == self.config.stop_window and float(np.mean(rewards)) >= goal

    def stop(self) -> None:
        """The step under way is the last."""
        self._stopped = True
        self.feed.stop()

    def _step(self, batch: Fetched) -> None:
        progress, examples = self.progress, batch.examples
        learned: dict[str, float] = {}
        with self._timed("learn"):
            if examples.sequences:
                learned = self.learner.learn(examples.sequences, progress.step, progress.version)
        row = {**self._about(batch), **learned, "queue": batch.queue}
        progress.step += 1
        progress.leases[batch.lease_id] = batch.trajectories
        progress.batches += 1
        progress.rewards = [*progress.rewards, *([row["reward"]] if examples.rewards else [])]
        progress.rewards = progress.rewards[-self.config.stop_window :]
        progress.trajectories += len(examples.rewards)
        progress.tokens += examples.targets
        with self._timed("publish"):
            if learned.get("updates"):
                progress.version += 1
                self._publish(examples.sequences[0].tokens[:PROBE].tolist())
        row |= {"step": progress.step, "version": progress.version, **self._sync()}
        if self.config.validation.every and progress.step % self.config.validation.every == 0:
            row["validation"] = self._validate()
        self._times["convert"] = batch.converted[1] - batch.converted[0]
        self._tell(row)
        with self._timed("checkpoint"):
            self._keep()

    def _tell(self, row: dict[str, Any]) -> None:
        """Writes a step down, with all that came since the last one, its checkpoint too. Before the next checkpoint: so
        every step that is in one has its line."""
        now = time.monotonic()
        seconds, self._told = now - self._told, now
        self.progress.seconds += seconds
        self.metrics.write(
            {**row, "seconds": seconds, "tokens_s": row["sequence_tokens"] / seconds, "times": self._times}
        )
        self._times = {}

    # -- weights -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Brings every server to this run's weights before the first batch is asked for."""
        if self.publisher is not None:
            self.publisher.check(self.learner.policy.model.config)
        known = int(self.pool.stats(self.config.pool.channel)["policy_version"] or 0)
        if known > self.progress.version:  # what was published after the checkpoint is lost: its number is not reused
            self.progress.version = known + 1
        self._publish(self._probe)
        self._await_published()

    def _publish(self, ids: list[int]) -> None:
        """Hands the weights over to be published while learning goes on; the last hand-over is awaited first."""
        if self.publisher is None:
            self.pool.set_version(self.progress.version, channel=self.config.pool.channel)
            return
        self._await_published()
        policy = self.learner.policy
        probe = Probe(ids, policy.raw_log_probs(ids), dtype=self.config.dtype)
        weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
        self._published = self._publishing.submit(self.publisher.publish, weights, self.progress.version, probe)

    def _await_published(self) -> None:
        if self._published is not None:
            self._report = self._published.result()

    def _sync(self) -> dict[str, Any]:
        """What the last exchange of weights that has ended tells."""
        if self._published is not None and self._published.done():
            self._await_published()
        report = self._report
        if report is None:
            return {}
        sync = {"mode": report.mode, "version": report.version, "hold_ms": report.hold_s * 1000}
        return {
            "logprob_gap_max": report.gap_max,
            "logprob_gap_mean": report.gap_mean,
            "sync": {**sync, "seconds": report.seconds, "failed": report.failed},
        }

    # -- keeping -------------------------------------------------------------------------------------------------------

    def _keep(self, *, always: bool = False) -> None:
        """A checkpoint, where one is due; then what it learned from is acknowledged."""
        progress = self.progress
        if not (always or progress.step % self.config.checkpoint.every == 0):
            return
        if progress.leases:
            progress.repeats = sorted(self.feed.repeats)
            self.checkpoints.save(progress, self.learner.policy.weights(), self.learner.state())
        self.feed.ack(progress.leases)
        progress.leases = {}

    # -- telling -------------------------------------------------------------------------------------------------------

    def _about(self, batch: Fetched) -> dict[str, Any]:
        examples, left = batch.examples, batch.examples.left
        sampled = [sequence.versions[sequence.loss_mask] for sequence in examples.sequences]
        versions, counts = np.unique(np.concatenate(sampled), return_counts=True) if sampled else ([0], [0])
        staleness = self.progress.version - np.repeat(versions, counts)
        return {
            "reward": float(np.mean(examples.rewards)) if examples.rewards else None,
            "reward_std": float(np.std(examples.rewards)) if examples.rewards else None,
            "groups": examples.groups,
            "trajectories": len(examples.rewards),
            "sequences": len(examples.sequences),
            "tokens": examples.targets,
            "sequence_tokens": sum(map(len, examples.sequences)),
            "staleness_mean": float(staleness.mean()) if len(staleness) else 0.0,
            "staleness_max": int(staleness.max(initial=0)),
            "versions": {str(version): int(count) for version, count in zip(versions, counts, strict=True) if count},
            "skipped_zero_variance": left.zero_variance,
            "skipped_unrewarded": left.unrewarded,
            "skipped_untrainable": left.untrainable,
            "skipped_long": left.long,
            "skipped_media": left.media,
            "skipped_repeated": batch.repeated,
            "masked_truncated": left.truncated,
            "replayed": batch.replayed,
        }

    def _validate(self) -> dict[str, Any]:
        """What is ready on the validation channel, looked at and let go."""
        wanted = self.config.validation
        rewards: list[float] = []
        for number in range(wanted.groups):
            timeout = wanted.timeout_s if number == 0 else 0
            batch = self.pool.fetch_batch(1, channel=wanted.channel, timeout=timeout)
            if batch is None:
                break
            rewards += [reward for group in batch.groups for reward in group.rewards if reward is not None]
        return {"reward": float(np.mean(rewards)) if rewards else None, "trajectories": len(rewards)}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._times[name] = self._times.get(name, 0.0) + time.monotonic() - began

    def _close(self) -> None:
        self.feed.close()
        self._publishing.shutdown()
        if self.publisher is not None:
            self.publisher.close()
        self.metrics.close()


def train(config: TrainerConfig, *, resume: bool = False, ready: Callable[[Progress], None] | None = None) -> Progress:
    """A run from the command line: SIGTERM and SIGINT end it after the step under way, with a checkpoint."""
    trainer = Trainer(config, resume=resume)
    before = {number: signal.signal(number, lambda *_: trainer.stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return trainer.run(ready)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def device_of(name: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _first_probe(vocabulary: int) -> list[int]:
    """Ids to compare servers with before there is a batch."""
    return [int(token) for token in np.random.default_rng(0).integers(0, vocabulary, 32)]


def _without(wait: tuple[float, float], *others: tuple[float, float]) -> float:
    """How much of a wait was for nothing of these: want of data, or work."""
    began, ended = wait
    return max(ended - began - sum(max(min(ended, b) - max(began, a), 0.0) for a, b in others), 0.0)
