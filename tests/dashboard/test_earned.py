"""What trajectories earned: parts of rewards, and advantages token by token."""

from __future__ import annotations

from typing import Any

import pytest
from tests.dashboard.test_follow import submit

from headrace import DataPool, Step
from headrace.dashboard.dashboard import Dashboard
from headrace.dashboard.detail import step_tokens
from headrace.dashboard.earned import (
    FROM_ENVIRONMENT,
    FROM_GROUP,
    FROM_STEPS,
    NO_REWARD,
    NOTHING_TO_COMPARE,
    SET_TO_ZERO,
    EarnedReader,
    advantages_of,
    reward_parts,
)
from headrace.dashboard.follow import record_of
from headrace.dashboard.source import RunningPool
from headrace.pool.config import DEFAULT_CHANNEL


def two_steps(pool: DataPool, uid: str, rewards: tuple[float | None, float | None], **last: Any) -> None:
    pool.submit_steps(
        [
            Step(
                prompt_ids=[1, 2],
                response_ids=[3, 4],
                trajectory_uid=uid,
                prompt_uid="p",
                step_index=0,
                reward=rewards[0],
            ),
            Step(
                prompt_ids=[1, 2, 3, 4, 5],
                response_ids=[6],
                trajectory_uid=uid,
                prompt_uid="p",
                step_index=1,
                reward=rewards[1],
                is_last=True,
                **last,
            ),
        ]
    )


def earned(pool: DataPool, *uids: str) -> dict[str, Any]:
    reader = EarnedReader(lambda channel, uid: pool.trajectory(uid, channel))
    return dict(reader.step_rewards([record_of(pool.trajectory(uid)) for uid in uids]))


def test_a_groups_rewards_become_advantages() -> None:
    found = advantages_of([1.0, 0.0, None, 1.0, 0.0])
    assert found[2] is None
    assert found[0] == found[3] == pytest.approx(0.866, abs=1e-3)
    assert found[1] == pytest.approx(-0.866, abs=1e-3)
    assert advantages_of([1.0]) == [None]
    assert advantages_of([0.5, 0.5]) == [0.0, 0.0]


def test_the_parts_of_a_reward_are_the_numbers_that_were_given_with_it() -> None:
    with DataPool() as pool:
        submit(pool, 0, rollouts=1, ended=False)
        pool.reward("g0-0", 0.7, 0, info={"accuracy": 1.0, "format": 0.4, "why": "fine", "passed": True})
        pool.reward("g0-0", 0.1, 1, info={"format": 0.1})
        assert reward_parts(pool.trajectory("g0-0")) == {"accuracy": 1.0, "format": 0.5}


def test_what_cannot_be_read_has_no_parts_and_no_more_than_asked_for_is_read() -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool:
        submit(pool, 0)
        pool.reward("g0-0", 2.0, 1, info={"speed": 0.25})
        records = [record_of(pool.trajectory(uid)) for uid in ("g0-0", "g0-1")]
        asked: list[str] = []

        def read(channel: str, uid: str) -> Any:
            asked.append(uid)
            return pool.trajectory(uid, channel)

        reader = EarnedReader(read)
        assert reader.parts(records, 1) == [{"speed": 0.25}, {}]
        assert reader.parts(records, 1) == [{"speed": 0.25}, {}]
        assert asked == ["g0-0", "g0-1"]
        pool.fetch_batch(1, timeout=0)
        assert EarnedReader(read).parts(records, 2) == [{}, {}]


def test_tokens_have_the_advantage_of_their_trajectory_in_its_group() -> None:
    with DataPool() as pool:
        two_steps(pool, "a", (None, 1.0))
        two_steps(pool, "b", (None, 0.0))
        found = step_tokens(pool.trajectory("a"), 0, 0, 100, None, earned(pool, "a", "b"))
        assert found.advantages_from == FROM_GROUP
        assert found.advantages is not None
        assert found.advantages[:2] == [None, None]
        assert found.advantages[2:] == pytest.approx([0.7071, 0.7071], abs=1e-3)
        assert step_tokens(pool.trajectory("a"), 0, 3, 1, None, earned(pool, "a", "b")).advantages == pytest.approx(
            [0.7071], abs=1e-3
        )


def test_rewarded_steps_have_advantages_of_their_own() -> None:
    with DataPool() as pool:
        two_steps(pool, "a", (1.0, 0.0))
        two_steps(pool, "b", (0.0, 1.0))
        group = earned(pool, "a", "b")
        first, second = (step_tokens(pool.trajectory("a"), step, 0, 100, None, group) for step in (0, 1))
        assert first.advantages_from == second.advantages_from == FROM_STEPS
        assert first.advantages is not None
        assert second.advantages is not None
        assert first.advantages[-1] == 0.0  # all had earned the same before it, and earn the same in all
        assert (second.advantages[-1] or 0.0) < 0.0  # what is left to earn is less than the other's


def test_what_an_environment_says_of_tokens_goes_first() -> None:
    said = {"scored_group": True, "advantages": [0.0, 0.0, 0.5, -0.5, 0.0, 2.0]}
    with DataPool() as pool:
        two_steps(pool, "a", (None, 1.0), metadata=said)
        two_steps(pool, "b", (None, 0.0), metadata={"scored_group": True, "overrides": {"set_advantage_to_zero": True}})
        two_steps(pool, "c", (None, 0.0), metadata={"scored_group": True, "advantages": [1.0]})
        found = step_tokens(pool.trajectory("a"), 0, 0, 100, None, {})
        assert (found.advantages, found.advantages_from) == ([None, None, 0.5, -0.5], FROM_ENVIRONMENT)
        assert step_tokens(pool.trajectory("a"), 1, 0, 100, None, {}).advantages == [None] * 5 + [2.0]
        zero = step_tokens(pool.trajectory("b"), 1, 0, 100, None, {})
        assert (zero.advantages, zero.advantages_from) == ([None] * 5 + [0.0], SET_TO_ZERO)
        misfit = step_tokens(pool.trajectory("c"), 1, 0, 100, None, {})
        assert misfit.advantages is None
        assert "advantages has 1 entries for 6 tokens" in misfit.advantages_from


def test_where_there_is_no_advantage_the_reason_is_said() -> None:
    with DataPool() as pool:
        two_steps(pool, "a", (None, None))
        two_steps(pool, "b", (None, 1.0), trainable=False)
        two_steps(pool, "c", (None, 1.0))
        found = [step_tokens(pool.trajectory(uid), 1, 0, 9, None, {}) for uid in ("a", "b", "c")]
        assert [one.advantages for one in found] == [None, None, None]
        assert [one.advantages_from for one in found] == [NO_REWARD, "it is not trained on", NOTHING_TO_COMPARE]


async def test_the_views_of_groups_and_tokens_have_both() -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool:
        submit(pool, 0)
        pool.reward("g0-0", 3.0, 1, info={"speed": 0.5})
        async with Dashboard(RunningPool(pool, "here")) as dashboard:
            await dashboard.settled()
            (group,) = (await dashboard.groups(None, "", 0, 20)).rows
            parts = dict(zip([one.uid for one in group.trajectories], group.parts, strict=True))
            assert parts == {"g0-0": {"speed": 0.5}, "g0-1": {}}
            assert sorted(value for value in group.advantages if value is not None) == pytest.approx(
                [-0.7071, 0.7071], abs=1e-3
            )
            tokens = await dashboard.tokens(DEFAULT_CHANNEL, "g0-0", 1, None, 100)
            assert tokens.advantages is not None
            assert tokens.advantages[-1] == pytest.approx(0.7071, abs=1e-3)
