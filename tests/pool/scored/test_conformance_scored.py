"""The calls about scored groups, the same on every pool: embedded, over HTTP and over Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.pool.kit import events
from tests.pool.scored.kit import (
    body,
    drained,
    environment,
    joined,
    names,
    piece,
    post,
    posting,
    scored_stats,
    started,
    trainer,
)

from headrace.data.errors import InvalidInput
from headrace.data.scored import Piece, decode
from headrace.pool.calls import BlockingPool
from headrace.pool.errors import LeaseLost, NotFound, NotRegistered
from headrace.pool.scored.types import (
    EnvRegistered,
    Posted,
    Posting,
    ScoredInfo,
    ScoredStatus,
)

# -- trainers ----------------------------------------------------------------------------------------------------------


def test_a_batch_before_any_trainer_registered_is_refused(pool: BlockingPool) -> None:
    with pytest.raises(NotRegistered, match="register first"):
        pool.desk_batch()


def test_a_batch_holds_exactly_its_size_oldest_first_as_it_was_posted(pool: BlockingPool) -> None:
    pool.desk_register(trainer())
    for name in range(5):
        assert post(pool, name) == Posted("received")
    batch = pool.desk_batch()
    assert names(batch) == [0, 1]
    assert batch is not None
    assert batch.pieces[1] == piece(1)
    assert {key: value for key, value in decode(batch.pieces[1]).items() if value is not None} == body(1)
    assert (batch.step, pool.desk_status()) == (1, ScoredStatus(1, 3))
    assert names(pool.desk_batch()) == [2, 3]
    assert pool.desk_batch() is None


def test_every_registration_gets_a_number_of_128_bits_of_its_own(pool: BlockingPool) -> None:
    first, second = pool.desk_register(trainer()), pool.desk_register(trainer())
    assert first.uuid != second.uuid
    assert max(first.uuid, second.uuid).bit_length() in range(65, 129)
    assert (first.warning, second.warning) == (None, None)


def test_a_second_registration_with_other_settings_is_told_which_hold(pool: BlockingPool) -> None:
    pool.desk_register(trainer())
    warning = pool.desk_register(trainer(batch_size=8, num_steps=7)).warning
    assert warning is not None
    assert "batch_size stays 4, num_steps stays 100" in warning
    assert pool.desk_info() == ScoredInfo(trainer(), False, 0, batch_size=4)


def test_a_registration_that_resumes_changes_the_settings_and_keeps_the_queue(pool: BlockingPool) -> None:
    started(pool)
    for name in range(6):
        post(pool, name)
    batch = pool.desk_batch()
    assert batch is not None
    assert pool.desk_register(trainer(batch_size=8, starting_step=40), resume=True).warning is None
    assert pool.desk_status() == ScoredStatus(40, 4)
    pool.desk_nack(batch.lease)  # of before: it is no step of the new count
    assert pool.desk_status() == ScoredStatus(40, 6)
    assert names(pool.desk_batch()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 0},
        {"batch_size": 2**62},
        {"max_token_len": 2**40},
        {"num_steps": 2**80},
        {"wandb_group": "\ud800"},
        {"checkpoint_dir": "x" * 20_000},
        {"batch_size": "many"},
    ],
)
def test_a_registration_that_could_not_be_read_back_is_refused_and_harms_nothing(
    pool: BlockingPool, changes: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput):
        pool.desk_register(trainer(**changes))
    assert pool.desk_info().registration is None


# -- delivery ----------------------------------------------------------------------------------------------------------


def test_a_batch_that_was_given_back_goes_out_again_and_is_no_step(pool: BlockingPool) -> None:
    started(pool)
    for name in range(4):
        post(pool, name)
    first = pool.desk_batch()
    assert first is not None
    pool.desk_nack(first.lease)
    pool.desk_nack(first.lease)  # the answer to the first was lost
    assert pool.desk_status() == ScoredStatus(0, 4)
    assert drained(pool) == [0, 1, 2, 3]
    assert scored_stats(pool)["served"] == 4


def test_an_acknowledged_batch_is_gone_and_may_be_acknowledged_again(pool: BlockingPool) -> None:
    started(pool)
    post(pool, 0, sequences=4)
    batch = pool.desk_batch()
    assert batch is not None
    pool.desk_ack(batch.lease)
    pool.desk_ack(batch.lease)
    with pytest.raises(LeaseLost):
        pool.desk_nack(batch.lease)
    assert pool.desk_batch() is None
    assert scored_stats(pool)["memory_bytes"] == 0


def test_the_same_request_gets_the_same_batch_again(pool: BlockingPool) -> None:
    started(pool)
    for name in range(4):
        post(pool, name)
    assert pool.desk_batch("one") == pool.desk_batch("one")
    assert names(pool.desk_batch("two")) == [2, 3]
    assert pool.desk_status() == ScoredStatus(2, 0)


def test_released_every_batch_that_is_out_goes_back_and_counts_as_no_step(pool: BlockingPool) -> None:
    pool.desk_register(trainer())
    for name in range(4):
        post(pool, name)
    first, second = pool.desk_batch(), pool.desk_batch()
    pool.desk_release()
    assert pool.desk_status() == ScoredStatus(0, 4)
    assert names(pool.desk_batch()) == names(first) == [0, 1]
    assert second is not None
    with pytest.raises(LeaseLost):
        pool.desk_ack(second.lease)


# -- environments ------------------------------------------------------------------------------------------------------


def test_environments_wait_until_the_trainer_has_asked_for_its_first_batch(pool: BlockingPool) -> None:
    assert pool.desk_register_env(environment()) is None
    pool.desk_register(trainer(starting_step=5))
    assert pool.desk_register_env(environment()) is None
    assert pool.desk_batch() is None
    assert pool.desk_register_env(environment()) == EnvRegistered(0, "maze_0", "checkpoints", 5, 10, 100)


def test_environments_are_numbered_and_named_in_the_order_in_which_they_come(pool: BlockingPool) -> None:
    started(pool)
    wanted = ["maze", "chess", "maze"]
    found = [pool.desk_register_env(environment(desired_name=name)) for name in wanted]
    assert [(one.env_id, one.wandb_name) for one in found if one is not None] == [
        (0, "maze_0"),
        (1, "chess_0"),
        (2, "maze_1"),
    ]


def test_a_registration_that_is_sent_again_is_one_environment(pool: BlockingPool) -> None:
    started(pool)
    first = pool.desk_register_env(environment(), "request")
    assert pool.desk_register_env(environment(), "request") == first
    assert pool.desk_info().environments == 1


@pytest.mark.parametrize("changes", [{"group_size": 2**62}, {"group_size": 0}, {"weight": float("nan")}])
def test_an_environment_that_could_not_work_is_refused(pool: BlockingPool, changes: dict[str, Any]) -> None:
    started(pool)
    with pytest.raises(InvalidInput):
        pool.desk_register_env(environment(**changes))
    assert pool.desk_info().environments == 0


@pytest.mark.parametrize("unknown", [-1, 1, 2**40])
def test_an_environment_that_nobody_knows_is_not_found(pool: BlockingPool, unknown: int) -> None:
    started(pool)
    joined(pool)
    for call in (pool.desk_disconnect, pool.desk_env_status):
        with pytest.raises(NotFound, match="no environment"):
            call(unknown)


def test_a_disconnected_environment_has_no_weight_and_keeps_its_groups(pool: BlockingPool) -> None:
    started(pool)
    first, second = joined(pool), joined(pool)
    post(pool, 7, first)
    assert pool.desk_env_status(second).env_weight == 0.5
    pool.desk_disconnect(first)
    pool.desk_disconnect(first)
    status = pool.desk_env_status(second)
    assert (status.env_weight, status.queue_size, status.self_queue_size) == (1.0, 1, 0)


def test_a_size_that_is_not_the_environments_waits_in_its_buffer(pool: BlockingPool) -> None:
    started(pool)
    env = joined(pool, group_size=4)
    assert post(pool, 1, env, 3) == Posted("buffered", 3)
    assert pool.desk_latest() is None
    assert post(pool, 2, env, 1) == Posted("buffered", 0)
    assert pool.desk_latest() == piece(2, 1)
    assert drained(pool) == [1, 2]


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_group_under_a_known_key_is_answered_as_the_first_and_queued_once(pool: BlockingPool) -> None:
    started(pool)
    env = joined(pool, group_size=4)
    assert post(pool, 1, env, 3, "a") == Posted("buffered", 3)
    assert post(pool, 1, env, 3, "a") == Posted("buffered", 3, duplicate=True)
    assert post(pool, 2, None, 2, "a") == Posted("received"), "the key is its environment's own"
    found = pool.desk_post([posting(3, env, 4, "b"), posting(3, env, 4, "b"), posting(3, env, 4)])
    assert [one.duplicate for one in found] == [False, True, False]
    assert scored_stats(pool)["posted"] == 4
    assert scored_stats(pool)["duplicates"] == 2


def test_a_group_under_a_key_that_was_forgotten_is_another_group(pool: BlockingPool) -> None:
    started(pool)
    first, second = joined(pool), joined(pool)
    for env in (first, second):
        post(pool, 1, env, 2, "a")
    pool.desk_forget([(first, "a"), (None, "a"), (first, "never seen")])
    assert post(pool, 1, first, 2, "a") == Posted("received")
    assert post(pool, 1, second, 2, "a").duplicate, "the key is its environment's own"
    assert pool.desk_status().queue_size == 3
    with pytest.raises(InvalidInput, match="keys"):
        pool.desk_forget(["a"])  # type: ignore[list-item]


def test_a_post_that_is_sent_again_is_one_post(pool: BlockingPool) -> None:
    started(pool)
    groups = [posting(1), posting(1)]
    pool.desk_post(groups, "request")
    assert [one.duplicate for one in pool.desk_post(groups, "request")] == [True, True]
    assert scored_stats(pool)["queued"] == 2


@pytest.mark.parametrize(
    "wrong",
    [
        Posting(Piece(b"", 0, 0), 0),
        Posting(Piece(b"", 0, 0), 2**40),
        Posting(Piece(b"", -1, 0), 1),
        Posting(Piece(b"", 0, 2**40), 1),
        Posting(Piece(b"", 0, 0), 1, key="k" * 1000),
        Posting(Piece(b"", 0, 0), 1, env_id="maze"),  # type: ignore[arg-type]
    ],
)
def test_one_wrong_group_and_none_is_taken(pool: BlockingPool, wrong: Posting) -> None:
    started(pool)
    with pytest.raises(InvalidInput):
        pool.desk_post([posting(1), wrong])
    assert scored_stats(pool)["posted"] == 0
    assert post(pool, 1) == Posted("received")


def test_groups_that_no_batch_can_hold_are_counted_and_told_not_left_to_rot(pool: BlockingPool) -> None:
    post(pool, 9, sequences=6)  # nobody knows yet
    pool.desk_register(trainer())
    assert scored_stats(pool)["dead_letters"] == {"too_large": 1}
    post(pool, 8, sequences=5)
    assert scored_stats(pool)["dead_letters"] == {"too_large": 2}
    assert [event["reason"] for event in events(pool, "dead_letter")] == [
        "its 6 sequences exceed batch_size 4",
        "its 5 sequences exceed batch_size 4",
    ]


def test_a_reset_forgets_all_but_what_was_counted(pool: BlockingPool) -> None:
    started(pool)
    env = joined(pool)
    for name in range(3):
        post(pool, name, env, key=str(name))
    batch = pool.desk_batch()
    assert batch is not None
    pool.desk_reset()
    assert (pool.desk_info(), pool.desk_status()) == (ScoredInfo(None, False, 0), ScoredStatus(0, 0))
    assert pool.desk_latest() is None
    with pytest.raises(NotRegistered):
        pool.desk_batch()
    with pytest.raises(LeaseLost):
        pool.desk_ack(batch.lease)
    assert scored_stats(pool)["cleared"] == 3
    assert not post(pool, 0, env, key="0").duplicate


def test_the_awaitable_desk_does_the_same(pool: BlockingPool) -> None:
    async def run() -> list[int]:
        aio = pool.aio  # type: ignore[attr-defined]
        await aio.desk_register(trainer())
        await aio.desk_batch()
        env = (await aio.desk_register_env(environment())).env_id
        await asyncio.gather(*(aio.desk_post([posting(name, env)]) for name in range(8)))
        assert (await aio.desk_env_status(env, 60.0)).queue_size == 8
        found = []
        while (batch := await aio.desk_batch()) is not None:
            found += names(batch)
            await aio.desk_ack(batch.lease)
        if hasattr(pool, "aclose"):
            await pool.aclose()
        return found

    assert sorted(asyncio.run(run())) == list(range(8))
