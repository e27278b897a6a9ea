"""Scored groups under random calls, crashes and recoveries, against a simple model of what trainers and environments
are owed.

The model knows what was acknowledged and who got it; it never looks into the pool. Groups are known by the first token
of their first sequence, which stays theirs wherever they go.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.pool.journal.kit import Crashing, check_rules, dump, same
from tests.pool.scored.kit import environment, names, posting, queued, scored_stats, trainer

from headrace import DataPool, Step
from headrace.data.scored import decode
from headrace.pool.config import Limits
from headrace.pool.scored.types import Posted, ScoredBatch

sizes = st.sampled_from([1, 2, 2, 2, 4, 5])


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-"))
        self.files = Crashing()
        self.now = 1000.0
        self.name = 0
        self.envs: list[int] = []  # group sizes
        self.started = self.serving = False
        self.kept: set[int] = set()  # acknowledged, and not with anybody for good
        self.gone: set[int] = set()  # acknowledged by a trainer, or fetched
        self.buried = 0  # dead letters before the last reset
        self.out: dict[str, tuple[float, list[int]]] = {}
        self.back: dict[str, list[int]] = {}  # what was out, and was taken back
        self.keys: dict[tuple[int | None, str], tuple[int, Posted]] = {}
        self.step = 0
        self.pool: DataPool

    # -- the pool ------------------------------------------------------------------------------------------------------

    @initialize(
        batch_size=st.sampled_from([2, 4, 6]),
        memory_mb=st.sampled_from([0.0, 0.001, 1024.0]),
        segment=st.sampled_from([0.001, 64]),
    )
    def begin(self, batch_size: int, memory_mb: float, segment: float) -> None:
        self.batch_size = batch_size
        self.options: dict[str, Any] = {
            "durability": "os",
            "segment_mb": segment,
            "limits": Limits(desk_memory_mb=memory_mb),
        }
        self.pool = self.opened(self.folder / "pool")
        self.pool.desk_register(trainer(batch_size=batch_size))

    def opened(self, folder: Path) -> DataPool:
        return DataPool(folder, clock=lambda: self.now, files=self.files, **self.options)

    def settled(self) -> dict[str, Any]:
        self.pool.stats()
        for lease, (deadline, _) in list(self.out.items()):
            if deadline <= self.now:
                self.give_back(lease)
        return dump(self.pool._state)

    def teardown(self) -> None:
        try:
            if hasattr(self, "pool"):
                self.compact_and_reopen()
                self.pool.close()
        finally:
            self.files.crash()
            shutil.rmtree(self.folder)

    @rule()
    def crash(self) -> None:
        before = self.settled()
        self.files.crash()
        self.pool = self.opened(self.folder / "pool")
        self.pool.stats()
        assert same(before, dump(self.pool._state))

    @rule()
    def compact_and_reopen(self) -> None:
        before = self.settled()
        self.pool.compact()
        self.pool.close()
        self.pool = self.opened(self.folder / "pool")
        assert same(before, self.settled())

    @rule()
    def compact(self) -> None:
        self.pool.compact()

    @rule(seconds=st.sampled_from([1, 30]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.settled()

    # -- environments --------------------------------------------------------------------------------------------------

    @rule(group_size=sizes, share=st.sampled_from([None, None, 0.5]))
    def join(self, group_size: int, share: float | None) -> None:
        found = self.pool.desk_register_env(environment(group_size=group_size, min_batch_allocation=share))
        assert (found is not None) == self.started
        if found is not None:
            assert (found.env_id, found.wandb_name) == (len(self.envs), f"maze_{len(self.envs)}")
            assert found.starting_step == self.step
            self.envs.append(group_size)

    @precondition(lambda self: self.envs)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.pool.desk_disconnect(data.draw(st.integers(0, len(self.envs) - 1)))

    @rule(
        env=st.integers(-1, 3), sizes=st.lists(sizes, min_size=1, max_size=3), key=st.sampled_from(["", "", "a", "b"])
    )
    def post(self, env: int, sizes: list[int], key: str) -> None:
        whose = env if 0 <= env < len(self.envs) else None
        postings = []
        for at, size in enumerate(sizes):
            self.name += 1
            postings.append(posting(self.name, whose, size, f"{key}{at}" if key else ""))
        first = self.name - len(sizes) + 1
        for name, sent, answer in zip(
            range(first, self.name + 1), postings, self.pool.desk_post(postings), strict=True
        ):
            known = self.keys.get((whose, sent.key)) if sent.key else None
            if known is not None:
                assert answer == Posted(known[1].status, known[1].buffer_size, duplicate=True)
                continue
            assert not answer.duplicate
            buffered = whose is not None and sent.sequences != self.envs[whose]
            assert answer.status == ("buffered" if buffered else "received")
            self.kept.add(name)
            if sent.key:
                self.keys[whose, sent.key] = (name, answer)

    # -- trainers ------------------------------------------------------------------------------------------------------

    @rule(again=st.booleans())
    def take(self, again: bool) -> None:
        self.settled()
        request = f"request {self.step} {self.name} {self.now}" if again else ""
        batch = self.pool.desk_batch(request, lease_s=20)
        self.started = True
        if batch is None:
            return
        assert batch.lease not in self.out
        taken = names(batch)
        assert sum(len(decode(piece)["tokens"]) for piece in batch.pieces) == self.batch_size
        assert len(taken) == len(set(taken))
        assert self.kept.issuperset(taken)
        assert not any(set(taken) & set(others) for _, others in self.out.values())
        self.step += 1
        self.out[batch.lease] = (self.now + 20, taken)
        assert batch.step == self.step
        if again:
            repeated = self.pool.desk_batch(request, lease_s=20)
            assert isinstance(repeated, ScoredBatch)
            assert (repeated.lease, names(repeated)) == (batch.lease, taken)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), ack=st.booleans())
    def end(self, data: st.DataObject, ack: bool) -> None:
        self.settled()
        if not self.out:
            return
        lease = data.draw(st.sampled_from(sorted(self.out)))
        if ack:
            self.pool.desk_ack(lease)
            self.forget(self.out.pop(lease)[1])
        else:
            self.pool.desk_nack(lease)
            self.give_back(lease)

    def give_back(self, lease: str) -> None:
        self.back[lease] = self.out.pop(lease)[1]
        self.step -= 1

    @precondition(lambda self: self.out or self.back)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        """The trainer says that it has a batch, which is out or was taken back."""
        self.settled()
        lease = data.draw(st.sampled_from(sorted([*self.out, *self.back])))
        waiting = queued(self.pool)
        self.pool.desk_received(lease)
        if lease in self.out:
            self.forget(self.out.pop(lease)[1])
            return
        found = [name for name in self.back.pop(lease) if name in waiting]  # others are elsewhere by now
        self.step += 1 if found else 0
        self.forget(found)

    def forget(self, taken: list[int]) -> None:
        self.kept.difference_update(taken)
        self.gone.update(taken)

    @rule()
    def reset(self) -> None:
        self.settled()
        if self.step % 3:  # not too often: little happens before there is something to reset
            return
        self.serve(False)
        while self.fetch(1):
            pass  # what is in the channel stays there: only scored groups are reset
        self.pool.desk_reset()
        self.buried = sum(scored_stats(self.pool)["dead_letters"].values())
        self.kept, self.out, self.back, self.keys, self.envs = set(), {}, {}, {}, []
        self.step, self.started = 0, False
        self.pool.desk_register(trainer(batch_size=self.batch_size))

    # -- any producer, any consumer ------------------------------------------------------------------------------------

    @rule(on=st.booleans())
    def serve(self, on: bool) -> None:
        self.pool.desk_serve("train" if on else None)
        self.serving = on

    @rule()
    def submit(self) -> None:
        self.name += 1
        step = Step(
            prompt_ids=[self.name], response_ids=[5], trajectory_uid=f"t{self.name}", step_index=0, is_last=True
        )
        self.pool.submit_step(step)
        self.kept.add(self.name)

    @rule(size=st.integers(1, 3))
    def fetch_some(self, size: int) -> None:
        self.fetch(size)

    @rule(size=st.integers(1, 2))
    def fetch_and_give_back(self, size: int) -> None:
        """It is no step, and what was fetched stands where it stood."""
        batch = self.pool.fetch_batch(size, timeout=0, lease_s=1000)
        self.started = self.started or self.serving
        if batch is not None:
            assert scored_stats(self.pool)["step"] == self.step + self.serving
            batch.nack()

    def fetch(self, size: int) -> bool:
        batch = self.pool.fetch_batch(size, timeout=0)
        self.started = self.started or self.serving
        if batch is None:
            return False
        self.step += self.serving
        taken = [int(found.trajectories[0].steps[0].prompt_ids[0]) for found in batch.groups]
        assert len(taken) == len(set(taken))
        assert self.kept.issuperset(taken)
        self.forget(taken)
        return True

    # -- what always holds ---------------------------------------------------------------------------------------------

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def nothing_is_lost_and_nothing_is_twice(self) -> None:
        self.settled()
        check_rules(self.pool._state)
        found = scored_stats(self.pool)
        dead = sum(found["dead_letters"].values())
        waiting = self.pool.stats()["channels"].get("train", {}).get("groups", {}).get("queued", 0)
        here = found["queued"] + found["buffered"] + found["out"] + waiting
        assert here + dead - self.buried == len(self.kept)
        assert found["out"] == sum(len(taken) for _, taken in self.out.values())
        assert found["step"] == self.step
        assert not self.kept & self.gone


@pytest.mark.parametrize("stories", [20, pytest.param(300, marks=pytest.mark.long)])
def test_whatever_happens_the_desk_keeps_what_it_acknowledged(stories: int) -> None:
    checks = list(HealthCheck)
    told = settings(settings(), max_examples=stories, stateful_step_count=50, suppress_health_check=checks)
    run_state_machine_as_test(Machine, settings=told)
