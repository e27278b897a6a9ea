"""Fetching: what a batch holds, when it comes, when it ends, and that a lost answer can be asked for again."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pool.kit import (
    SOON,
    Threads,
    drain,
    events,
    fetched,
    group,
    keys,
    ledger,
    prompts,
    step,
    trajectory,
    until_blocked,
)

from headrace.pool.errors import LeaseLost, PoolClosed


def ready(pool: Any, *names: str, **options: Any) -> None:
    pool.submit_steps([one for name in names for one in group(name)], **options)


# -- how much, and when -----------------------------------------------------------------------------------------------


def test_a_batch_is_counted_in_groups(pool: Any) -> None:
    pool.configure(n_rollouts=2)
    pool.submit_steps([*group("a", 2, 2), *group("b", 2, 2), *group("c", 2, 2)])
    batch = fetched(pool, 2)
    assert (len(batch), len(batch.steps), batch.channel) == (2, 8, "train")
    assert keys(batch.steps)[:4] == [("a/0", 0), ("a/0", 1), ("a/1", 0), ("a/1", 1)]
    assert len(batch.sequences()) == 4


def test_too_little_consumes_nothing(pool: Any) -> None:
    ready(pool, "a", "b")
    assert pool.fetch_batch(3, timeout=0) is None
    assert pool.fetch_batch(3, timeout=0.02) is None
    assert ledger(pool) == {"submitted": 2, "queued": 2}
    assert prompts(fetched(pool, 2)) == ["a", "b"]


def test_a_batch_consumed_on_hand_out_has_nothing_to_acknowledge(pool: Any) -> None:
    ready(pool, "a")
    batch = fetched(pool)
    assert (batch.lease_id, batch.deadline) == (None, None)
    assert ledger(pool) == {"submitted": 1, "consumed": 1}
    for end in (batch.ack, batch.nack, lambda: batch.extend(5)):
        with pytest.raises(LeaseLost, match="consumed when it was handed out"):
            end()


def test_a_blocked_fetch_is_woken_by_a_submit(pool: Any, threads: Threads) -> None:
    waiting = threads.submit(pool.fetch_batch, 2)
    until_blocked(pool)
    ready(pool, "a")
    pool.submit_step(step("b"))
    pool.submit_step(step("b", 1, last=True))
    assert prompts(waiting.result(SOON)) == ["a", "b"]


def test_a_blocked_fetch_is_woken_by_complete(pool: Any, threads: Threads) -> None:
    pool.submit_step(step("t"))
    waiting = threads.submit(pool.fetch_batch, 1)
    until_blocked(pool)
    pool.complete("t")
    assert prompts(waiting.result(SOON)) == ["t"]


def test_a_blocked_fetch_is_woken_by_a_changed_configuration(pool: Any, threads: Threads) -> None:
    pool.configure(n_rollouts=2)
    ready(pool, "p")
    waiting = threads.submit(pool.fetch_batch, 1)
    until_blocked(pool)
    pool.configure(n_rollouts=1)
    assert prompts(waiting.result(SOON)) == ["p"]


def test_a_blocked_fetch_is_woken_by_a_reward(pool: Any, threads: Threads) -> None:
    pool.configure(require_reward=True)
    ready(pool, "p")
    waiting = threads.submit(pool.fetch_batch, 1)
    until_blocked(pool)
    pool.reward("p/0", 1.0)
    assert prompts(waiting.result(SOON)) == ["p"]


def test_a_blocked_fetch_is_woken_by_a_lease_that_is_given_back(pool: Any, threads: Threads) -> None:
    ready(pool, "p")
    batch = fetched(pool, lease_s=600)
    waiting = threads.submit(pool.fetch_batch, 1)
    until_blocked(pool)
    batch.nack()
    assert prompts(waiting.result(SOON)) == ["p"]


def test_a_blocked_fetch_takes_a_partial_group_when_it_times_out(pool: Any) -> None:
    pool.configure(n_rollouts=3, group_timeout_s=0.05, on_timeout="partial")
    pool.submit_steps([*group("p", 2), step("p/2", 0, "p")])
    (found,) = fetched(pool).groups
    assert (found.partial, [one.uid for one in found.trajectories]) == (True, ["p/0", "p/1"])
    assert ledger(pool) == {"submitted": 3, "consumed": 2, "timeout": 1}
    assert events(pool, "partial") == [{"group": "p", "trajectories": 2}]


def test_a_fetch_that_already_waits_hears_of_a_group_that_will_time_out(pool: Any, threads: Threads) -> None:
    pool.configure(n_rollouts=2, group_timeout_s=0.05, on_timeout="partial")
    waiting = threads.submit(pool.fetch_batch, 1)
    until_blocked(pool)
    ready(pool, "p")
    assert waiting.result(SOON).groups[0].partial


def test_a_fetch_that_already_waits_hears_of_a_grace_that_will_end(pool: Any, threads: Threads) -> None:
    pool.configure(grace_s=0.05)
    waiting = threads.submit(pool.fetch_batch, 1)
    until_blocked(pool)
    ready(pool, "p")
    assert prompts(waiting.result(SOON)) == ["p"]


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_channel_that_was_shut_down_gives_what_is_left_then_none(pool: Any) -> None:
    ready(pool, "a", "b", "c")
    pool.submit_step(step("unfinished"))
    pool.shutdown("train")
    with pytest.raises(PoolClosed, match="nothing was taken"):
        pool.submit_step(step("d", last=True))
    with pytest.raises(PoolClosed):
        pool.open("d")
    assert prompts(pool.fetch_batch(2)) == ["a", "b"]
    assert prompts(pool.fetch_batch(2)) == ["c"]
    assert pool.fetch_batch(2) is None
    assert pool.fetch_batch(1, unit="step") is not None
    assert pool.fetch_batch(1, unit="step") is None
    pool.shutdown("train")
    assert pool.stats("train")["closed"] is True


def test_a_blocked_fetch_ends_when_its_channel_is_shut_down(pool: Any, threads: Threads) -> None:
    ready(pool, "a")
    waiting = threads.submit(pool.fetch_batch, 5)
    until_blocked(pool)
    pool.shutdown()
    assert prompts(waiting.result(SOON)) == ["a"]
    assert pool.fetch_batch(5) is None


def test_a_shutdown_of_all_ends_those_who_wait_for_a_channel_that_never_was(pool: Any, threads: Threads) -> None:
    ready(pool, "a")
    waiting = threads.submit(pool.fetch_batch, 1, channel="never")
    until_blocked(pool)
    pool.shutdown()
    assert waiting.result(SOON) is None
    with pytest.raises(PoolClosed):
        pool.submit_step(step("b"), channel="new")


def test_a_shutdown_of_one_channel_leaves_the_others(pool: Any) -> None:
    ready(pool, "a")
    pool.shutdown("eval")
    ready(pool, "b")
    assert prompts(fetched(pool, 2)) == ["a", "b"]


def test_a_channel_that_was_shut_down_goes_on_when_it_is_reopened(pool: Any) -> None:
    ready(pool, "a")
    for named in ("train", None):
        pool.shutdown(named)
        with pytest.raises(PoolClosed, match="shut down"):
            ready(pool, "refused")
        pool.reopen(named)
        ready(pool, f"after {named}")
    assert prompts(fetched(pool, 3)) == ["a", "after train", "after None"]
    assert pool.fetch_batch(1, timeout=0) is None, "it waits for more, as an open channel does"


def test_what_a_shut_down_channel_gave_on_lease_can_come_back(pool: Any) -> None:
    ready(pool, "a")
    batch = fetched(pool, lease_s=600)
    pool.shutdown()
    assert pool.fetch_batch(1) is None
    batch.nack()
    assert prompts(pool.fetch_batch(1)) == ["a"]


# -- the same request again -------------------------------------------------------------------------------------------


def test_a_request_sent_again_gets_the_same_batch(pool: Any) -> None:
    ready(pool, "a", "b", "c")
    first = fetched(pool, 2, request_id="r1")
    again = fetched(pool, 2, request_id="r1")
    assert prompts(first) == prompts(again) == ["a", "b"]
    assert first.steps == again.steps
    assert prompts(fetched(pool, 1, request_id="r2")) == ["c"]
    assert ledger(pool) == {"submitted": 3, "consumed": 3}


def test_a_leased_request_sent_again_gets_the_same_lease(pool: Any) -> None:
    ready(pool, "a", "b")
    first = fetched(pool, request_id="r", lease_s=600)
    again = fetched(pool, request_id="r", lease_s=600)
    assert (first.lease_id, first.deadline, prompts(first)) == (again.lease_id, again.deadline, prompts(again))
    assert again.groups[0].deliveries == 1
    first.ack()
    again.ack()
    assert prompts(fetched(pool, request_id="r")) == ["b"]


def test_a_request_whose_lease_was_lost_is_a_new_one(pool: Any) -> None:
    ready(pool, "a")
    first = fetched(pool, request_id="r", lease_s=600)
    first.nack()
    again = fetched(pool, request_id="r", lease_s=600)
    assert again.lease_id != first.lease_id
    assert again.groups[0].deliveries == 2


def test_however_many_answers_a_connection_loses_each_is_given_again(pool: Any) -> None:
    ready(pool, *"abcdefgh")
    requests = [f"consumer/{n}" for n in range(8)]
    first = [prompts(fetched(pool, request_id=request)) for request in requests]
    assert first == [[name] for name in "abcdefgh"]
    assert [prompts(pool.fetch_batch(1, timeout=0, request_id=request)) for request in requests] == first


def test_a_channel_that_keeps_no_replies_forgets_a_request_at_once_unless_its_lease_lasts(pool: Any) -> None:
    pool.configure(replies_kept=0)
    ready(pool, "a", "b", "c")
    fetched(pool, request_id="r1")
    assert prompts(fetched(pool, request_id="r1")) == ["b"]
    leased = fetched(pool, request_id="r2", lease_s=600)
    assert fetched(pool, request_id="r2", lease_s=600).lease_id == leased.lease_id


def test_single_steps_by_request_are_the_same_again(pool: Any) -> None:
    pool.submit_steps(trajectory("t", 3))
    first = fetched(pool, 2, request_id="r", unit="step")
    assert keys(fetched(pool, 2, request_id="r", unit="step").steps) == keys(first.steps)
    assert ledger(pool) == {"submitted": 3, "consumed": 2, "queued": 1}


# -- orders -----------------------------------------------------------------------------------------------------------


def test_latest_gives_the_newest_first(pool: Any) -> None:
    ready(pool, "a", "b", "c", "d")
    assert prompts(fetched(pool, 2, order="latest")) == ["d", "c"]
    ready(pool, "e")
    assert prompts(fetched(pool, 2, order="latest")) == ["e", "b"]
    assert drain(pool) == ["a"]


def test_latest_counts_lowered_groups_too(pool: Any) -> None:
    pool.configure(n_rollouts=2)
    for prompt, n in (("a", 2), ("b", 1), ("c", 2), ("d", 1)):
        pool.submit_steps(group(prompt, n))
    assert prompts(fetched(pool, 3, order="latest", n_rollouts=1)) == ["d", "c", "b"]


def test_mixed_adds_a_share_of_what_was_consumed(pool: Any) -> None:
    pool.configure(history_size=10, replay_share=0.5)
    ready(pool, *"abcd")
    assert prompts(fetched(pool, 4)) == [*"abcd"]
    ready(pool, *"efgh")
    batch = fetched(pool, 4, order="mixed")
    assert [found.replayed for found in batch.groups] == [False, False, True, True]
    assert prompts(batch)[:2] == ["e", "f"]
    assert set(prompts(batch)[2:]) <= set("abcd")
    assert all(found.deliveries == 2 for found in batch.groups if found.replayed)
    assert ledger(pool) == {"submitted": 8, "consumed": 6, "queued": 2}


def test_mixed_replays_the_least_replayed_first(pool: Any) -> None:
    pool.configure(history_size=4, replay_share=0.5)
    ready(pool, *"abcd")
    fetched(pool, 4)
    seen = []
    for name in "efgh":
        ready(pool, name)
        seen += [found.prompt_uid for found in fetched(pool, 2, order="mixed").groups if found.replayed]
    assert len(set(seen)) == 4


def test_mixed_without_a_history_is_fifo(pool: Any) -> None:
    ready(pool, "a", "b", "c")
    assert prompts(fetched(pool, 2, order="mixed")) == ["a", "b"]
    assert pool.fetch_batch(2, order="mixed", timeout=0) is None


def test_mixed_never_replays_in_place_of_what_is_fresh_and_missing(pool: Any) -> None:
    pool.configure(history_size=10)
    ready(pool, *"abcd")
    fetched(pool, 4)
    ready(pool, "e")
    assert pool.fetch_batch(4, order="mixed", timeout=0) is None
    assert ledger(pool) == {"submitted": 5, "consumed": 4, "queued": 1}


def test_history_is_kept_in_number_the_oldest_go(pool: Any) -> None:
    pool.configure(history_size=2, replay_share=0.5)
    ready(pool, *"abc")
    fetched(pool, 3)
    assert pool.stats("train")["groups"]["history"] == 2
    ready(pool, "d", "e")
    assert set(prompts(fetched(pool, 4, order="mixed"))) == {"b", "c", "d", "e"}


def test_a_replayed_group_under_a_lease_is_not_consumed_twice(pool: Any) -> None:
    pool.configure(history_size=4, replay_share=0.5)
    ready(pool, "a")
    fetched(pool)
    ready(pool, "b")
    batch = fetched(pool, 2, order="mixed", lease_s=600)
    assert prompts(batch) == ["b", "a"]
    batch.ack()
    assert ledger(pool) == {"submitted": 2, "consumed": 2}
