"""The reward loop: what nobody scored is scored and annotated in the pool, and agents never wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.rewards.recorded import record

from headrace import DataPool
from headrace.pool.errors import Gone, PoolUnreachable, Unauthorized
from headrace.rewards.loop import RewardLoop
from headrace.rewards.recorded import SampleReader
from headrace.rewards.sample import RewardFailure, Sample, Score
from headrace.tokens import Renderer

Verdict = Score | RewardFailure


class Worker:
    """A reward worker of a user's own: scores by a function, once `go` is set; remembers what it was given."""

    def __init__(self, judge: Callable[[Sample], Verdict]) -> None:
        self.judge = judge
        self.given: list[Sample] = []
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        self.at_once = self.most_at_once = 0

    async def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        self.given += samples
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.asked.set()
        await self.go.wait()
        self.at_once -= 1
        return [self.judge(sample) for sample in samples]

    async def aclose(self) -> None: ...


def by_length(sample: Sample) -> Verdict:
    return Score(float(len(sample.text)), {"length": float(len(sample.text))}, {"truth": sample.ground_truth})


@asynccontextmanager
async def scoring(
    pool: DataPool, worker: Worker, reader: SampleReader, channels: Sequence[str] = ("train",), **options: Any
) -> AsyncIterator[RewardLoop]:
    """A loop that runs until the block ends."""
    loop = RewardLoop(pool, worker, reader, channels=channels, **options)
    ready = asyncio.Event()
    running = asyncio.create_task(loop.run(ready.set))
    try:
        await asyncio.wait({running, waiting := asyncio.create_task(ready.wait())}, return_when="FIRST_COMPLETED")
        waiting.cancel()
        yield loop
        assert not running.done(), running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def fetched(pool: DataPool, groups: int = 1, channel: str = "train") -> Any:
    """The next batch, however long it takes to be annotated."""
    found = await pool.aio.fetch_batch(groups, channel=channel, timeout=240)
    assert found is not None
    return found


async def test_groups_are_handed_out_once_all_of_them_is_annotated(
    pool: DataPool, renderer: Renderer, reader: SampleReader
) -> None:
    for n in range(4):
        record(pool, renderer, f"t{n}", [("q", "x" * n)], prompt_uid="p", n_rollouts=4, row={"answer": n})
    async with scoring(pool, Worker(by_length), reader) as loop:
        batch = await fetched(pool)
        assert loop.told() == {
            "scored": 4, "kept": 0, "late": 0, "quarantined": 0, "waited": 0, "failures": {},
        }  # fmt: skip
    assert batch.groups[0].rewards == [0.0, 1.0, 2.0, 3.0]
    assert [step.metadata["reward_source"] for step in batch.steps] == ["model"] * 4
    assert [step.metadata["reward_extra_info"] for step in batch.steps] == [
        {"length": float(n), "truth": n} for n in range(4)
    ]


async def test_an_agent_completes_while_its_judge_is_still_thinking(
    pool: DataPool, renderer: Renderer, reader: SampleReader
) -> None:
    worker = Worker(by_length)
    worker.go.clear()
    async with scoring(pool, worker, reader):
        record(pool, renderer, "first", [("q", "abc")])
        await worker.asked.wait()
        record(pool, renderer, "second", [("q", "abcd")])  # agents go on: the first is with the judge
        assert (await pool.aio.complete("second")).status == "ok"
        assert await pool.aio.fetch_batch(1, timeout=0) is None  # and nothing goes out without its reward
        worker.go.set()
        batch = await fetched(pool, 2)
    assert [group.rewards for group in batch.groups] == [[3.0], [4.0]]


async def test_every_step_has_its_own_reward(pool: DataPool, renderer: Renderer, reader: SampleReader) -> None:
    values = {"search": 0.3, "open": 0.7, "read": 0.9, "answer": 0.8}
    worker = Worker(lambda sample: Score(values[sample.text]))
    record(pool, renderer, "t", [("go on", name) for name in values])
    async with scoring(pool, worker, reader, on="step") as loop:
        batch = await fetched(pool)
        assert loop.counts["scored"] == 1
    assert [step.reward for step in batch.steps] == [0.3, 0.7, 0.9, 0.8]
    assert [len(sample.messages) for sample in worker.given] == [2, 4, 6, 8]


