"""The training loop: take a batch, learn from it, publish the weights, write a checkpoint, acknowledge.

The order matters. A batch is acknowledged after a checkpoint that learned from it is on disk, so a crash loses no batch
and repeats none; a version is announced after its weights were loaded and verified on the servers, so no step claims a
policy that did not sample it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from headrace.data.errors import InvalidInput
from headrace.data.sequence import Sequence
from headrace.pool.errors import PoolUnreachable
from headrace.trainer import reporting
from headrace.trainer.batches import BatchFeed, FetchedBatch, RetryingPool
from headrace.trainer.checkpoint import Checkpoints, LeaseFile, Progress, files_folder
from headrace.trainer.config import TrainerConfig
from headrace.trainer.environments import RunRegistration
from headrace.trainer.examples import GatewayScorer
from headrace.trainer.own_functions import check_functions
from headrace.trainer.ranks import ALONE, Ranks
from headrace.trainer.reporting import AWAITING_BATCH, RunOutcome, RunWatcher
from headrace.trainer.shared_learner import learner_of
from headrace.trainer.skipped import filter_metrics
from headrace.trainer.stopping import (
    Outage,
    Stopped,
    StopSignal,
    TaskThread,
    on_signals,
)
from headrace.trainer.sync import (
    Probe,
    Publisher,
    SyncFailed,
    SyncReport,
)
from headrace.trainer.teacher import Teacher

log = logging.getLogger(__name__)

#: Longest beginning of a sequence that a server is probed with.
PROBE_TOKENS = 256
#: Seconds that servers may take to load and verify the weights that they are given when the run is told to stop: so
#: long a small or middling model takes. Beyond that what hangs is cut short, which takes servers out of the gateway.
LAST_SYNC_S = 10.0
#: Seconds that a publish that was cut short may take to let calls go on.
CUT_SYNC_S = 5.0


class Trainer:
    """One run. `run()` returns once all steps are done, the channel is shut down and empty, or `stop()` was called."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        resume: bool = False,
        pool: Any = None,
        watcher: RunWatcher | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        self._watcher = watcher or RunWatcher()
        self._watcher.doing(f"loading {config.model}")
        self._stop = StopSignal()
        self.outcome = RunOutcome()
        self.checkpoints = Checkpoints(config.run, config.model, config.checkpoint.keep)
        self.checkpoints.recover()
        if not resume and self.checkpoints.latest is not None:
            raise InvalidInput(f"{config.run} holds a run already; go on with --resume, or name another folder")
        check_functions(config.algorithm)
        scorer = None
        if config.score_unrewarded and config.sync is not None and config.sync.gateway is not None:
            waiting = self._outage("reward worker", config.sync.gateway)
            scorer = GatewayScorer(config.sync.gateway, config.sync.presented_key, stop=self._stop, outage=waiting)
            scorer.check()
        asked, teacher = config.algorithm.teacher, None
        if asked is not None and asked.address is not None:
            teacher = Teacher(asked, config.model, self._outage("teacher", asked.address), self._stop)
            teacher.check()
        config.run.mkdir(parents=True, exist_ok=True)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.learner = learner_of(config, config.device, ranks)
        self.checkpoints.files = files_folder(config.model)
        if self.learner.policy.adapter is not None:
            self.checkpoints.adapter = self.learner.policy.adapter.config
        self.progress = Progress(began=time.time())
        given = pool if pool is not None else config.pool.connected(retry_s=0.0)
        outage = self._outage("pool", config.pool.address)
        self.publisher: Publisher | None = None
        if config.sync is not None:
            gateway = self._outage("gateway", config.sync.gateway or "")
            self.publisher = Publisher(config.sync, gateway)
            if config.sync.gateway == config.pool.address.rstrip("/"):
                outage = gateway  # the gateway serves the pool: one outage
        self.pool = RetryingPool(given, outage, self._stop, config.pool.patience_s)
        self._publishing = TaskThread("headrace-publish")
        self._published: Future[SyncReport] | None = None
        self._handed_over = 0
        self._report: SyncReport | None = None
        self._probe = _first_probe(self.learner.policy.model.config.get_text_config().vocab_size)
        self._times: dict[str, float] = {}
        self._last_report_at = time.monotonic()
        latest = self.checkpoints.latest
        if latest is not None:
            self.progress = self.learner.resume(self.checkpoints, latest)
        reporting.truncate_metrics(config.run, self.progress.step)
        self.metrics = reporting.RunMetrics(config.run, config.log, config.shown())
        self.registration = RunRegistration(self.pool, config, lambda: self.progress.step)
        self.feed = BatchFeed(
            *(self.pool, config, LeaseFile(config.run), self.progress.repeats, scorer),
            teacher=teacher,
            stop=self._stop,
            watcher=self._watcher,
            registration=self.registration,
        )

    def run(self) -> Progress:
        """Trains; returns how far it got, and `outcome` says how it ended. A run that was stopped can be resumed.
        Raises `SyncFailed` where no server takes the weights, and `PoolUnreachable` where the pool is away for too
        long."""
        ended = False
        try:
            try:
                self._learn()
            except (Stopped, SyncFailed, PoolUnreachable):
                if not self._stop.is_set():
                    raise  # after a stop, it only ends a wait
            self._checkpoint(always=True)
            self._await_published()
            self.outcome.ended(self.progress, self._stop.by, self._watcher.standing)
            ended = True
            return self.progress
        finally:
            self._close(ended)

    def _learn(self) -> None:
        if self.progress.step >= self.config.steps or self._goal_reached():
            self.outcome.nothing_to_do = True
        self.feed.recover(self.progress.leases)
        self.progress.leases = {}
        self._publish_first()
        self._watcher.ready(self.progress)
        self._last_report_at = time.monotonic()
        while self.progress.step < self.config.steps and not self._stop.is_set() and not self._goal_reached():
            self._watcher.doing(AWAITING_BATCH)
            with self._timed("wait"):
                began = time.monotonic()
                last = self.progress.step + 1 == self.config.steps
                batch = self.feed.next(last=last, publishing=self._published)
                ended = time.monotonic()
            if batch is None:
                self.outcome.shut_down = not self._stop.is_set()
                break
            self._times["idle"] = _idle_seconds((began, ended), batch.starved, batch.converted)
            self._step(batch)

    def _outage(self, service: str, address: str) -> Outage:
        return Outage(f"the {service} {address}", log.warning, partial(self._watcher.down, service))

    def _goal_reached(self) -> bool:
        """Whether the mean reward of the last steps has reached `stop_at_reward`."""
        goal, rewards = self.config.stop_at_reward, self.progress.rewards
        return goal is not None and len(rewards) == self.config.stop_window and float(np.mean(rewards)) >= goal

    def stop(self, by: str = "stop()") -> None:
        """Ends the run after the step under way; ends all waits at once. Thread-safe."""
        if not self._stop.is_set():
            self._watcher.stopping(by)
            self._stop.set(by)
            if self.publisher is not None:
                self.publisher.stop()

    def _step(self, batch: FetchedBatch) -> None:
        progress, examples = self.progress, batch.examples
        learned: dict[str, float] = {}
        self._watcher.doing(f"learning from {examples.groups} groups")
        with self._timed("learn"):
            if examples.sequences:
                learned = self.learner.learn(examples.sequences, progress.step, progress.version)
        row = {**self._batch_metrics(batch), **learned, "queue": batch.queue}
        progress.step += 1
        progress.leases[batch.lease_id] = batch.trajectories
        progress.batches += 1
        progress.rewards = [*progress.rewards, *([row["reward"]] if examples.rewards else [])]
        progress.rewards = progress.rewards[-self.config.stop_window :]
        progress.trajectories += examples.trajectories
        progress.tokens += examples.targets
        with self._timed("publish"):
            if learned.get("updates") or self.config.version_each_step:
                progress.version += 1
                self._await_published()
                if self.publisher is not None:  # the version is announced once servers have it: long after the fetch
                    self._begin_fetch()
                self._publish(self._probe_of(examples.sequences))
        self._begin_fetch()
        row |= {"step": progress.step, "version": progress.version, **self._sync_metrics()}
        if self.config.validation.every and progress.step % self.config.validation.every == 0:
            self._watcher.doing(f"validating on channel {self.config.validation.channel}")
            row["validation"] = self._validate()
        self._times["convert"] = batch.converted[1] - batch.converted[0]
        self._report_step(row)
        self.outcome.add(row)
        with self._timed("checkpoint"):
            self._checkpoint()

    def _begin_fetch(self) -> None:
        """Has the next batch fetched while the weights are copied out and the step is reported, where there is to be
        another step."""
        if self.progress.step < self.config.steps and not self._stop.is_set() and not self._goal_reached():
            self.feed.begin()

    def _report_step(self, row: dict[str, Any]) -> None:
        """Writes a step's row, with the times since the last row. Before the next checkpoint, so that every step in a
        checkpoint has its row."""
        now = time.monotonic()
        seconds, self._last_report_at = now - self._last_report_at, now
        self.progress.seconds += seconds
        row |= {"seconds": seconds, "tokens_s": row["sequence_tokens"] / seconds, "times": self._times}
        self.metrics.write(row)
        self._watcher.step(row)
        self._times = {}

    # -- weights -------------------------------------------------------------------------------------------------------

    def _publish_first(self) -> None:
        """Publishes this run's weights to every server before the first batch is fetched."""
        if self.publisher is not None:
            publisher, model = self.publisher, self.learner.policy.model.config
            self._watcher.doing("looking at the rollout servers")
            rank = None if self.config.lora is None else self.config.lora.rank
            self._stop.result(self._publishing.submit(lambda: publisher.check(model, rank)))
        self._watcher.doing("asking the pool for its version")
        known = int(self.pool.call("stats", self.config.pool.channel)["policy_version"] or 0)
        self.registration.begin()
        if known > self.progress.version:  # what was published after the checkpoint is lost: its number is not reused
            self.progress.version = known + 1
        self._publish(self._probe)
        self._await_published()
        if self._stop.is_set():
            raise Stopped

    def _publish(self, ids: list[int]) -> None:
        """Publishes the weights in the background while learning goes on, after the publish before has ended. Once the
        run is stopped nothing is published: a resumed run does that first."""
        if self.publisher is None:
            try:
                self.pool.call("set_version", self.progress.version, channel=self.config.pool.channel)
            except Stopped:
                pass
            return
        self._await_published()
        if self._stop.is_set():
            return
        publisher, version = self.publisher, self.progress.version
        self._handed_over = version
        policy = self.learner.policy
        layers = policy.model.config.get_text_config().num_hidden_layers
        probe = Probe(ids, self.learner.raw_log_probs(ids), self.config.dtype, layers)
        weights = (
            policy.in_checkpoint(publisher.snapshot(self.learner.served_weights()))  # copies first: they are emptied
            if policy.adapter is None
            else policy.adapter.snapshot()
        )

        def publish() -> SyncReport:
            publisher.await_reachable()
            report = publisher.publish(weights, version, probe)
            if publisher.config.gateway is None:  # which would have told the pool
                self.pool.inline("set_version", version, channel=self.config.pool.channel)
            return report

        self._published = self._publishing.submit(publish)

    def _probe_of(self, sequences: list[Sequence]) -> list[int]:
        """The tokens by which servers are verified: the beginning of what was learned from, where there is enough of
        it. Never all of a sequence, which may fill a server's context: a prompt needs room for a token behind it."""
        found = sequences[0].tokens[:-1][:PROBE_TOKENS].tolist() if sequences else []
        return found if len(found) > 1 else self._probe

    def _await_published(self) -> None:
        """Waits for the publish in the background and raises its error. Once the run is stopped it waits at most
        `LAST_SYNC_S` and only logs a failure."""
        if self._published is None:
            return
        if not self._published.done():
            self._watcher.doing(f"waiting for the rollout servers to load and verify version {self._handed_over}")
        try:
            self._report = self._stop.result(self._published, grace_s=LAST_SYNC_S)
        except Stopped:
            self._cancel_publish()
        except SyncFailed as error:
            if not self._stop.is_set():
                raise
            log.warning("%s", error)
            self._published = None

    def _cancel_publish(self) -> None:
        """Cuts a publish short that hangs, so that calls are not left paused when this process ends."""
        if self._published is not None and not self._published.done():
            assert self.publisher is not None
            log.warning("the servers did not take version %d in time; the publish is cut short", self._handed_over)
            self.publisher.cut()
            wait_for([self._published], timeout=CUT_SYNC_S)
        self._published = None

    def _sync_metrics(self) -> dict[str, Any]:
        """The metrics of the last publish that has ended; none before the first."""
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

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _checkpoint(self, *, always: bool = False) -> None:
        """Writes a checkpoint where one is due, then acknowledges the batches in it."""
        progress = self.progress
        if not (always or progress.step % self.config.checkpoint.every == 0):
            return
        if progress.leases:
            self._watcher.doing("writing a checkpoint")
            progress.repeats = sorted(self.feed.repeats)
            self.checkpoints.save(progress, self.learner.weights(), self.learner.write_state)
        try:
            self.feed.ack(progress.leases)
        except (Stopped, PoolUnreachable):
            if not self._stop.is_set():
                raise
            log.warning("%d batches are in the checkpoint and not acknowledged: --resume does it", len(progress.leases))
        progress.leases = {}

    # -- metrics -------------------------------------------------------------------------------------------------------

    def _batch_metrics(self, batch: FetchedBatch) -> dict[str, Any]:
        examples = batch.examples
        sampled = [sequence.versions[sequence.loss_mask] for sequence in examples.sequences]
        versions, counts = np.unique(np.concatenate(sampled), return_counts=True) if sampled else ([0], [0])
        staleness = self.progress.version - np.repeat(versions, counts)
        return {
            "reward": float(np.mean(examples.rewards)) if examples.rewards else None,
            "reward_std": float(np.std(examples.rewards)) if examples.rewards else None,
            "groups": examples.groups,
            "trajectories": examples.trajectories,
            "sequences": len(examples.sequences),
            "tokens": examples.targets,
            "sequence_tokens": sum(map(len, examples.sequences)),
            "staleness_mean": float(staleness.mean()) if len(staleness) else 0.0,
            "staleness_max": int(staleness.max(initial=0)),
            "versions": {str(version): int(count) for version, count in zip(versions, counts, strict=True) if count},
            **examples.skipped.metrics(),
            "skipped_repeated": batch.repeated,
            **filter_metrics(examples.filtered),
            **({} if self.config.algorithm.overlong is None else {"penalised_overlong": examples.penalised}),
            "replayed": batch.replayed,
        }

    def _validate(self) -> dict[str, Any]:
        """Mean reward and count of what is ready on the validation channel, which is consumed."""
        wanted = self.config.validation
        rewards: list[float] = []
        for number in range(wanted.groups):
            timeout = wanted.timeout_s if number == 0 else 0
            try:
                batch = self.pool.call("fetch_batch", 1, channel=wanted.channel, timeout=timeout)
            except Stopped:
                break
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

    def _close(self, ended: bool) -> None:
        """Frees everything; where the run has ended as it should, environments are told."""
        self._stop.set("its end")
        if self.publisher is not None:
            self.publisher.stop()
        if self._published is not None:
            wait_for([self._published], timeout=LAST_SYNC_S)
            self._cancel_publish()
        self.feed.close()
        if ended:
            self.registration.end()
        self.pool.close()
        self._publishing.close()
        self.metrics.close()


def train(
    config: TrainerConfig, *, resume: bool = False, watcher: RunWatcher | None = None, ranks: Ranks = ALONE
) -> RunOutcome:
    """Runs a training from the command line. SIGTERM and SIGINT end it after the step under way, with a checkpoint, and
    at once while it waits; a second Ctrl-C ends the process immediately."""
    watcher = watcher or RunWatcher()
    trainer = Trainer(config, resume=resume, watcher=watcher, ranks=ranks)
    with on_signals(trainer.stop, watcher.ending_at_once):
        trainer.run()
    return trainer.outcome


def _first_probe(vocabulary: int) -> list[int]:
    """Random token ids to verify servers with before there is a batch."""
    return [int(token) for token in np.random.default_rng(0).integers(0, vocabulary, 32)]


def _idle_seconds(wait: tuple[float, float], *others: tuple[float, float]) -> float:
    """How much of a wait overlaps with none of `others` (waiting for data, converting it)."""
    began, ended = wait
    return max(ended - began - sum(max(min(ended, b) - max(began, a), 0.0) for a, b in others), 0.0)
