"""`Gateway`: the parts of one gateway, put together. No module globals: two can live in one process.

It serves at once; what needs tokens is refused until the tokenizer is loaded and the rollout servers are found to
match.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request

from headrace.data.errors import HeadraceError
from headrace.gateway.access import Access
from headrace.gateway.calls import Calls
from headrace.gateway.counters import Counters
from headrace.gateway.errors import RETRY_AFTER_S, Refusal, not_ready
from headrace.gateway.planner import Planner
from headrace.gateway.recorder import Recorder
from headrace.gateway.sampling import Sampling
from headrace.gateway.sessions import Sessions
from headrace.gateway.settings import Settings
from headrace.gateway.upstream import Options, Upstream
from headrace.pool.embedded import DataPool
from headrace.pool.remote import RemotePool
from headrace.serving import BodyTooLarge, read_body
from headrace.tokens import Renderer, load_renderer

log = logging.getLogger("headrace.gateway")

LOADING = "Gateway not ready (tokenizer still loading)"
PROBING = "Gateway not ready (rollout servers being probed)"
#: Seconds that a request's body may take to arrive.
BODY_S = 60


class Others(Protocol):
    """Processes that serve the same port."""

    async def dropped(self, uid: str) -> None:
        """Lets them forget what they know of a trajectory."""
        ...


class Gateway:
    """One gateway on one pool. `start` and `close` are its application's lifespan."""

    def __init__(self, pool: DataPool | RemotePool, settings: Settings, *, outbox_file: Path | None = None) -> None:
        self.pool = pool
        self.settings = settings
        self.counters = Counters()
        self.access = Access(settings)
        self.sampling = Sampling(settings)
        self.upstream = Upstream(
            settings.addresses,
            Options(
                balance=settings.balance,
                wire=settings.wire,
                log_prob_mode=settings.logprobs_mode,
                connect_s=settings.connect_s,
                idle_s=settings.idle_s,
                call_s=settings.call_s,
                api_key=settings.upstream_key,
            ),
        )
        self.recorder = Recorder(pool, self.counters, outbox_mb=settings.outbox_mb, ack=settings.ack, file=outbox_file)
        self.sessions = Sessions(
            pool.aio, self.recorder.flushed, most_tokens=settings.cached_tokens, open_unknown=settings.open
        )
        self.loaded: Callable[[], None] = lambda: None  # told once the tokenizer is there
        self.others: Others | None = None  # the other workers, where this process is one of several
        self.in_flight = 0
        self._most_body = int(settings.max_body_mb * 1e6)
        self._calls: Calls | None = None
        self._loading: asyncio.Task[None] | None = None
        self._not_ready: str = LOADING

    # -- its life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.recorder.start()
        self._loading = asyncio.create_task(self._load(), name="headrace-load")

    async def close(self, patience: float | None = None) -> None:
        """Sends what waits in the outbox, then lets go of everything but the pool."""
        left = await self.recorder.close(patience)
        if left:
            log.error("%d steps did not reach the pool", left)
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._calls is not None:
            self._calls.planner.close()
        await self.upstream.close()

    async def _load(self) -> None:
        settings = self.settings
        try:
            renderer = await _in_thread(settings.tokenizer_path, settings.renderer)
            self._not_ready = PROBING
            await self._adopt_version()
            await self.upstream.start(renderer.vocabulary)
        except (HeadraceError, OSError, ImportError) as error:
            self._not_ready = f"Gateway not ready: {error}"
            log.error("%s", self._not_ready)
            return
        except Exception as error:
            self._not_ready = f"Gateway not ready: {type(error).__name__}: {error}"
            log.exception("the tokenizer could not be loaded")
            return
        planner = Planner(
            renderer,
            self.sessions,
            self.sampling,
            self.counters,
            mode=settings.history,
            shared=not isinstance(self.pool, DataPool),
        )
        self._calls = Calls(planner, self.upstream, self.sessions, self.recorder, self.counters)
        self.loaded()
        if self.upstream.trouble:
            log.error("Gateway not ready: %s", self.upstream.trouble)

    async def _adopt_version(self) -> None:
        """A restarted gateway goes on with the version that the pool knows, unless it was told one meanwhile."""
        try:
            stats = await self.pool.aio.stats()
        except HeadraceError as error:
            log.warning("the pool's version is not known: %s", error)
            return
        if any(self.upstream.versions.values()):
            return
        channels = stats.get("channels", {})
        self.upstream.set_version(max((int(found.get("policy_version", 0)) for found in channels.values()), default=0))

    # -- what routes need ----------------------------------------------------------------------------------------------

    @property
    def why_not_ready(self) -> str | None:
        if self._calls is None:
            return self._not_ready
        return f"Gateway not ready: {self.upstream.trouble}" if self.upstream.trouble else None

    @property
    def calls(self) -> Calls:
        """What carries calls out; `Refusal` until it can."""
        why = self.why_not_ready
        if why is not None or self._calls is None:
            raise not_ready(why or LOADING)
        return self._calls

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Room for one more call; 503 where there is none."""
        if self.in_flight >= self.settings.max_in_flight:
            raise Refusal(
                f"{self.in_flight} calls are under way, and no more are taken at once; try again",
                503,
                code="too_busy",
                retry_after=RETRY_AFTER_S,
            )
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def body(self, request: Request) -> bytes:
        try:
            async with asyncio.timeout(BODY_S):
                return await read_body(request, self._most_body)
        except BodyTooLarge:
            most = self.settings.max_body_mb
            raise Refusal(f"the body is larger than {most:g} MB (--max-body-mb)", 413, code="body_too_large") from None
        except TimeoutError:
            raise Refusal(f"the body did not arrive within {BODY_S} s", 408, code="body_too_slow") from None

    async def forget(self, uid: str) -> None:
        """Drops what is known of a trajectory, here and in the other workers: the pool knows better now."""
        self.sessions.drop(uid)
        if self.others is not None:
            await self.others.dropped(uid)

    async def stats(self) -> dict[str, Any]:
        return {"pool": await self.pool.aio.stats(), "gateway": self.describe()}

    def describe(self) -> dict[str, Any]:
        """What this process knows of itself."""
        return {
            **self.counters.as_dict(),
            "in_flight": self.in_flight,
            "paused": self.upstream.paused,
            "held": self.upstream.waiting,
            "sessions": {"count": len(self.sessions), "tokens": self.sessions.tokens},
            "outbox": {"calls": self.recorder.outbox.waiting, "bytes": self.recorder.outbox.bytes},
            "trouble": self.recorder.trouble,
            "upstream": dict(self.upstream.counters),
            "servers": self.upstream.describe(),
        }

    def metrics(self) -> str:
        servers = self.upstream.describe()
        one = {
            "in_flight": ("calls under way", self.in_flight),
            "held": ("calls that wait for a resume", self.upstream.waiting),
            "sessions": ("running trajectories in memory", len(self.sessions)),
            "session_tokens": ("tokens of running trajectories in memory", self.sessions.tokens),
            "outbox_calls": ("calls whose steps wait for the pool", self.recorder.outbox.waiting),
            "outbox_bytes": ("their size", self.recorder.outbox.bytes),
            "policy_version": ("the newest policy version", self.upstream.version),
            "ready": ("1 where calls are taken", int(self.why_not_ready is None)),
            "degraded": ("1 where steps wait for the pool or are lost", int(self.recorder.trouble is not None)),
        }
        gauges: dict[str, tuple[str, list[tuple[dict[str, str], float]]]] = {
            name: (meaning, [({}, float(value))]) for name, (meaning, value) in one.items()
        }
        gauges["server_up"] = (
            "1 where a rollout server takes calls",
            [({"server": found["address"]}, float(found["state"] == "up")) for found in servers],
        )
        gauges["upstream"] = (
            "what happened on the way to rollout servers",
            [({"event": name}, float(count)) for name, count in sorted(self.upstream.counters.items())],
        )
        return self.counters.prometheus(gauges)


async def _in_thread(path: str, family: str) -> Renderer:
    """Loads a renderer in a thread that nobody waits for at the end."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Renderer] = loop.create_future()

    def told(outcome: Renderer | BaseException) -> None:
        if loaded.done():
            return
        if isinstance(outcome, BaseException):
            loaded.set_exception(outcome)
        else:
            loaded.set_result(outcome)

    def load() -> None:
        try:
            outcome: Renderer | BaseException = load_renderer(path, family)
        except BaseException as error:
            outcome = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(told, outcome)

    threading.Thread(target=load, name="headrace-tokenizer", daemon=True).start()
    return await loaded
