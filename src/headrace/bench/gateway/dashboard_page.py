"""What an open dashboard costs the gateway: its throughput beside one that nobody looks at, and how long its event loop
is held meanwhile."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from headrace.bench.gateway.load import GatewayLoad, GatewaySizes, LoadTarget
from headrace.bench.gateway.loop_watch import LongestHold, start_watched_gateway
from headrace.bench.gateway.servers import gateway_flags, ready, start_stub
from headrace.bench.report import Figures
from headrace.bench.server_process import ServerProcess
from headrace.bench.timing import in_turn, median

API = "/dashboard/api/"
#: Seconds between two views that are opened: somebody who clicks through the page without reading it.
CLICK_S = 1.0


class OpenPage:
    """Somebody's page, in a thread of its own: its live stream is open, and one view after the other is looked at, each
    with the requests that the page sends for it. `views` counts them."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._ended = threading.Event()
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="bench-page", daemon=True)
        self.views = 0

    @property
    def failed(self) -> bool:
        """Whether it ended by itself; closing it then says why."""
        return self._failure is not None

    def __enter__(self) -> OpenPage:
        self._thread.start()
        self._opened.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        if self._failure is not None and error is None:
            raise RuntimeError("the page failed") from self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._look())
        except BaseException as failure:  # it is told where the page is closed
            self._failure = failure
        finally:
            self._opened.set()

    async def _look(self) -> None:
        async with aiohttp.ClientSession(self._address, raise_for_status=True) as session:
            stream = asyncio.create_task(self._stream(session))
            try:
                for view in cycle((self._overview, self._trajectories, self._trajectory, self._groups)):
                    await view(session)
                    self.views += 1
                    self._opened.set()
                    if await asyncio.to_thread(self._ended.wait, CLICK_S):
                        return
                    if stream.done():
                        stream.result()
            finally:
                stream.cancel()
                await asyncio.gather(stream, return_exceptions=True)

    async def _stream(self, session: aiohttp.ClientSession) -> None:
        """The live figures; a stream ends by itself every few seconds, and is opened again."""
        while True:
            async with session.get(f"{API}live") as answer:
                async for _ in answer.content:
                    pass

    async def _overview(self, session: aiohttp.ClientSession) -> None:
        await asyncio.gather(*[_get(session, name) for name in ("curves", "survivors")])

    async def _trajectories(self, session: aiohttp.ClientSession) -> None:
        await asyncio.gather(_get(session, "choices"), _get(session, "trajectories", limit=50))

    async def _trajectory(self, session: aiohttp.ClientSession) -> None:
        rows = (await _get(session, "trajectories", limit=1))["rows"]
        for row in rows:
            named = {"channel": row["channel"], "uid": row["uid"]}
            found = await _get(session, "trajectory", **named)
            await _get(session, "conversation", **named, leaf=found["leaves"][-1])
            await _get(session, "tokens", **named, step=found["steps"][-1]["step_index"], limit=500)

    async def _groups(self, session: aiohttp.ClientSession) -> None:
        for row in (await _get(session, "groups", limit=20))["rows"][:1]:
            await _get(session, "group", channel=row["channel"], uid=row["prompt_uid"])


async def _get(session: aiohttp.ClientSession, name: str, **asked: Any) -> Any:
    async with session.get(API + name, params=asked) as answer:
        return orjson.loads(await answer.read())


def dashboard_page(sizes: GatewaySizes, folder: Path) -> Figures:
    """`dashboard_throughput` and `dashboard_loop_ms_max`: 16 agents call a gateway whose dashboard is open, and then
    one that nobody looks at, round by round; both keep what they record. Then a lone agent calls the one and the
    other in turn with the page open, while it shows some views: by how much a task of the gateway's loop, which wakes
    up every millisecond, then comes late at most. A lone agent, since the calls of many that came together are worked
    off together, with or without a page."""
    with (
        start_stub(folder, sizes) as stub,
        start_watched_gateway(folder / "looked-at", *gateway_flags(stub, folder)) as looked_at,
        start_watched_gateway(folder / "alone", *gateway_flags(stub, folder)) as alone,
        GatewayLoad(sizes) as load,
    ):
        ready(looked_at, alone)
        pages: list[OpenPage] = []
        cpu: dict[ServerProcess, list[float]] = {looked_at: [], alone: []}

        def rate(gateway: ServerProcess) -> float:
            before = gateway.cpu_s()
            some = sizes.some_callers
            found = load.round(LoadTarget(gateway.address), some, some * sizes.page_trajectories_a_caller)
            cpu[gateway].append((gateway.cpu_s() - before) / len(found.latencies))
            return found.rate

        def rate_with_page() -> float:
            with OpenPage(looked_at.address) as page:
                pages.append(page)
                return rate(looked_at)

        with_rates, without_rates = in_turn(rate_with_page, partial(rate, alone), sizes.page_rounds)
        longest, longest_without = LongestHold(folder / "looked-at"), LongestHold(folder / "alone")
        longest.reset()
        longest_without.reset()
        with OpenPage(looked_at.address) as page:
            pages.append(page)
            while page.views < sizes.page_views and not page.failed:
                load.round(LoadTarget(looked_at.address), 1, 1)
                load.round(LoadTarget(alone.address), 1, 1)
    ratios = [a / b for a, b in zip(with_rates, without_rates, strict=True)]
    return Figures(
        {"dashboard_throughput": median(ratios), "dashboard_loop_ms_max": longest.seconds * 1e3},
        {
            "dashboard_req_s": median(with_rates),
            "dashboard_req_s_without": median(without_rates),
            "dashboard_cpu_ms": median(cpu[looked_at]) * 1e3,
            "dashboard_cpu_ms_without": median(cpu[alone]) * 1e3,
            "dashboard_loop_ms_max_without": longest_without.seconds * 1e3,
            "dashboard_loop_cpu_ms_max": longest.cpu_s * 1e3,
            "dashboard_loop_cpu_ms_max_without": longest_without.cpu_s * 1e3,
            "dashboard_views": float(sum(page.views for page in pages)),
        },
    )