async def test_a_sample_that_fails_is_quarantined_with_its_reason_and_another_takes_its_place(
    pool: DataPool, renderer: Renderer, reader: SampleReader
) -> None:
    def judge(sample: Sample) -> Verdict:
        return RewardFailure("nan", "not_a_number", "my rule") if sample.text == "bad" else by_length(sample)

    record(pool, renderer, "good", [("q", "good")], prompt_uid="p", n_rollouts=2)
    record(pool, renderer, "bad", [("q", "bad")], prompt_uid="p", n_rollouts=2)
    async with scoring(pool, Worker(judge), reader) as loop:
        while not loop.counts["quarantined"]:
            await asyncio.sleep(0)
        assert await pool.aio.fetch_batch(1, timeout=0) is None
        record(pool, renderer, "again", [("q", "again")], prompt_uid="p", n_rollouts=2)
        batch = await fetched(pool)
        assert loop.told()["failures"] == {"not_a_number": 1}
    assert [(t.uid, t.reward) for t in batch.groups[0].trajectories] == [("good", 4.0), ("again", 5.0)]
    with pytest.raises(Gone, match="reward: my rule: not_a_number: nan"):
        pool.trajectory("bad")
    stats = pool.stats("train")
    assert stats["ledger"]["quarantined"] == 1
    assert stats["balanced"]


async def test_a_score_that_the_pool_cannot_keep_is_a_failure_of_its_sample(
    pool: DataPool, renderer: Renderer, reader: SampleReader
) -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"more": deep}
    record(pool, renderer, "t", [("q", "a")])
    async with scoring(pool, Worker(lambda sample: Score(1.0, {}, deep)), reader) as loop:
        while not loop.counts["quarantined"]:
            await asyncio.sleep(0.01)
    assert loop.failures == {"wrong_type": 1}
    with pytest.raises(Gone, match="the pool refuses its score: info nests deeper"):
        pool.trajectory("t")


async def test_what_is_out_of_reach_is_waited_for_and_then_scored(
    pool: DataPool, renderer: Renderer, reader: SampleReader
) -> None:
    tries = iter([RewardFailure("refused", "unavailable"), RewardFailure("refused", "unavailable")])
    record(pool, renderer, "t", [("q", "abc")])
    async with scoring(pool, Worker(lambda sample: next(tries, None) or by_length(sample)), reader) as loop:
        batch = await fetched(pool)
        assert loop.told() | {"failures": {}} == {
            "scored": 1, "kept": 0, "late": 0, "quarantined": 0, "waited": 2, "failures": {},
        }  # fmt: skip
    assert batch.groups[0].rewards == [3.0]


async def test_what_stays_out_of_reach_is_quarantined(pool: DataPool, renderer: Renderer, reader: SampleReader) -> None:
    now = 0.0

    def judge(sample: Sample) -> Verdict:
        nonlocal now
        now += 10
        return RewardFailure("refused", "unavailable", "judge")

    record(pool, renderer, "t", [("q", "a")])
    async with scoring(pool, Worker(judge), reader, patience_s=15, clock=lambda: now) as loop:
        while not loop.counts["quarantined"]:
            await asyncio.sleep(0.01)
    assert (loop.counts["waited"], loop.failures) == (2, {"unavailable": 1})


async def test_a_person_wins_over_a_model_before_during_and_after(
    pool: DataPool, renderer: Renderer, reader: SampleReader
) -> None:
    worker = Worker(by_length)
    worker.go.clear()
    for uid in ("before", "during", "after"):
        record(pool, renderer, uid, [("q", "abc")])
    pool.configure("train", require_reward=True)
    assert pool.reward("before", -1.0, source="person") == "ok"
    async with scoring(pool, worker, reader) as loop:
        while len(worker.given) < 2:
            await asyncio.sleep(0)
        assert pool.reward("during", -2.0, source="person") == "ok"
        worker.go.set()
        while loop.counts["scored"] + loop.counts["kept"] < 2:
            await asyncio.sleep(0)
        assert (loop.counts["scored"], loop.counts["kept"]) == (1, 1)
        assert pool.trajectory("after").reward == 3.0
        assert pool.reward("after", -3.0, source="person") == "ok"
    batch = await fetched(pool, 3)
    assert [group.rewards for group in batch.groups] == [[-1.0], [-2.0], [-3.0]]
    assert [step.metadata["reward_source"] for step in batch.steps] == ["person"] * 3
    assert pool.reward("after", 1.0, source="person") == "late"


