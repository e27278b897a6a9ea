"""`Gateway`: the parts of one gateway, put together. No module globals: two can live in one process.

It serves at once; what needs tokens is refused until the tokenizer is loaded and the rollout servers are found to
match.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.metrics_core import Metric
from starlette.requests import Request

from headrace.data.errors import HeadraceError
from headrace.gateway.access import Access, Caller
from headrace.gateway.admission import SMALL_BODY_BYTES, TOO_LARGE, Admission, AdmittedCall
from headrace.gateway.counters import PREFIX, GatewayCounters
from headrace.gateway.errors import Refusal
from headrace.gateway.executor import CallExecutor
from headrace.gateway.flushing import FlushTimes
from headrace.gateway.http import within
from headrace.gateway.models import Models
from headrace.gateway.named_calls import NamedCalls
from headrace.gateway.outbox import RETRY_INTERVAL_S
from headrace.gateway.recorder import Recorder
from headrace.gateway.redaction import Redaction
from headrace.gateway.request import CallReader
from headrace.gateway.scoring import RewardScoring
from headrace.gateway.served_model import RendererCache, ServedModel, SharedServices
from headrace.gateway.sessions import Session, Sessions
from headrace.gateway.settings import GatewaySettings
from headrace.gateway.startup import LogObserver, StartupObserver, observe_startup
from headrace.gateway.upstream import Upstream
from headrace.net.exposition import family, loop_tasks
from headrace.net.server import BodyTooLarge, read_body
from headrace.net.supervised import Supervised
from headrace.pool.embedded import DataPool
from headrace.pool.errors import PoolUnreachable
from headrace.pool.remote import RemotePool

log = logging.getLogger("headrace.gateway")

#: Seconds that a request's body may take to arrive: slower ones would hold memory for nothing.
BODY_TIMEOUT_S = 60


class OtherWorkers(Protocol):
    """The other processes that serve the same port."""

    async def dropped(self, uid: str) -> None:
        """Tells them to forget what they know of a trajectory."""
        ...


class Gateway:
    """One gateway on one pool. `start` and `close` are its application's lifespan."""

    def __init__(
        self, pool: DataPool | RemotePool, settings: GatewaySettings, *, outbox_file: Path | None = None
    ) -> None:
        self.pool = pool
        self.settings = settings
        self.counters = GatewayCounters()
        self.access = Access(settings, self.counters)
        self.recorder = Recorder(pool, self.counters, outbox_mb=settings.outbox_mb, ack=settings.ack, file=outbox_file)
        self.sessions = Sessions(
            pool.aio, self.recorder.flushed, most_tokens=settings.cached_tokens, open_unknown=settings.open
        )
        self.reader = CallReader()
        self.flush_times = FlushTimes(settings.stream_flush_ms)
        self.redaction = None if settings.redact is None else Redaction(settings.redact, self.counters)
        shared = SharedServices(pool, self.sessions, self.recorder, self.counters, self.redaction, RendererCache())
        self.models = Models(settings, shared)
        self.scoring = RewardScoring(settings, self.counters)
        self.loaded: Callable[[], None] = lambda: None  # told once the tokenizer is there
        self.dropping: Callable[[str], None] = lambda uid: None  # told of what is dropped
        self.others: OtherWorkers | None = None  # the other workers, where this process is one of several
        self.named_calls: NamedCalls | None = None  # shared with them
        self.observer: StartupObserver | None = LogObserver()  # of the start; None: whoever `report_startup` is given
        self.admission = Admission(
            max_calls=settings.max_in_flight,
            max_bytes=int(settings.memory_mb * 1e6),
            refused=partial(self.counters.add, "refused"),
        )
        self.supervised: list[Supervised] = []  # its own tasks, and those of parts that come and go with it
        self._with_pool: list[Callable[[], Awaitable[None]]] = [self._share_channels]
        self._pool_away: str | None = None  # at the start; later the outbox says so
        self._failure: Exception | None = None  # of the pool, or of the reward

    # -- its life ------------------------------------------------------------------------------------------------------

    async def start(self, *with_pool: Callable[[], Awaitable[None]]) -> None:
        """Starts it; what is to be done `with_pool` is done by then where the pool is embedded, and once it answers
        where it is elsewhere."""
        self._with_pool += with_pool
        self.admission.start()
        await self.recorder.start()
        if isinstance(self.pool, DataPool):
            await self._begin_with_pool()
        self._supervise("the start of the gateway", self._load)
        if self.observer is not None:
            self.report_startup(self.observer)

    async def _share_channels(self) -> None:
        """Where tenants share a channel, none of them can displace another's groups by its own."""
        for channel in {channel for tenant in self.access.tenants for channel in tenant.spec.channels}:
            try:
                await self.pool.aio.configure(channel, by_owner=True)
            except HeadraceError as error:
                log.warning("channel %r could not be shared out among tenants: %s", channel, error)

    def report_startup(self, observer: StartupObserver) -> None:
        """Tells an observer how the start goes, from here on. Called in the loop that the gateway runs in."""
        self._supervise("the report of the start", lambda: observe_startup(self, observer))

    def _supervise(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        task = Supervised(name, work)
        self.supervised.append(task)
        task.start()

    async def close(self, drain_s: float | None = None) -> None:
        """Sends what waits in the outbox, for at most so long, then lets go of everything but the pool."""
        left = await self.recorder.close(drain_s)
        if left:
            log.error("%d steps did not reach the pool", left)
        for task in self.supervised:
            await task.stop()
        self.admission.close()
        await self.scoring.close()
        await self.models.close()
        self.reader.close()

    async def _begin_with_pool(self) -> None:
        while self._with_pool:
            await self._with_pool[0]()
            del self._with_pool[0]  # what is done is not done again, where the start has to begin anew

    async def _find_pool(self, pool: RemotePool) -> None:
        """Returns once a pool that is elsewhere answers: it may be starting too. Raises other errors than that."""
        without_retries = pool.without_retries()
        while True:
            try:
                await without_retries.aio.stats()
            except PoolUnreachable as error:
                reason = f"waiting for the pool at {pool.address}: {error.__cause__ or error}"
                if self._pool_away is None:
                    log.warning("%s", reason)
                self._pool_away = reason
                await asyncio.sleep(RETRY_INTERVAL_S)
            else:
                self._pool_away = None
                return

    async def _load(self) -> None:
        try:
            await self.scoring.ready()
            if isinstance(self.pool, RemotePool):
                await self._find_pool(self.pool)
                await self._begin_with_pool()
        except HeadraceError as error:
            self._failure = error
            return
        await self.models.load()
        if any(model.loaded for model in self.models):
            self.loaded()

    # -- what routes need ----------------------------------------------------------------------------------------------

    @property
    def upstream(self) -> Upstream:
        """The default model's rollout servers."""
        return self.models.default.upstream

    @property
    def calls(self) -> CallExecutor:
        """What carries calls of the default model out; `Refusal` until it can."""
        return self.models.default.calls

    @property
    def why_not_ready(self) -> str | None:
        """Why calls are not taken now, as `/ready` says it; None where they are."""
        if self._failure is not None:
            return f"Gateway not ready: {self._failure}"
        if self._pool_away is not None:
            return f"Gateway not ready ({self._pool_away})"
        return next((why for model in self.models if (why := model.why_not_ready) is not None), None)

    @property
    def warnings(self) -> list[str]:
        """What agents miss although calls are taken, as `/ready` says it."""
        return [warning for model in self.models if (warning := model.warning) is not None]

    @property
    def waits_for(self) -> str | None:
        """What the start waits for; None once calls are taken."""
        if self._pool_away is not None:
            return self._pool_away
        return next((waits for model in self.models if (waits := model.waits_for) is not None), None)

    @property
    def failure(self) -> Exception | None:
        """Why calls will never be taken."""
        return self._failure or next((model.failure for model in self.models if model.failure is not None), None)

    @property
    def trouble(self) -> str | None:
        """Why it is degraded: it waits for the pool, steps do or are lost, or a task of its own fails; else None."""
        tasks = (*(model.upstream.watch for model in self.models), *self.supervised)
        overdue = next((model.upstream.overdue for model in self.models if model.upstream.overdue), None)
        return (
            self._pool_away or self.recorder.trouble or next((task.trouble for task in tasks if task.trouble), overdue)
        )

    async def flushed(self, uid: str) -> None:
        """Returns once the pool has what was handed over of a trajectory, for whichever model."""
        await self.recorder.flushed(*dict.fromkeys(model.uid_of(uid) for model in self.models))

    async def body(self, request: Request, caller: Caller | None = None, *, held: AdmittedCall | None = None) -> bytes:
        """A request's whole body; 413 where it is larger than the gateway or its tenant takes, 408 where it is slow,
        503 where there is no room for it. `held`: the call that it counts for as long as that is under way; without
        one it counts until it is there."""
        own = caller.max_body_mb if caller is not None else None
        most = min(own, self.settings.max_body_mb) if own is not None else self.settings.max_body_mb
        try:
            if held is not None:
                return await within(BODY_TIMEOUT_S, read_body(request, int(most * 1e6), held.body))
            with self.admission.request() as reading:
                body = read_body(request, int(most * 1e6), reading.body, free=SMALL_BODY_BYTES)
                return await within(BODY_TIMEOUT_S, body)
        except BodyTooLarge:
            raise Refusal(f"the body is larger than {most:g} MB (--max-body-mb)", 413, code=TOO_LARGE) from None
        except TimeoutError:
            raise Refusal(f"the body did not arrive within {BODY_TIMEOUT_S} s", 408, code="body_too_slow") from None

    async def session(self, caller: Caller, uid: str, prompt: str, model: ServedModel, *, recorded: bool) -> Session:
        """What is known of a running trajectory's calls to a model; `Refusal` where there is no such trajectory."""
        self.models.check(uid)
        uid, channel = caller.uid(uid), caller.channel(None, self.models.default.channel)
        session = await self.sessions.running(uid, caller.uid(prompt), channel, begin=recorded)
        if model.is_default:
            return session
        channel = model.channel_of(session.channel)
        return await self.sessions.for_model(session, model.uid_of(uid), channel, begin=recorded)

    async def forget(self, uid: str) -> None:
        """Drops what is known of a trajectory, here and in the other workers: the next call reads it from the pool."""
        for held in dict.fromkeys(model.uid_of(uid) for model in self.models):
            self.drop(held)
            if self.sessions.stamps is not None:
                self.sessions.stamps.change(held)
            if self.others is not None and self.settings.open:  # what is known of live conversations is more than these
                await self.others.dropped(held)

    def drop(self, held: str) -> None:
        """Drops what this process knows of a trajectory."""
        self.sessions.drop(held)
        self.dropping(held)

    async def stats(self) -> dict[str, Any]:
        """What `/stats` answers: the pool's ledger, and what this process knows of itself."""
        return {"pool": await self.pool.aio.stats(), "gateway": self.describe()}

    def describe(self) -> dict[str, Any]:
        """What this process knows of itself."""
        return {
            **self.counters.as_dict(),
            "in_flight": self.admission.calls,
            "memory": {"bytes": self.admission.bytes, "most": self.admission.max_bytes},
            "stalled": self.admission.stalled,
            "paused": any(model.upstream.paused for model in self.models),
            "held": sum(model.upstream.waiting for model in self.models),
            "sessions": {"count": len(self.sessions), "tokens": self.sessions.tokens},
            "outbox": {"calls": self.recorder.outbox.waiting, "bytes": self.recorder.outbox.bytes},
            "trouble": self.trouble,
            "upstream": dict(sum((model.upstream.counters for model in self.models), Counter())),
            "servers": self.models.servers(),
        }

    def metrics(self) -> Iterator[Metric]:
        """Counters and gauges as Prometheus' metrics."""
        yield from self.counters.families()
        yield loop_tasks(PREFIX)
        one = {
            "in_flight": ("calls under way", self.admission.calls),
            "memory_bytes": ("what calls under way hold, of --memory-mb", self.admission.bytes),
            "stalled": ("clients that an answer waits for", self.admission.stalled),
            "behind_seconds": ("how far the event loop is behind", round(self.admission.behind_s, 6)),
            "held": ("calls that wait for a resume", sum(model.upstream.waiting for model in self.models)),
            "sessions": ("running trajectories in memory", len(self.sessions)),
            "session_tokens": ("tokens of running trajectories in memory", self.sessions.tokens),
            "outbox_calls": ("calls whose steps wait for the pool", self.recorder.outbox.waiting),
            "outbox_bytes": ("their size", self.recorder.outbox.bytes),
            "ready": ("1 where calls are taken", int(self.why_not_ready is None)),
            "degraded": ("1 where steps wait for the pool or are lost, or a task fails", int(self.trouble is not None)),
        }
        for name, (meaning, value) in one.items():
            yield family(PREFIX + name, "gauge", meaning, [({}, value)])
        for name, (meaning, samples) in self.models.gauges().items():
            yield family(PREFIX + name, "gauge", meaning, samples)
