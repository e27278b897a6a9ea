"""A run that waits can be stopped, whatever it waits for; why it waits is told once."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.kit import pool_of

from headrace import DataPool
from headrace.pool.errors import PoolUnreachable
from headrace.trainer import Trainer, TrainerConfig
from headrace.trainer.batches import RetryingPool
from headrace.trainer.reporting import AWAITING_BATCH, NothingLearned, RunWatcher
from headrace.trainer.stopping import (
    Outage,
    Stopped,
    StopSignal,
    on_signals,
)
from headrace.trainer.sync import Probe, Publisher, SyncConfig, SyncFailed

#: Nothing listens there.
DEAD = "http://127.0.0.1:9"


@pytest.fixture
def hanging() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Callable[..., TrainerConfig]:
    def made(**changes: Any) -> TrainerConfig:
        given = {"model": model, "run": tmp_path / "run", "steps": 4, "pool": {"batch_size": 2}}
        return TrainerConfig.model_validate({**given, **changes})

    return made


class StopsWhen(RunWatcher):
    """Has a run stopped, from another thread, once it stands as a test says."""

    def __init__(self, words: str, times: int = 1) -> None:
        super().__init__()
        self._words, self._times = words, times
        self.trainer: Trainer | None = None

    def doing(self, words: str) -> None:
        super().doing(words)
        self._look()

    def groups(self, words: str) -> None:
        super().groups(words)
        self._look()

    def down(self, service: str, words: str | None) -> None:
        super().down(service, words)
        self._look()

    def _look(self) -> None:
        if self._words in self.standing and self.trainer is not None:
            threading.Thread(target=self.trainer.stop, args=("Ctrl-C",)).start()


def stopped(config: TrainerConfig, words: str, pool: Any = None) -> Trainer:
    """A run that was stopped while it stood like this. It returns, or the test hangs."""
    watcher = StopsWhen(words)
    watcher.trainer = Trainer(config, pool=pool, watcher=watcher)
    watcher.trainer.run()
    return watcher.trainer


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sync": {"gateway": DEAD}}, f"the gateway {DEAD}: connection refused"),
        ({"pool": {"address": DEAD}}, f"the pool {DEAD}: connection refused"),
    ],
    ids=["gateway", "pool"],
)
def test_a_wait_for_what_is_down_ends_with_the_run_and_is_logged_once(
    config: Callable[..., TrainerConfig],
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    reason: str,
) -> None:
    with caplog.at_level(logging.INFO, "headrace"):
        trainer = stopped(config(**changes), reason)
    assert [record.message for record in caplog.records if "waiting" in record.message] == [f"waiting for {reason}"]
    with pytest.raises(NothingLearned, match=f"stopped by Ctrl-C while waiting for {reason}"):
        trainer.outcome.check()


@pytest.mark.parametrize(
    ("part", "words"),
    [("sync", "looking at the rollout servers"), ("pool", "asking the pool")],
    ids=["gateway", "pool"],
)
def test_a_wait_for_what_hangs_ends_with_the_run(
    config: Callable[..., TrainerConfig], hanging: str, part: str, words: str
) -> None:
    changes = {"sync": {"gateway": hanging}} if part == "sync" else {"pool": {"address": hanging}}
    assert stopped(config(**changes), words).progress.step == 0


def test_a_wait_for_groups_ends_with_the_run_and_says_how_many_were_there(
    config: Callable[..., TrainerConfig],
) -> None:
    with pool_of([[0.0, 1.0]]) as pool:
        pool.open("half", "g9")
        trainer = stopped(config(), f"{AWAITING_BATCH}: 1 of 2 groups ready in channel train, 1 incomplete", pool)
        with pytest.raises(NothingLearned, match="1 of 2 groups ready"):
            trainer.outcome.check()


def test_steps_that_taught_nothing_are_told_now_and_then_not_each(
    config: Callable[..., TrainerConfig], caplog: pytest.LogCaptureFixture
) -> None:
    with pool_of([[1.0, 1.0]] * 11 + [[0.0, 1.0]]) as pool, caplog.at_level(logging.INFO, "headrace"):
        trainer = Trainer(config(steps=12, pool={"batch_size": 1, "prefetch": False}), pool=pool)
        trainer.run()
    said = [record.message for record in caplog.records if record.name == "headrace.trainer.reporting"]
    assert [words.split(":")[0] for words in said] == [
        "nothing was learned in step 1",
        "nothing was learned in 10 steps in a row, the last 10",
        "step 12 learns again, after 11 in which nothing was learned",
    ]
    assert "11 groups with equal rewards only" in trainer.outcome.sentences()[1]
    trainer.outcome.check()  # it learned something


def test_a_channel_that_was_shut_down_before_a_batch_is_the_reason_for_nothing(
    config: Callable[..., TrainerConfig],
) -> None:
    with DataPool() as pool:
        pool.shutdown("train")
        trainer = Trainer(config(), pool=pool)
        trainer.run()
        with pytest.raises(NothingLearned, match="shut down"):
            trainer.outcome.check()


def test_a_publish_that_waits_for_a_server_ends_when_it_is_stopped(hanging: str) -> None:
    publisher = Publisher(SyncConfig(servers=[hanging]))
    ended: list[BaseException] = []

    def publish() -> None:
        try:
            publisher.publish({}, 1, Probe([1, 2], [-1.0]))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    publisher.stop()
    thread.join(120)
    assert [type(error) for error in ended] == [SyncFailed]
    assert "stopped before version 1" in str(ended[0])


class Flaky:
    """A pool that does not answer so many times."""

    def __init__(self, pool: DataPool, fails: int) -> None:
        self._pool, self.fails = pool, fails

    def __getattr__(self, name: str) -> Any:
        if self.fails:
            self.fails -= 1
            raise PoolUnreachable("no answer")
        return getattr(self._pool, name)


def test_a_pool_that_comes_back_is_told_and_answers() -> None:
    said: list[str] = []
    with DataPool() as pool:
        patient = RetryingPool(Flaky(pool, 3), Outage("the pool p", said.append), StopSignal(), 300.0)
        assert patient.call("stats", "train")["groups"]["ready"] == 0
        patient.close()
    first, last = said
    assert first == "waiting for the pool p: no answer"
    assert last.startswith("the pool p answers again after ")


def test_a_pool_that_stays_away_is_given_up_on() -> None:
    with DataPool() as pool:
        patient = RetryingPool(Flaky(pool, 10**9), Outage("the pool p", lambda _: None), StopSignal(), 0.01)
        with pytest.raises(PoolUnreachable, match="the pool p did not answer for"):
            patient.call("stats", "train")
        patient.close()


def test_an_outage_is_logged_when_its_reason_changes() -> None:
    said: list[str] = []
    shown: list[str | None] = []
    outage = Outage("x", said.append, shown.append)
    for reason in ("refused", "refused", "loading", "loading"):
        outage.failed(reason)
    outage.answered()
    outage.answered()
    assert said[:2] == ["waiting for x: refused", "waiting for x: loading"]
    assert [words.rpartition(" after ")[0] for words in said[2:]] == ["x answers again"]
    assert shown == ["x: refused", "x: loading", None]


def test_a_stop_ends_a_wait_and_is_set_once() -> None:
    stop, never = StopSignal(), Future[None]()
    stop.set("first")
    stop.set("second")
    assert stop.by == "first"
    with pytest.raises(Stopped):
        stop.result(never)
    assert stop.wait(1e9)


def test_the_first_signal_stops_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    told: list[str] = []
    heard = threading.Event()

    def stop(by: str) -> None:
        told.append(by)
        heard.set()

    with on_signals(stop, lambda: None):
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.wait(120)
        os.kill(os.getpid(), signal.SIGTERM)  # a second one changes nothing
    assert told == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_ctrl_c_ends_the_process_whatever_it_does() -> None:
    program = (
        "import threading, sys\n"
        "from headrace.trainer.stopping import on_signals\n"
        "with on_signals(lambda by: print(by, flush=True), lambda: print('at once', flush=True)):\n"
        "    print('ready', flush=True)\n"
        "    threading.Event().wait()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "Ctrl-C\n"
    child.send_signal(signal.SIGINT)
    assert child.stdout.read() == "at once\n"
    assert child.wait(120) == 130


def test_what_is_waited_for_in_vain_once_something_else_failed_is_not_waited_for() -> None:
    batch, published = Future[str](), Future[str]()
    published.set_exception(SyncFailed("no rollout server has the new weights"))
    with pytest.raises(SyncFailed, match="no rollout server"):
        StopSignal().result(batch, unless=published)


@pytest.mark.parametrize("ended", [True, False])
def test_what_did_not_fail_ends_no_wait(ended: bool) -> None:
    batch, published = Future[str](), Future[str]()
    if ended:
        published.set_result("version 3")
    waiting = threading.Timer(0, lambda: batch.set_result("batch"))
    waiting.start()
    assert StopSignal().result(batch, unless=published) == "batch"
    waiting.join()