async def test_two_loops_side_by_side_do_no_harm(pool: DataPool, renderer: Renderer, reader: SampleReader) -> None:
    one, other = Worker(by_length), Worker(by_length)
    for n in range(20):
        record(pool, renderer, f"t{n}", [("q", "x" * n)])
    async with scoring(pool, one, reader) as first, scoring(pool, other, reader) as second:
        batch = await fetched(pool, 20)
        while first._in_hand or second._in_hand:
            await asyncio.sleep(0)
        assert first.counts["quarantined"] == second.counts["quarantined"] == 0
    assert [group.rewards for group in batch.groups] == [[float(n)] for n in range(20)]
    stats = pool.stats("train")
    assert stats["ledger"]["consumed"] == 20
    assert stats["balanced"]


async def test_what_is_scored_at_once_is_bounded_and_channels_share_the_room(
    pool: DataPool, renderer: Renderer, reader: SampleReader
) -> None:
    worker = Worker(by_length)
    for n in range(10):
        record(pool, renderer, f"t{n}", [("q", "a")])
        record(pool, renderer, f"v{n}", [("q", "ab")], channel="val")
    async with scoring(pool, worker, reader, ["train", "val"], concurrency=3):
        train, val = await asyncio.gather(fetched(pool, 10), fetched(pool, 10, "val"))
    assert worker.most_at_once <= 3
    assert {reward for group in train.groups for reward in group.rewards} == {1.0}
    assert {reward for group in val.groups for reward in group.rewards} == {2.0}


async def test_what_left_the_pool_meanwhile_is_late_and_nothing_else(
    pool: DataPool, renderer: Renderer, reader: SampleReader
) -> None:
    worker = Worker(by_length)
    worker.go.clear()
    record(pool, renderer, "t", [("q", "a")])
    async with scoring(pool, worker, reader) as loop:
        await worker.asked.wait()
        await pool.aio.forget("t")
        worker.go.set()
        while loop._in_hand:
            await asyncio.sleep(0)
    assert loop.told()["late"] == 1


class BegunAnew:
    """A pool whose process can end: calls then fail once, and go to another pool, which knows nothing of the first.
    With `retries` the client tries again by itself, and nobody hears of the failure."""

    def __init__(self, pool: DataPool, *, retries: bool) -> None:
        self.aio, self._retries = self, retries
        self._pool, self._gone = pool, asyncio.Event()

    def end(self, other: DataPool) -> None:
        self._pool = other
        gone, self._gone = self._gone, asyncio.Event()
        gone.set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            asked = asyncio.ensure_future(getattr(self._pool.aio, name)(*args, **kwargs))
            ended = asyncio.ensure_future(self._gone.wait())
            await asyncio.wait({asked, ended}, return_when="FIRST_COMPLETED")
            if asked.done():
                ended.cancel()
                return await asked
            asked.cancel()
            if not self._retries:
                raise PoolUnreachable("its process has ended")
            return await call(*args, **kwargs)

        return call


@pytest.mark.parametrize("retries", [False, True])
async def test_a_pool_that_was_begun_anew_hands_nothing_out_without_its_reward_either(
    pool: DataPool, renderer: Renderer, reader: SampleReader, retries: bool
) -> None:
    there = BegunAnew(pool, retries=retries)
    with DataPool() as anew:
        async with scoring(there, Worker(by_length), reader):  # type: ignore[arg-type]
            record(pool, renderer, "before", [("q", "a")])
            assert (await fetched(pool)).groups[0].rewards == [1.0]
            there.end(anew)
            record(anew, renderer, "first", [("q", "ab")])
            while anew.trajectory("first").reward is None:
                await asyncio.sleep(0)
            record(anew, renderer, "second", [("q", "abc")])
            assert anew.fetch_batch(2, timeout=0) is None  # the second has no reward yet
            batch = await fetched(anew, 2)
    assert [group.rewards for group in batch.groups] == [[2.0], [3.0]]


async def test_a_pool_that_refuses_the_loop_ends_it(pool: DataPool, reader: SampleReader) -> None:
    class Refusing:
        async def configure(self, channel: str, **options: Any) -> None:
            raise Unauthorized("no key")

    loop = RewardLoop(pool, Worker(by_length), reader, channels=["train"])
    loop._pool = Refusing()  # type: ignore[assignment]
    with pytest.raises(Unauthorized):
        await loop.run()
