"""What was answered to nobody is not lost, and not taken twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.api.kit import Held, api_on, connected, encoded, hang_up_after, until
from tests.atropos.groups import group
from tests.pool.kit import events

from headrace import DataPool
from headrace.api.retry_keys import RetryKeys
from headrace.data.scored import ScoredGroup, store
from headrace.pool.scored.types import Posting


def test_a_trainer_that_timed_out_gets_the_batch_again(pool: DataPool) -> None:
    held = Held(pool, "desk_batch")
    with api_on(held) as api:
        api.opened(8, 4)
        api.send(group(1, 4, 0), group(2, 4, 0), group(3, 4, 0))
        hang_up_after(held, api.address, "GET", "/batch")
        until(lambda: api.queued() == 3)
        assert api.get("/status") == {"current_step": 0, "queue_size": 3}, "it was no step"
        assert api.batch() == [1, 2]
        assert api.get("/status") == {"current_step": 1, "queue_size": 1}


def test_a_batch_is_consumed_once_it_is_written(pool: DataPool) -> None:
    with api_on(pool) as api:
        api.opened(4, 4)
        for n in range(5):
            api.send(group(n, 4, 0, images="x" * 300_000 * n))
            assert api.batch() == [n]
            until(lambda: pool.stats()["desk"]["leases"] == 0)
            assert pool.stats()["desk"]["served"] == n + 1


@pytest.mark.parametrize("size", [0, 300_000])
def test_a_batch_is_recorded_as_consumed_only_after_its_last_byte_was_written(pool: DataPool, size: int) -> None:
    """So that a server that is killed in between loses nothing: see `test_kill`."""
    held = Held(pool, "desk_ack", before=True)
    with api_on(held) as api:
        api.opened(4, 4)
        api.send(group(1, 4, 0, images="x" * size))
        held.arm()
        assert api.batch() == [1]  # all of it is there, and nothing is recorded yet
        assert held.reached.wait(120)
        assert pool.stats()["desk"]["out"] == 1
        held.go.set()
        until(lambda: pool.stats()["desk"]["served"] == 1)


@pytest.mark.parametrize("told", [False, True])
def test_a_batch_whose_delivery_was_not_recorded_comes_again_unless_the_trainer_says_it_has_it(
    pool: DataPool, told: bool
) -> None:
    with api_on(pool) as api:
        api.opened(4, 4)
        api.send(group(1, 4, 0), group(2, 4, 0))
        out = pool.desk_batch()
        assert out is not None
        pool.desk_release()  # as a server does that was killed after it had written the answer
        headers = {"Headrace-Received": out.lease} if told else {}
        answer = api.client.get("/batch", headers=headers)
        found = [one["tokens"][0][0] for one in answer.json()["batch"]]
        assert (found, answer.headers.get("headrace-repeated")) == (([2], None) if told else ([1], "true"))
        until(lambda: pool.stats()["desk"]["leases"] == 0)
        assert api.get("/status") == {"current_step": 2 if told else 1, "queue_size": 0 if told else 1}
        again = api.client.get("/batch", headers={"Headrace-Received": answer.headers["headrace-batch"]})
        assert again.json() == {"batch": None} if told else again.json()["batch"][0]["tokens"][0][0] == 2


def test_a_batch_that_is_named_as_received_is_forgotten_once_and_a_strange_name_changes_nothing(pool: DataPool) -> None:
    with api_on(pool) as api:
        api.opened(4, 4)
        api.send(*(group(n, 4, 0) for n in range(3)))
        first = pool.desk_batch()
        assert first is not None
        pool.desk_received(first.lease)  # it is out: as good as acknowledged
        pool.desk_received(first.lease)
        pool.desk_received("desk-77")
        assert api.batch() == [1]
        until(lambda: pool.stats()["desk"]["leases"] == 0)
        second = pool.desk_batch()
        assert second is not None
        pool.desk_nack(second.lease)
        third = pool.desk_batch()  # to another trainer
        assert third is not None
        assert third.repeated
        pool.desk_received(second.lease)
        found = pool.stats()["desk"]
        assert (found["out"], found["served"], found["step"]) == (1, 2, 3), "what another has is not taken from it"


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list"])
def test_a_group_sent_again_after_an_answer_that_nobody_read_is_one_group(pool: DataPool, path: str) -> None:
    held = Held(pool, "desk_post")
    with api_on(held) as api:
        api.opened(8, 4)
        sent: Any = group(1, 4, 0)
        sent = [sent, sent] if path.endswith("list") else sent
        count = len(sent) if isinstance(sent, list) else 1
        hang_up_after(held, api.address, "POST", path, sent)
        assert api.post(path, sent)["status"] == "received"
        assert api.queued() == count
        assert api.post(path, sent)["status"] == "received"
        assert api.queued() == 2 * count, "sent once more on purpose"


def test_a_group_sent_again_while_the_first_is_still_on_its_way_is_one_group(pool: DataPool) -> None:
    held = Held(pool, "desk_post")
    with api_on(held) as api:
        api.opened(8, 4)
        first = connected(api.address)
        second = connected(api.address)
        body = encoded(group(1, 4, 0))
        held.arm()
        first.request("POST", "/scored_data", body)
        assert held.reached.wait(120)
        second.request("POST", "/scored_data", body)
        until(lambda: api.queued() == 1)  # others are answered meanwhile
        first.close()
        api.get("/")  # once this is answered, the server has seen it hang up
        held.go.set()
        assert second.getresponse().status == 200
        second.close()
        assert api.queued() == 1


async def test_posts_with_the_same_groups_in_another_order_wait_for_one_another_in_turn() -> None:
    """An environment sends again what timed out, in other lists than before, while the first is on its way."""
    a, b = (ScoredGroup(store(b"{}"), 1, 0, digest) for digest in "ab")
    keys = RetryKeys(DataPool().aio)
    under_way = await keys.take([b])
    posts = [asyncio.create_task(keys.take(groups)) for groups in ([b, a], [a, b, b])]
    await asyncio.sleep(0)  # both have come
    keys.settle(under_way, False)
    while posts:
        for _ in range(10):
            await asyncio.sleep(0)
        ready = [post for post in posts if post.done()]
        assert ready, "each waits for what the other holds"
        for post in ready:
            posts.remove(post)
            keys.settle(post.result(), False)
    assert await keys.take([a, b, b]) == [(0, "a-0-0"), (0, "b-0-0"), (0, "b-1-0")], "in the order of the groups"


async def test_an_equal_group_sent_on_purpose_is_known_when_it_is_sent_again_though_the_first_is_forgotten() -> None:
    """The first one's answer arrives, and the second is posted before the pool has forgotten the first one's key."""
    with DataPool() as pool:
        keys, sent = RetryKeys(pool.aio), ScoredGroup(store(b"{}"), 1, 0, "a")

        async def post(key: tuple[int | None, str]) -> None:
            await pool.aio.desk_post([Posting(sent.piece, sent.sequences, *key)])

        first = await keys.take([sent])
        await post(first[0])
        keys.settle(first, True)
        second = await keys.take([sent])
        await post(second[0])
        await keys.close()  # the pool has forgotten the first now
        retry = asyncio.create_task(keys.take([sent]))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not retry.done(), "the second's answer is not settled yet"
        keys.settle(second, False)
        assert await retry == second
        await post(second[0])
        assert pool.stats()["desk"]["posted"] == 2
        keys.settle(second, True)
        third = await keys.take([sent])
        assert third not in (first, second), "another one on purpose"
        await post(third[0])
        assert pool.stats()["desk"]["posted"] == 3
        keys.settle(third, True)
        await keys.close()
        assert await keys.take([sent]) == first, "nothing is remembered of what was answered"


def test_a_group_is_known_again_after_a_restart(tmp_path: Any) -> None:
    """The first server ends before its client has an answer; the pool knows the group, the next server asks it."""
    with DataPool(tmp_path) as pool:
        held = Held(pool, "desk_post")
        with api_on(held) as api:
            api.opened(8, 4)
            api.send(group(1, 4, 0))
            hang_up_after(held, api.address, "POST", "/scored_data", group(2, 4, 0))
    with DataPool(tmp_path) as pool, api_on(pool) as api:
        api.send(group(2, 4, 0))
        assert api.queued() == 2, "a retry of the one that was not answered"
        api.send(group(1, 4, 0))
        assert api.queued() == 3, "the other one was: this is another group"


def test_a_post_whose_client_hangs_up_before_its_end_is_not_taken(pool: DataPool) -> None:
    with api_on(pool) as api:
        api.opened(8, 4)
        body = encoded(group(1, 4, 0))
        connection = connected(api.address)
        connection.putrequest("POST", "/scored_data")
        connection.putheader("content-length", str(len(body) + 1))
        connection.endheaders(body)
        connection.close()
        api.send(group(1, 4, 0))
        assert api.queued() == 1


def test_a_key_makes_retries_one_group_and_keys_are_each_environments_own(pool: DataPool) -> None:
    with api_on(pool) as api:
        api.opened(8, 4, 4)
        for _ in range(3):
            api.send(group(1, 4, 0), **{"Idempotency-Key": "one"})
        api.send(group(1, 4, 1), **{"Idempotency-Key": "one"})
        api.send(group(1, 4, 0), **{"Idempotency-Key": "two"})
        assert api.queued() == 3
        answer = api.client.post("/scored_data", json=group(1, 4, 0), headers={"Idempotency-Key": "x" * 500})
        assert (answer.status_code, api.queued()) == (422, 3)


def test_a_trainer_that_does_not_read_does_not_keep_its_batch(pool: DataPool) -> None:
    with api_on(pool) as api, api_on(pool, answer_s=0.2) as hasty:
        api.opened(4, 4)
        api.send(group(1, 4, 0, images="x" * 30_000_000))
        connection = connected(hasty.address)
        connection.request("GET", "/batch", headers={"accept-encoding": "identity"})
        until(lambda: bool(events(pool, "redelivery")))
        assert api.batch() == [1]
        connection.close()
