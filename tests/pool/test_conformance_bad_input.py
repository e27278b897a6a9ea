"""What may not enter is refused by name and value, all or nothing, and leaves the pool as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.pool.kit import fetched, group, ledger, prompts, step

from headrace.data import InvalidInput
from headrace.pool.config import ChannelConfig, Limits
from headrace.pool.errors import PoolError

GOOD = {"prompt_ids": [1, 2], "response_ids": [3, 4], "trajectory_uid": "bad"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"response_ids": []}, "response_ids is empty"),
        ({"prompt_ids": [1, -5]}, "prompt_ids[1] is -5"),
        ({"response_ids": [2**31]}, "response_ids[0] is 2147483648"),
        ({"prompt_ids": np.array([4, -2], np.int32)}, "prompt_ids[1] is -2"),
        ({"rollout_log_probs": [-0.1]}, "rollout_log_probs has shape (1,) for 2 response_ids"),
        ({"rollout_log_probs": [-0.1, float("nan")]}, "rollout_log_probs[1] is nan"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"trajectory_uid": ""}, "trajectory_uid"),
        ({"colour": "red"}, "unknown field 'colour'"),
    ],
)
def test_a_bad_step_is_named_and_the_rest_of_its_batch_is_not_taken(
    pool: Any, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        pool.submit_steps([step("good", last=True), {**GOOD, **fields}, step("fine", last=True)])
    message = str(refused.value)
    assert message.startswith("step 1: ")
    assert said in message
    assert message.endswith("none of the 3 steps was taken")
    assert pool.stats()["channels"] == {}
    assert pool.fetch_batch(1, timeout=0) is None


@pytest.mark.parametrize("steps", [step("t"), {"prompt_ids": [1]}, "steps", None, 7])
def test_steps_that_are_no_list_are_refused(pool: Any, steps: Any) -> None:
    with pytest.raises(InvalidInput, match="steps must be a list"):
        pool.submit_steps(steps)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"colour": "red"}, "unknown channel option 'colour'"),
        ({"max_queue_sise": 5}, "did you mean 'max_queue_size'"),
        ({"max_queue_size": 0}, "max_queue_size must be an integer of at least 1, not 0"),
        ({"max_queue_size": 1.5}, "max_queue_size"),
        ({"max_queue_size": True}, "max_queue_size"),
        ({"overflow": "explode"}, "overflow is 'explode'; it must be one of drop_oldest, reject, block"),
        ({"n_rollouts": 0}, "n_rollouts"),
        ({"require_reward": "yes"}, "require_reward"),
        ({"group_timeout_s": 0}, "group_timeout_s must be a number above 0, or none, not 0"),
        ({"group_timeout_s": float("nan")}, "group_timeout_s"),
        ({"group_timeout_s": float("inf")}, "group_timeout_s"),
        ({"on_timeout": "shrug"}, "on_timeout is 'shrug'"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"history_size": -1}, "history_size"),
        ({"replay_share": 1.0}, "replay_share is 1.0"),
        ({"replay_share": -0.1}, "replay_share"),
        ({"grace_s": -1}, "grace_s"),
        ({"tombstones": None}, "tombstones"),
        ({"replies_kept": -1}, "replies_kept"),
    ],
)
def test_channel_options_that_cannot_work_are_refused_when_given(pool: Any, options: dict[str, Any], said: str) -> None:
    before = pool.configure(n_rollouts=3)
    with pytest.raises(InvalidInput) as refused:
        pool.configure(**{"max_queue_size": 7, **options})
    assert said in str(refused.value)
    assert pool.configure() == before


def test_configure_answers_with_all_options(pool: Any) -> None:
    assert pool.configure(n_rollouts=3, grace_s=1) == ChannelConfig(n_rollouts=3, grace_s=1)
    assert pool.configure("eval").n_rollouts == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": -1}, "batch_size"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"n_rollouts": 0}, "n_rollouts"),
        ({"order": "random"}, "order is 'random'; it must be one of fifo, latest, mixed"),
        ({"unit": "token"}, "unit is 'token'"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": -3.0}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"lease_s": float("inf")}, "lease_s"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"channel": ""}, "channel"),
        ({"channel": 7}, "channel"),
        ({"channel": None}, "channel"),
        ({"request_id": 7}, "request_id"),
        ({"request_id": "x" * 1000}, "request_id"),
    ],
)
def test_a_fetch_that_makes_no_sense_is_refused_and_takes_nothing(
    pool: Any, arguments: dict[str, Any], said: str
) -> None:
    pool.submit_steps(group("p"))
    with pytest.raises(InvalidInput) as refused:
        pool.fetch_batch(**{"batch_size": 1, "timeout": 0, **arguments})
    assert said in str(refused.value)
    assert ledger(pool) == {"submitted": 1, "queued": 1}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda pool: pool.submit_step(step("t"), channel=7), "channel"),
        (lambda pool: pool.submit_step(step("t"), channel=""), "channel"),
        (lambda pool: pool.submit_step(step("t"), channel=None), "channel"),
        (lambda pool: pool.submit_step(step("t"), timeout=-1), "timeout"),
        (lambda pool: pool.open(""), "trajectory_uid"),
        (lambda pool: pool.open(7), "trajectory_uid"),
        (lambda pool: pool.open("t", 7), "prompt_uid"),
        (lambda pool: pool.open("t", "x" * 1000), "prompt_uid"),
        (lambda pool: pool.open("t", metadata=[1]), "metadata"),
        (lambda pool: pool.open("t", n_rollouts=0), "n_rollouts"),
        (lambda pool: pool.open("t", metadata={"x": "y" * (1 << 20)}), "metadata"),
        (lambda pool: pool.reward("p/0", float("nan")), "reward"),
        (lambda pool: pool.reward("p/0", "high"), "reward"),
        (lambda pool: pool.reward("p/0", 1.0, step_index=-1), "step_index"),
        (lambda pool: pool.reward(None, 1.0), "trajectory_uid"),
        (lambda pool: pool.complete("p/0", float("inf")), "reward"),
        (lambda pool: pool.complete(["p/0"]), "trajectory_uid"),
        (lambda pool: pool.ack(""), "lease_id"),
        (lambda pool: pool.nack(None), "lease_id"),
        (lambda pool: pool.extend("train-0", 0), "lease_s"),
        (lambda pool: pool.extend("train-0", float("nan")), "lease_s"),
        (lambda pool: pool.set_version(-1), "version"),
        (lambda pool: pool.set_version(1.5), "version"),
        (lambda pool: pool.set_version(2**31), "version"),
        (lambda pool: pool.set_version(1, channel=7), "channel"),
        (lambda pool: pool.shutdown(7), "channel"),
        (lambda pool: pool.curate("p/0", -1, trainable=False), "step_index"),
        (lambda pool: pool.forget(7), "trajectory_uid"),
        (lambda pool: pool.trajectory(7), "trajectory_uid"),
        (lambda pool: pool.stats(7), "channel"),
        (lambda pool: pool.events(-1), "cursor"),
        (lambda pool: pool.events(0, 0), "limit"),
        (lambda pool: pool.list_trajectories(min_reward="high"), "min_reward"),
        (lambda pool: pool.list_groups(7), "channel"),
    ],
)
def test_calls_that_make_no_sense_are_refused_by_argument_and_change_nothing(pool: Any, call: Any, said: str) -> None:
    pool.submit_steps(group("p"))
    before = pool.stats()
    with pytest.raises(InvalidInput) as refused:
        call(pool)
    assert said in str(refused.value)
    assert pool.stats() == before
    assert prompts(fetched(pool)) == ["p"]


def test_numbers_may_be_numpys(pool: Any) -> None:
    pool.submit_step(step("t", np.int64(0), last=True, policy_version=np.int32(2), created_at=np.float64(5)))
    assert pool.reward("t", np.float32(0.5), step_index=np.int64(0)) == "ok"
    pool.set_version(np.int64(3))
    pool.open("u", "u", n_rollouts=np.int64(2), metadata={"seed": np.int64(7)})
    assert pool.trajectory("u").metadata == {"seed": 7}
    batch = pool.fetch_batch(np.int64(1), max_staleness=np.int64(5), lease_s=np.float64(600), timeout=0)
    assert batch.steps[0].reward == 0.5
    batch.ack()


def test_sizes_are_bounded(make_pool: Any) -> None:
    pool = make_pool(limits=Limits(max_step_tokens=10, max_submit_steps=3, max_submit_mb=0.001, max_trajectory_steps=5))
    for steps, said in (
        ([step("t", prompt_ids=[1] * 9)], "step 0 has 11 tokens; at most 10"),
        ([step(f"t{i}") for i in range(4)], "4 steps in one submit; at most 3"),
        ([step("t", multi_modal_data={"image": bytes(2000)})], "at most 0.001 MB"),
        ([step("t", metadata={"page": "x" * 2000})], "at most 0.001 MB"),
        ([step("u"), step("t", 5, prompt_ids=[1])], "step 1: step_index is 5; a trajectory has at most 5 steps"),
    ):
        with pytest.raises(InvalidInput) as refused:
            pool.submit_steps(steps)
        assert said in str(refused.value)
    assert pool.stats()["channels"] == {}
    pool.submit_steps([step("t", prompt_ids=[1] * 8), step("t", 4, prompt_ids=[1])])


def test_the_next_step_of_a_full_trajectory_is_refused_too(make_pool: Any) -> None:
    pool = make_pool(limits=Limits(max_trajectory_steps=2))
    pool.submit_steps([step("t", None), step("t", None)])
    with pytest.raises(InvalidInput, match="at most 2 steps"):
        pool.submit_step(step("t", None))


@pytest.mark.parametrize(
    "options",
    [{"max_step_tokens": 0}, {"max_submit_steps": 1.5}, {"max_submit_mb": 0}, {"events_kept": None}],
)
def test_limits_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InvalidInput, match=name):
        Limits(**options)


def test_events_are_kept_in_number(make_pool: Any) -> None:
    pool = make_pool(limits=Limits(events_kept=3))
    for version in range(10):
        pool.set_version(version)
    assert [event.cursor for event in pool.events()] == [7, 8, 9]
    assert [event.cursor for event in pool.events(8)] == [8, 9]


def test_errors_keep_their_class_and_words_wherever_they_are_raised(pool: Any) -> None:
    with pytest.raises(PoolError) as refused:
        pool.ack("nobody")
    assert type(refused.value).__name__ == "LeaseLost"
    assert "'nobody'" in str(refused.value)
