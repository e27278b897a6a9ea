"""Random calls, crashes and recoveries against a simple model of what a pool owes its callers.

The model knows which steps were acknowledged, with what content and reward, and where each of them went: it never
looks into the pool. What the pool keeps inside is checked by recounting it (`check_rules`), and by reading the journal
again, with and without a snapshot.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.pool.journal.kit import Crashing, check_rules, dump, flip, frames, same

from headrace import DataPool, Step
from headrace.pool.batch import Batch
from headrace.pool.config import Limits
from headrace.pool.errors import Conflict, LeaseLost, NotFound, PoolClosed, PoolFull
from headrace.pool.journal.repair import repair

Key = tuple[str, int]

ROLLOUTS = 3
PROMPTS = 4
INDICES = 3

configs = st.fixed_dictionaries(
    {
        "n_rollouts": st.integers(1, 2),
        "max_queue_size": st.sampled_from([1000, 4]),
        "overflow": st.sampled_from(["drop_oldest", "reject", "block"]),
        "require_reward": st.sampled_from([False, False, False, True]),
        "group_timeout_s": st.sampled_from([None, None, 40.0]),
        "on_timeout": st.sampled_from(["drop", "partial"]),
        "max_staleness": st.sampled_from([None, None, 0, 1]),
        "history_size": st.sampled_from([0, 2]),
        "grace_s": st.sampled_from([0.0, 0.0, 5.0]),
        "replies_kept": st.sampled_from([0, 1, 4]),
    }
)
channels = st.sampled_from(["train", "train", "train", "eval"])
prompts = st.integers(0, PROMPTS - 1)
rollouts = st.integers(0, ROLLOUTS - 1)
rewards = st.sampled_from([None, None, 0.0, 1.0])
sources = st.sampled_from([None, "model", "person"])
step_rewards = st.dictionaries(st.integers(0, 1), st.sampled_from([0.0, 1.0]), min_size=1)


@st.composite
def drafts(draw: st.DrawFn) -> dict[str, Any]:
    """A step to be: most are what their place calls for, some contradict it."""
    return {
        "prompt": draw(prompts),
        "rollout": draw(rollouts),
        "index": draw(st.integers(0, INDICES - 1)),
        "last": draw(st.sampled_from(["at the end", "at the end", "at the end", "now"])),
        "reward": draw(rewards),
        "by_call": draw(st.sampled_from([False, False, False, True])),
        "quarantined": draw(st.sampled_from([None] * 7 + ["it smells"])),
        "blob": draw(st.sampled_from([None, None, None, b"cat", b"dog"])),
        "content": draw(st.sampled_from(["own"] * 12 + ["other"])),
        "version": draw(st.sampled_from([None, None, 0, 1])),
    }


@dataclass
class Owed:
    """What one channel owes."""

    steps: dict[Key, Step] = field(default_factory=dict)  # as acknowledged, with the latest reward
    submitted: int = 0
    late: int = 0
    quarantined: set[Key] = field(default_factory=set)
    failed: dict[str, tuple[str, int]] = field(default_factory=dict)  # by trajectory: why, and its steps
    by_person: set[Key] = field(default_factory=set)
    consumed: set[Key] = field(default_factory=set)
    leases: dict[str, tuple[float, set[Key]]] = field(default_factory=dict)
    answers: dict[str, list[Key]] = field(default_factory=dict)  # by request_id

    def expire(self, now: float) -> None:
        self.leases = {id: lease for id, lease in self.leases.items() if lease[0] > now}

    @property
    def leased(self) -> set[Key]:
        return {key for _, keys in self.leases.values() for key in keys}


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-"))
        self.now = 1000.0
        self.newest = 0
        self.requests = 0
        self.owed: dict[str, Owed] = {}
        self.files = Crashing()
        self.pool: DataPool

    # -- the pool ------------------------------------------------------------------------------------------------------

    @initialize(
        config=configs,
        durability=st.sampled_from(["os", "fsync"]),
        segment=st.sampled_from([0.001, 64]),
        memory_mb=st.sampled_from([0, 0.0001, 64]),
    )
    def begin(self, config: dict[str, Any], durability: Any, segment: float, memory_mb: float) -> None:
        self.options: dict[str, Any] = {"durability": durability, "segment_mb": segment, "defaults": config}
        self.options["limits"] = Limits(memory_mb=memory_mb)
        self.pool = self.opened(self.folder / "pool")

    def opened(self, folder: Path) -> DataPool:
        return DataPool(folder, clock=lambda: self.now, files=self.files, **self.options)

    def teardown(self) -> None:
        try:
            if hasattr(self, "pool"):
                self.read_again_with_and_without_a_snapshot()
                self.lose_some_of_it()
        finally:
            self.files.crash()
            shutil.rmtree(self.folder)

    def read_again_with_and_without_a_snapshot(self) -> None:
        before = self.settled()
        self.pool.close()
        for compacted in (False, True):
            copy = self.folder / f"copy-{compacted}"
            shutil.copytree(self.folder / "pool", copy)
            again = self.opened(copy)
            if compacted:
                again.compact()
                again.close()
                again = self.opened(copy)
            again.stats()
            assert same(before, dump(again._state))
            again.close()

    def lose_some_of_it(self) -> None:
        """One record goes bad: what a repair leaves keeps the rules, and can be used up."""
        copy = self.folder / "holed"
        shutil.copytree(self.folder / "pool", copy)
        places = [(path, start) for path in sorted(copy.glob("0*")) for start, _ in frames(path)]
        path, start = places[(7 * self.newest + 3 * self.requests + int(self.now)) % len(places)]
        flip(path, start + 30)
        repair(copy, self.files)
        pool = self.opened(copy)
        check_rules(pool._state)
        for name in list(pool._state.channels):
            while pool.fetch_batch(1, 1, name, unit=["group", "step"][self.newest % 2], timeout=0) is not None:
                check_rules(pool._state)
        self.now += 10_000
        pool.stats()
        check_rules(pool._state)
        pool.close()

    def settled(self) -> dict[str, Any]:
        """The state once everything that the clock calls for has happened."""
        self.pool.stats()
        for owed in self.owed.values():
            owed.expire(self.now)
        return dump(self.pool._state)

    def channel(self, name: str) -> Owed:
        return self.owed.setdefault(name, Owed())

    def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A call's answer; None where the pool refused it, and then nothing has changed."""
        before = self.settled()
        try:
            return method(*args, **options)
        except (Conflict, NotFound, LeaseLost, PoolFull, PoolClosed) as error:
            note(f"refused: {error}")
            assert same(before, dump(self.pool._state))
            return None

    # -- producers -----------------------------------------------------------------------------------------------------

    def prompt(self, age: int) -> str:
        return f"p{max(0, self.newest - age)}"

    def uid(self, prompt: int, rollout: int) -> str:
        return f"{self.prompt(prompt)}/{rollout}"

    def step(self, draft: dict[str, Any]) -> Step:
        uid, index = self.uid(draft["prompt"], draft["rollout"]), draft["index"]
        first = 100 * draft["rollout"] + 10 * index
        turns = [token for turn in range(index) for token in (100 * draft["rollout"] + 10 * turn, 7)]
        return Step(
            prompt_ids=[1, 2, *turns],
            response_ids=[first, 7] if draft["content"] == "own" else [first, 8],
            rollout_log_probs=[-0.25, -0.5],
            trajectory_uid=uid,
            prompt_uid=self.prompt(draft["prompt"]),
            step_index=None if draft["by_call"] else index,
            call_id=f"call-{index}" if draft["by_call"] else None,
            is_last=draft["last"] == "now" or index == INDICES - 1,
            reward=draft["reward"],
            quarantined=draft["quarantined"],
            multi_modal_data={"image": draft["blob"] * 50} if draft["blob"] else None,
            policy_version=draft["version"],
        )

    @rule(channel=channels, drafts=st.lists(drafts(), min_size=1, max_size=4))
    def submit(self, channel: str, drafts: list[dict[str, Any]]) -> None:
        self.submit_all(channel, [self.step(draft) for draft in drafts])

    @rule(channel=channels, n=st.integers(1, ROLLOUTS), turns=st.integers(1, INDICES), reward=rewards)
    def submit_a_new_group(self, channel: str, n: int, turns: int, reward: float | None) -> None:
        self.newest += 1
        draft = {"prompt": 0, "by_call": False, "quarantined": None, "blob": b"cow", "content": "own"}
        steps = [
            self.step(
                {
                    **draft,
                    "rollout": r,
                    "index": i,
                    "last": "now" if i == turns - 1 else "",
                    "reward": reward,
                    "version": None,
                }
            )
            for r in range(n)
            for i in range(turns)
        ]
        self.submit_all(channel, steps)

    def submit_all(self, channel: str, steps: list[Step]) -> None:
        receipt = self.call(self.pool.submit_steps, steps, channel, timeout=0)
        if receipt is None:
            return
        assert receipt.accepted + receipt.duplicates + receipt.late == len(steps)
        owed = self.channel(channel)
        owed.submitted += receipt.accepted + receipt.late
        owed.late += receipt.late
        fresh = 0
        for step, index in zip(steps, receipt.indices, strict=True):
            key = (step.trajectory_uid, index)
            if index < 0:
                continue
            if key not in owed.steps:
                fresh += 1
                owed.steps[key] = step
                if step.quarantined is not None:
                    owed.quarantined.add(key)
            elif step.reward is not None and key not in owed.consumed | owed.leased | owed.by_person:
                owed.steps[key] = _with(owed.steps[key], reward=step.reward)
        assert fresh == receipt.accepted

    @rule(channel=channels, prompt=prompts, rollout=rollouts, other=prompts, n=st.sampled_from([None, None, 2]))
    def open(self, channel: str, prompt: int, rollout: int, other: int, n: int | None) -> None:
        self.channel(channel)
        metadata = {"other": other}
        self.call(self.pool.open, self.uid(prompt, rollout), self.prompt(other), channel, metadata, n)

    @rule(
        channel=channels,
        prompt=prompts,
        rollout=rollouts,
        index=st.sampled_from([None, 0, 1]),
        reward=rewards,
        source=sources,
    )
    def reward(
        self, channel: str, prompt: int, rollout: int, index: int | None, reward: float | None, source: str | None
    ) -> None:
        uid, owed = self.uid(prompt, rollout), self.channel(channel)
        info = {"parts": [1]} if source == "model" else None
        answer = self.call(self.pool.reward, uid, reward or 0.5, index, channel, source=source, info=info)
        assert answer in ("ok", "late", "kept", None)
        if answer in ("ok", "kept"):
            self.rewarded(owed, uid, index, reward or 0.5, source, kept=answer == "kept")

    @rule(channel=channels, prompt=prompts, rollout=rollouts, rewards=step_rewards, source=sources)
    def reward_steps(
        self, channel: str, prompt: int, rollout: int, rewards: dict[int, float], source: str | None
    ) -> None:
        uid, owed = self.uid(prompt, rollout), self.channel(channel)
        answers = self.call(self.pool.reward_steps, uid, rewards, channel, source=source)
        for index, answer in (answers or {}).items():
            if answer != "late":
                self.rewarded(owed, uid, index, rewards[index], source, kept=answer == "kept")

    @rule(channel=channels, prompt=prompts, rollout=rollouts, reward=rewards)
    def complete(self, channel: str, prompt: int, rollout: int, reward: float | None) -> None:
        uid, owed = self.uid(prompt, rollout), self.channel(channel)
        answer = self.call(self.pool.complete, uid, reward, channel)
        assert answer.status in ("ok", "late", "unknown")
        if answer.status == "ok" and reward is not None and answer.steps and uid not in owed.failed:
            last = max(i for u, i in owed.steps if u == uid)
            self.rewarded(owed, uid, last, reward, kept=(uid, last) in owed.by_person)

    def rewarded(
        self, owed: Owed, uid: str, index: int | None, reward: float, source: str | None = None, *, kept: bool = False
    ) -> None:
        key = uid, max(i for u, i in owed.steps if u == uid) if index is None else index
        assert kept == (key in owed.by_person and source != "person")
        if not kept:
            owed.steps[key] = _with(owed.steps[key], reward=reward)
            if source == "person":
                owed.by_person.add(key)

    @rule(channel=channels, prompt=prompts, rollout=rollouts, quarantine=st.booleans())
    def fail(self, channel: str, prompt: int, rollout: int, quarantine: bool) -> None:
        uid, owed = self.uid(prompt, rollout), self.channel(channel)
        before = self.settled()
        answer = self.pool.fail(uid, "it broke", channel, quarantine=quarantine)
        assert answer.status in ("ok", "late", "unknown")
        if answer.status != "ok" or uid in owed.failed:
            assert same(before, dump(self.pool._state))
            assert uid not in owed.failed or (answer.status, answer.steps) == ("ok", owed.failed[uid][1])
            return
        of_it = {key for key in owed.steps if key[0] == uid}
        assert answer.steps == len(of_it)
        owed.failed[uid] = ("it broke", answer.steps)
        for _, keys in owed.leases.values():
            keys -= of_it
        if quarantine:
            owed.quarantined |= of_it - owed.consumed
        assert self.pool.fail(uid, "again", channel) == answer
        row = self.pool.list_trajectories(channel, state="failed", trajectory_uid=uid)["items"][0]
        assert (row["reason"], row["steps"]) == owed.failed[uid]

    @rule(channel=channels, steps=st.booleans())
    def look_for_what_waits_for_a_reward(self, channel: str, steps: bool) -> None:
        self.settled()
        found = self.pool.unscored(channel, steps=steps, limit=1000)["items"]
        if steps:
            there = self.pool.list_steps(channel, limit=1000)["items"]
            owed = self.channel(channel)
            out = owed.leased | owed.consumed
            lack = [
                (r["trajectory_uid"], r["step_index"])
                for r in there
                if r["reward"] is None and r["quarantined"] is None
            ]
            assert {(r["trajectory_uid"], r["step_index"]) for r in found} == set(lack) - out
        else:
            assert len({row["trajectory_uid"] for row in found}) == len(found)

    # -- consumers -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.ready())
    @rule(size=st.integers(1, 2), ask=st.booleans())
    def consume(self, size: int, ask: bool) -> None:
        self.fetch(self.ready()[0], size, ask=ask)

    @precondition(lambda self: self.ready())
    @rule(size=st.integers(1, 2), ask=st.booleans())
    def take_a_lease(self, size: int, ask: bool) -> None:
        self.fetch(self.ready()[-1], size, ask=ask, lease=20.0)

    @rule(channel=channels, lease=st.sampled_from([None, 20.0]), order=st.sampled_from(["fifo", "latest"]))
    def take_single_steps(self, channel: str, lease: float | None, order: str) -> None:
        self.fetch(channel, 2, order=order, lease=lease, unit="step")

    @rule(
        channel=channels,
        n=st.sampled_from([None, 1]),
        order=st.sampled_from(["mixed", "latest", "fifo"]),
        lease=st.sampled_from([None, 20.0]),
        staleness=st.sampled_from([None, 0]),
    )
    def choose(self, channel: str, n: int | None, order: str, lease: float | None, staleness: int | None) -> None:
        self.fetch(channel, 2 if order == "mixed" else 1, n=n, order=order, lease=lease, staleness=staleness)

    def ready(self) -> list[str]:
        """Channels with something to fetch."""
        return [name for name, c in self.pool.stats()["channels"].items() if c["groups"]["ready"]]

    def fetch(
        self,
        channel: str,
        size: int,
        *,
        n: int | None = None,
        order: str = "fifo",
        lease: float | None = None,
        staleness: int | None = None,
        ask: bool = False,
        unit: str = "group",
    ) -> None:
        request = None
        if ask:
            self.requests += 1
            request = f"r{self.requests}"
        before = self.settled()
        ready = [row["seq"] for row in self.pool.list_groups(channel, state="ready")["items"]]
        batch = self.pool.fetch_batch(
            size, n, channel, order, staleness, lease_s=lease, timeout=0, request_id=request, unit=unit
        )
        if batch is None:
            assert staleness is not None or same(before, dump(self.pool._state))
            return
        if n is None and staleness is None and unit == "group" and not self.pool.stats(channel)["closed"]:
            fresh = [g.prompt_uid for g in batch.groups if not g.replayed]
            first = ready[-1 : -len(fresh) - 1 : -1] if order == "latest" else ready[: len(fresh)]
            assert fresh == [before["channels"][channel]["groups"][seq]["uid"] for seq in first]
        self.handed_out(channel, batch, unit, request, size)

    def handed_out(self, channel: str, batch: Batch, unit: str, request: str | None, size: int) -> None:
        owed = self.channel(channel)
        assert len(batch.groups) == size or self.pool.stats(channel)["closed"]
        keys: list[Key] = []
        for group in batch.groups:
            for step in group.steps:
                assert step.step_index is not None
                key = (step.trajectory_uid, step.step_index)
                self.same_as_submitted(owed.steps[key], step)
                assert key not in owed.quarantined
                if group.replayed:
                    assert key in owed.consumed
                    continue
                keys.append(key)
            if unit == "group":
                for trajectory in group.trajectories:
                    indices = [step.step_index for step in trajectory.steps]
                    assert indices == list(range(len(indices)))
                    assert group.replayed or not indices or trajectory.steps[-1].is_last
        assert len(set(keys)) == len(keys)
        assert not set(keys) & (owed.consumed | owed.leased)
        if batch.lease_id is None:
            owed.consumed.update(keys)
        else:
            assert batch.deadline is not None
            owed.leases[batch.lease_id] = (batch.deadline, set(keys))
        if request is not None:
            owed.answers[request] = [(s.trajectory_uid, s.step_index or 0) for s in batch.steps]

    def same_as_submitted(self, submitted: Step, given: Step) -> None:
        for name in ("prompt_ids", "response_ids", "rollout_log_probs"):
            assert getattr(given, name).tolist() == getattr(submitted, name).tolist()
        assert given.reward == submitted.reward
        assert given.multi_modal_data == submitted.multi_modal_data

    @precondition(lambda self: any(owed.answers for owed in self.owed.values()))
    @rule(data=st.data(), channel=channels)
    def ask_again(self, data: st.DataObject, channel: str) -> None:
        """The answer of a fetch was lost: it is given again, as long as the pool remembers it."""
        owed = self.channel(channel)
        if not owed.answers:
            return
        request = data.draw(st.sampled_from(sorted(owed.answers)))
        self.settled()
        known = request in self.pool._state.look(channel).replies
        batch = self.pool.fetch_batch(1, channel=channel, timeout=0, request_id=request)
        if known:
            assert batch is not None
            assert [(s.trajectory_uid, s.step_index) for s in batch.steps] == owed.answers[request]
        elif batch is not None:
            self.handed_out(channel, batch, "group", request, 1)

    @precondition(lambda self: any(owed.leases for owed in self.owed.values()))
    @rule(data=st.data(), what=st.sampled_from(["ack", "ack", "nack", "extend"]))
    def end_a_lease(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, owed in self.owed.items() if owed.leases)))
        owed = self.owed[name]
        id = data.draw(st.sampled_from(sorted(owed.leases)))
        self.settled()
        if id not in owed.leases:
            for call in (self.pool.ack, self.pool.nack):
                assert self.call(call, id, name) is None
            return
        _, keys = owed.leases.pop(id)
        if what == "ack":
            self.pool.ack(id, name)
            self.pool.ack(id, name)  # sent again, it changes nothing
            owed.consumed |= keys
        elif what == "nack":
            self.pool.nack(id, name)
            self.pool.nack(id, name)
        else:
            owed.leases[id] = (self.pool.extend(id, 30.0, name), keys)

    # -- control -------------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 6.0, 25.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(what=st.sampled_from(["version", "curate", "configure", "close"]), channel=channels, data=st.data())
    def control(self, what: str, channel: str, data: st.DataObject) -> None:
        self.channel(channel)
        if what == "version":
            stats = self.pool.stats()["channels"].values()
            version = max([c["policy_version"] for c in stats], default=0) + data.draw(st.integers(0, 1))
            self.call(self.pool.set_version, version, data.draw(st.sampled_from([channel, None])))
        elif what == "curate":
            uid = self.uid(data.draw(prompts), data.draw(rollouts))
            self.call(self.pool.curate, uid, 0, channel, trainable=data.draw(st.booleans()), tags=["seen"])
        elif what == "configure":
            config = data.draw(configs)
            option = data.draw(st.sampled_from(sorted(config)))
            self.call(self.pool.configure, channel, **{option: config[option]})
        elif self.newest > 5:
            self.call(self.pool.shutdown, "eval")

    @rule(channel=channels, prompt=prompts, rollout=rollouts)
    def forget(self, channel: str, prompt: int, rollout: int) -> None:
        uid, owed = self.uid(prompt, rollout), self.channel(channel)
        self.call(self.pool.forget, uid, channel)
        for _, keys in owed.leases.values():
            keys -= {key for key in keys if key[0] == uid}
        owed.answers = {r: keys for r, keys in owed.answers.items() if all(key[0] != uid for key in keys)}
        if owed.failed.pop(uid, None) is not None:
            assert not self.pool.list_trajectories(channel, state="failed", trajectory_uid=uid)["items"]

    # -- the journal ---------------------------------------------------------------------------------------------------

    @rule()
    def compact(self) -> None:
        before = self.settled()
        self.pool.compact()
        assert same(before, dump(self.pool._state))

    @rule(cleanly=st.booleans())
    def end_and_begin_again(self, cleanly: bool) -> None:
        before = self.settled()
        asked = self.asked()
        if cleanly:
            self.pool.close()
        else:
            self.files.crash()
        self.pool = self.opened(self.folder / "pool")
        assert same(before, self.settled())
        assert same(asked, self.asked())

    def asked(self) -> list[Any]:
        """What a reader sees."""
        calls = (self.pool.list_groups, self.pool.list_trajectories, self.pool.list_steps)
        stats = self.pool.stats()
        return [stats["ledger"], stats["channels"], *(call(name)["items"] for call in calls for name in self.owed)]

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def every_step_is_where_the_model_says(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.settled()
        check_rules(self.pool._state)
        assert not self.pool._state.orphans
        stats = self.pool.stats()
        for name, owed in self.owed.items():
            if name not in stats["channels"]:
                assert not owed.submitted
                continue
            ledger = stats["channels"][name]["ledger"]
            assert ledger["submitted"] == owed.submitted
            assert ledger["dropped"].get("late", 0) == owed.late
            assert ledger["quarantined"] == len(owed.quarantined)
            assert ledger["consumed"] == len(owed.consumed)
            assert ledger["leased"] == len(owed.leased)
            there = {(r["trajectory_uid"], r["step_index"]) for r in self.pool.list_steps(name, limit=1000)["items"]}
            assert there <= owed.steps.keys()
            assert owed.leased <= there
            assert ledger["queued"] == len(there - owed.consumed - owed.leased - owed.quarantined)
            assert sum(ledger["dropped"].values()) == owed.late + len(
                owed.steps.keys() - owed.consumed - owed.quarantined - there
            )


CHECKS = list(HealthCheck)  # an example is a long story: neither its size nor its time is news


def _with(step: Step, **changes: Any) -> Step:
    return Step(**{**{name: getattr(step, name) for name in Step.__struct_fields__}, **changes})


@pytest.mark.parametrize("stories", [25, pytest.param(400, marks=pytest.mark.long)])
def test_whatever_happens_the_pool_keeps_what_it_acknowledged(stories: int) -> None:
    told = settings(settings(), max_examples=stories, stateful_step_count=50, suppress_health_check=CHECKS)
    run_state_machine_as_test(Machine, settings=told)
