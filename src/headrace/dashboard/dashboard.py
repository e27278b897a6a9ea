"""`Dashboard`: the views of one source, for an event loop.

All reading is done by one thread, a slice at a time, so that the loop is never held and the index has one user. The
pool is followed only while somebody looks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.dashboard import detail as details
from headrace.dashboard.about import About
from headrace.dashboard.compare import (
    Answer,
    Comparison,
    RunSummary,
    best_answer,
    compare,
    newest_rewarded,
    summary,
    with_parts,
)
from headrace.dashboard.consumption import ConsumptionPage, HistoryKeeper, consumption
from headrace.dashboard.curation import CurationRequest, CurationResult, Curator
from headrace.dashboard.earned import MAX_READ, EarnedReader
from headrace.dashboard.exports import ExportFormat, ExportResult, write_export
from headrace.dashboard.figures import LedgerRates, MetricsFile, group_record, survivors, waits
from headrace.dashboard.follow import PoolFollower, record_of
from headrace.dashboard.group_detail import MAX_TRAJECTORIES, GroupDetail, group_detail
from headrace.dashboard.index import TrajectoryIndex
from headrace.dashboard.records import (
    GroupPage,
    Overview,
    ShownConversation,
    StepTokens,
    SurvivorTable,
    TrajectoryDetail,
    TrajectoryPage,
    TrajectoryQuery,
    TrajectoryRecord,
)
from headrace.dashboard.search import SearchPage, search
from headrace.dashboard.source import PoolSource
from headrace.dashboard.why import Why, why
from headrace.data.errors import HeadraceError, InvalidInput
from headrace.data.trajectory import Trajectory
from headrace.pool.errors import Gone, NotFound, PoolUnreachable
from headrace.rewards.recorded import SampleReader
from headrace.tokens import Renderer

Found = TypeVar("Found")

#: Seconds between two sweeps, and after one that failed.
SWEEP_S = 2.0
#: The share of the time that is spent on reading: the first sweep's, for which somebody waits, and that of the others.
FIRST_SHARE, USUAL_SHARE = 0.5, 0.02
#: Seconds after the last request in which the pool is still followed.
IDLE_S = 60.0
#: Trajectories that are read at a time for the parts of their rewards.
PARTS_A_SLICE = 32

#: What is said to who would change something where nothing may be changed.
ONLY_READS = "this dashboard only reads: nothing can be changed here"

Servers = Callable[[], Sequence[Mapping[str, Any]]]


class Dashboard:
    """One source's views. `renderer` gives the tokenizer, or None until there is one; `about` what its run says of
    itself; `servers` the rollout servers' rows. Use it as `async with`, or `close` it; it starts by itself when it is
    first asked."""

    def __init__(
        self,
        source: PoolSource,
        *,
        metrics: Path | None = None,
        about: Callable[[], About | None] = lambda: None,
        renderer: Callable[[], Renderer | None] = lambda: None,
        servers: Servers = lambda: (),
        index: TrajectoryIndex | None = None,
        beside: Dashboard | None = None,
    ) -> None:
        self.source = source
        self._beside = beside
        self._index = index if index is not None else TrajectoryIndex()
        self._follower = PoolFollower(source, self._index)
        self._metrics = MetricsFile(metrics) if metrics is not None else None
        self._renderer, self._servers, self._about = renderer, servers, about
        self._reader: tuple[Renderer, SampleReader] | None = None
        self._rates = LedgerRates()
        self._overview: Overview | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dashboard")
        self._curator = Curator(source)
        self._history = HistoryKeeper(source)
        self._earned = EarnedReader(self._read)
        self._history_thread = ThreadPoolExecutor(1, thread_name_prefix="dashboard-history")
        self._task: asyncio.Task[None] | None = None
        self._asked_at = 0.0
        self._swept = asyncio.Event()
        self._trouble: str | None = None
        self._rests = True

    # -- views ---------------------------------------------------------------------------------------------------------

    async def overview(self) -> Overview:
        """The figures; those of the last sweep where the pool does not answer."""
        await self._attend(whole=False)
        return await self._run(self._make_overview)

    async def about(self) -> About | None:
        """What its run says of itself; None where there is no run, or it has not ended yet."""
        return await self._run(self._about)

    async def curves(self) -> dict[str, Any]:
        """The trainer's curves; none without metrics."""
        await self._attend(whole=False)
        return {} if self._metrics is None else await self._run(self._metrics.curves)

    async def survivors(self) -> list[SurvivorTable]:
        """What was submitted against what a trainer took."""
        await self._attend(whole=False)
        return await self._run(lambda: survivors(self._index))

    async def trajectories(self, query: TrajectoryQuery) -> TrajectoryPage:
        """A page of a query, as far as the index has come."""
        await self._attend(whole=False)
        return await self._run(lambda: self._index.page(query))

    async def choices(self) -> dict[str, Any]:
        """What filters may be set to: channels, states and tags; and whether people may curate here."""
        await self._attend(whole=False)
        channels = list(self._follower.stats.get("channels", ()))
        about = await self.about()
        return await self._run(
            lambda: {
                "channels": channels,
                "states": self._index.states(),
                "tags": self._index.tags()[:200],
                "editable": self.source.editable,
                "about": None if about is None else about.title,
                "beside": None if self._beside is None else self._beside.source.title,
            }
        )

    async def groups(self, channel: str | None, find: str, offset: int, limit: int) -> GroupPage:
        """A page of groups, newest first."""
        await self._attend(whole=False)

        def find_groups() -> tuple[list[tuple[list[TrajectoryRecord], Mapping[str, Any] | None]], int]:
            found, total = self._index.prompts(channel, find, offset, limit)
            row = self._follower.group_row
            return [(group, row(group[0].channel, group[0].prompt_uid)) for group in found if group], total

        groups, total = await self._run(find_groups)
        parts = iter(await self._reward_parts([one for group, _ in groups for one in group]))

        def make() -> GroupPage:
            return GroupPage([group_record(group, row, [next(parts) for _ in group]) for group, row in groups], total)

        return await self._run(make)

    async def group(self, channel: str, prompt_uid: str) -> GroupDetail:
        """What the trajectories of a group share, and where its best leaves its worst. Raises `NotFound` where none of
        them can be read."""
        await self._attend(whole=False)
        records = await self._run(lambda: self._index.group(channel, prompt_uid)[:MAX_TRAJECTORIES])

        def make() -> GroupDetail:
            found: list[Trajectory] = []
            for record in records:
                with suppress(Gone, NotFound):
                    found.append(self._read(channel, record.uid))
            if not found:
                raise NotFound(f"no trajectory of {prompt_uid!r} in channel {channel!r} can be read any more")
            return group_detail(found, self._sample_reader())

        return await self._run_on_history(make)

    async def trajectory(self, channel: str, uid: str, offset: int) -> TrajectoryDetail:
        """One trajectory with a page of its steps. Raises `NotFound` or `Gone`."""
        return await self._run(lambda: details.detail(self._read(channel, uid), offset))

    async def conversation(self, channel: str, uid: str, leaf: int) -> ShownConversation:
        """A branch as messages."""
        return await self._run(lambda: details.conversation(self._read(channel, uid), leaf, self._sample_reader()))

    async def tokens(self, channel: str, uid: str, step: int, offset: int | None, limit: int) -> StepTokens:
        """A run of a step's tokens."""

        def make() -> StepTokens:
            trajectory = self._read(channel, uid)
            earned = self._earned.step_rewards(self._index.group(channel, trajectory.prompt_uid))
            return details.step_tokens(trajectory, step, offset, limit, self._renderer(), earned)

        return await self._run(make)

    async def consumption(self, offset: int, limit: int) -> ConsumptionPage:
        """A page of the batches that consumers got, newest first; without a journal the pool's latest events."""

        def make() -> ConsumptionPage:
            history = self._history.get()
            events = self.source.events() if history is None else []
            return consumption(history, offset, limit, events=events, read_at=self._history.read_at)

        return await self._run_on_history(make)

    async def why(self, name: str, channel: str | None) -> list[Why]:
        """What became of what has that name. Raises `NotFound` for nothing, `InvalidInput` without a journal."""

        def make() -> list[Why]:
            history = self._history.get()
            if history is None:
                raise InvalidInput("this pool has no journal that can be read here; only a journal tells what became")
            return why(history, name, channel)

        return await self._run_on_history(make)

    async def search(self, query: TrajectoryQuery, text: str) -> SearchPage:
        """Trajectories of a query in which a text stands, from its offset on. Raises `InvalidInput` for no text."""
        await self._attend(whole=False)
        records = await self._run(lambda: self._index.matching(query))
        renderer = self._renderer()
        vocabulary = None if renderer is None else renderer.vocabulary
        return await self._run_on_history(lambda: search(records, text, query.offset, self._read, vocabulary))

    async def export(self, query: TrajectoryQuery, what: ExportFormat, path: Path) -> ExportResult:
        """Writes all that fit a query, whichever page it asks for, to a file. Raises `InvalidInput` where they cannot
        be written so."""
        await self._attend(whole=False)
        keys = await self._run(lambda: self._index.keys(query))
        filters = {name: value for name, value in msgspec.to_builtins(query).items() if value not in (None, "")}
        for name in ("sort", "descending", "offset", "limit"):
            filters.pop(name, None)

        def write() -> ExportResult:
            reader, title = self._sample_reader(), self.source.title
            return write_export(path, what, keys, self._read, reader=reader, source=title, filters=filters)

        return await self._run_on_history(write)

    async def comparison(self, offset: int, limit: int) -> Comparison:
        """This run and the one beside it. Raises `InvalidInput` where there is none."""
        beside = self._other()
        await self._attend(whole=False)
        await beside._attend(whole=False)
        read = self._follower.done_once and beside._follower.done_once  # before: what is read meanwhile is not all here
        own, others = await self.curves(), await beside.curves()
        here, there = await self._summary(), await beside._summary()
        found = await self._run_on_history(lambda: compare(here, there, (own, others), offset, limit))
        return msgspec.structs.replace(found, reading=not read)

    async def _summary(self) -> RunSummary:
        index = self._index
        run, newest = await self._run(lambda: (summary(self.source.title, index), newest_rewarded(index)))
        return with_parts(run, await self._reward_parts(newest))

    async def _reward_parts(self, records: Sequence[TrajectoryRecord]) -> list[dict[str, float]]:
        """What each one's reward is made of, as `EarnedReader.parts`, a slice at a time."""
        found: list[dict[str, float]] = []
        for at in range(0, len(records), PARTS_A_SLICE):
            most = max(0, min(PARTS_A_SLICE, MAX_READ - at))
            found += await self._run(partial(self._earned.parts, records[at : at + PARTS_A_SLICE], most))
        return found

    async def answers(self, prompt_uid: str) -> list[Answer]:
        """The last answer of a prompt's best trajectory, here and in the run beside it."""
        return [await self._best_answer(prompt_uid), await self._other()._best_answer(prompt_uid)]

    async def _best_answer(self, prompt_uid: str) -> Answer:
        rows = await self._run(lambda: self._index.matching(TrajectoryQuery(prompt_uid=prompt_uid, sort="reward")))
        rewarded = sorted((row for row in rows if row.reward is not None), key=lambda row: row.reward or 0.0)
        if not rows:
            raise NotFound(f"{self.source.title} has no prompt {prompt_uid!r}")
        best = rewarded[-1] if rewarded else rows[0]
        try:
            found = await self._run_on_history(lambda: self._read(best.channel, best.uid))
        except (Gone, NotFound):
            return Answer(best.uid, best.reward, None, "it has left the pool")
        return await self._run_on_history(lambda: best_answer(found, self._sample_reader()))

    def _other(self) -> Dashboard:
        if self._beside is None:
            raise InvalidInput("there is no run beside this one; start the dashboard with --beside TARGET")
        return self._beside

    async def curate(self, request: CurationRequest, query: TrajectoryQuery | None) -> CurationResult:
        """Changes what a person decided about steps. Raises `InvalidInput` where this dashboard only reads."""
        self._check_editable()

        def change() -> CurationResult:
            if query is not None:
                keys = [(channel, uid) for channel, _, uid in self._index.keys(query)]
            else:
                keys = [(request.channel or "", request.uid or "")]
            done = self._curator.apply(keys, request.step, request.changes, request.by)
            self._reread(keys)
            return done

        return await self._run(change)

    async def undo(self, by: str) -> CurationResult:
        """Takes the last change by hand back. Raises `InvalidInput` where there is none, or nothing may change."""
        self._check_editable()

        def change() -> CurationResult:
            done, keys = self._curator.undo(by)
            self._reread(keys)
            return done

        return await self._run(change)

    async def settled(self) -> None:
        """Waits until a sweep that begins after this call has gone through the whole pool."""
        await self._attend(whole=True)

    async def read_once(self) -> None:
        """Waits until the whole pool was read once. Nothing rests from then on: whoever asks does nothing else
        meanwhile. Raises `PoolUnreachable` where it does not answer."""
        self._rests = self._history.rests = False
        while not self._follower.done_once:
            self._look()
            swept = self._swept
            with suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S):
                    await swept.wait()
            if self._trouble is not None:
                raise PoolUnreachable(self._trouble)

    # -- following -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Ends following; the source stays its owner's."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._thread.shutdown(wait=True)
        self._history_thread.shutdown(wait=True)
        if self._beside is not None:
            await self._beside.close()

    async def __aenter__(self) -> Dashboard:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _attend(self, *, whole: bool) -> None:
        """Has the pool followed from now on; with `whole`, waits for two sweeps to end, the second of which began
        after this call."""
        self._look()
        for _ in range(2 if whole else 0):
            self._swept = swept = asyncio.Event()
            while not swept.is_set():
                self._look()  # a sweep may take longer than a pool is followed with nobody looking
                with suppress(TimeoutError):
                    async with asyncio.timeout(SWEEP_S):
                        await swept.wait()

    def _look(self) -> None:
        """Notes that somebody looks."""
        self._asked_at = time.monotonic()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        share = FIRST_SHARE
        while time.monotonic() - self._asked_at < IDLE_S:
            try:
                sweep = self._follower.sweep()
                while await self._slice(sweep, share):
                    pass
                if self._metrics is not None:
                    while await self._run(self._metrics.refresh):
                        pass
                self._trouble, share = None, USUAL_SHARE
            except HeadraceError as error:
                self._trouble = str(error)
            except OSError as error:
                self._trouble = f"{type(error).__name__}: {error}"
            swept, self._swept = self._swept, asyncio.Event()
            swept.set()
            await asyncio.sleep(SWEEP_S)

    async def _slice(self, sweep: Iterator[None], share: float) -> bool:
        """One slice, and then a rest that keeps reading to its share of the time; False once the sweep is over."""

        def read() -> tuple[bool, float]:
            begun = time.perf_counter()
            goes_on = next(sweep, sweep) is None
            return goes_on, time.perf_counter() - begun

        goes_on, spent = await self._run(read)
        if self._rests:
            await asyncio.sleep(spent * (1.0 / share - 1.0))
        return goes_on

    async def _run(self, work: Callable[[], Found]) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _run_on_history(self, work: Callable[[], Found]) -> Found:
        """On a thread of its own: reading a journal takes seconds, and the other views do not wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._history_thread, work)

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _check_editable(self) -> None:
        if not self.source.editable:
            raise InvalidInput(ONLY_READS)

    def _reread(self, keys: Iterable[tuple[str, str]]) -> None:
        """Has the index say at once what was changed."""
        for channel, uid in keys:
            with suppress(HeadraceError):
                self._index.put(record_of(self._read(channel, uid)))

    def _read(self, channel: str, uid: str) -> Trajectory:
        return self.source.trajectory(channel, uid)

    def _sample_reader(self) -> SampleReader | None:
        renderer = self._renderer()
        if renderer is None:
            return None
        if self._reader is None or self._reader[0] is not renderer:
            self._reader = (renderer, SampleReader(renderer))
        return self._reader[1]

    def _make_overview(self) -> Overview:
        trouble = self._trouble
        try:
            self._follower.stats = self.source.stats()
        except (HeadraceError, OSError) as error:
            trouble = trouble or str(error)
        stats = self._follower.stats
        channels: dict[str, Any] = stats.get("channels", {})
        servers = [dict(row) for row in self._servers()]
        ledger = stats.get("ledger", {})
        dropped: dict[str, int] = {}
        for row in channels.values():
            for reason, count in row["ledger"]["dropped"].items():
                dropped[reason] = dropped.get(reason, 0) + count
        now = time.time()
        return Overview(
            title=self.source.title,
            at=now,
            trouble=trouble,
            indexing=not self._follower.done_once,
            indexed=len(self._index),
            ledger={**ledger, "dropped": dropped},
            balanced=stats.get("balanced", True),
            channels=[_channel(name, row) for name, row in channels.items()],
            rates=self._rates.add(now, ledger),
            waits=waits(channels, servers),
            servers=servers,
            metrics_rows=0 if self._metrics is None else len(self._metrics),
            scored_groups=_scored_groups(stats.get("desk", {})),
        )


def _scored_groups(desk: Mapping[str, Any]) -> dict[str, Any] | None:
    """The figures of what environments post to the Trajectory API; None where none ever did."""
    if not desk or not (desk["posted"] or desk["environments"]):
        return None
    found = {name: desk[name] for name in ("environments", "posted", "queued", "buffered", "out", "served", "step")}
    return {**found, "dead letters": sum(desk["dead_letters"].values()), "duplicates": desk["duplicates"]}


def _channel(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "groups": row["groups"],
        "trajectories": row["trajectories"],
        "leases": row["leases"],
        "policy_version": row["policy_version"],
        "oldest_version": row["oldest_version"],
        "closed": row["closed"],
        "capacity": row["config"].get("max_queue_size"),
        "counts": row["counts"],
    }
