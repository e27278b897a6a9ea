"""The pool in its three forms. A test that asks for `pool` runs once with each: what is true of one is true of all.

Over Ray a call is a hundred times as dear as in the process, and what it carries out there is the same code. So `make
test` runs those over Ray that lean on the transport (`OVER_RAY`); all of them do so in `make test-long`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.pool.kit import Host, Threads, check_conservation

from headrace import DataPool, connect
from headrace.pool.calls import BlockingPool
from headrace.pool.errors import PoolClosed

MakePool = Callable[..., Any]

#: What Ray could do differently: values and errors that pass through it, calls that wait, callers at the same time,
#: awaited calls, and something of every kind of operation.
OVER_RAY = frozenset(
    {
        "test_what_is_submitted_is_fetched_with_every_field",
        "test_a_producer_may_send_only_what_is_new",
        "test_numbers_may_be_numpys",
        "test_errors_keep_their_class_and_words_wherever_they_are_raised",
        "test_steps_that_are_no_list_are_refused",
        "test_sizes_are_bounded",
        "test_a_blocked_fetch_is_woken_by_a_submit",
        "test_a_blocked_fetch_ends_when_its_channel_is_shut_down",
        "test_a_leased_request_sent_again_gets_the_same_lease",
        "test_a_trainer_that_never_acknowledges_gets_the_same_groups_again_in_place",
        "test_a_channel_that_blocks_takes_a_submit_when_there_is_room",
        "test_two_trainers_and_eight_writers_hand_over_every_step_exactly_once",
        "test_of_many_who_wait_each_gets_a_group_of_its_own",
        "test_the_same_request_from_many_threads_is_one_hand_out",
        "test_failures_are_listed_in_their_order_page_by_page",
        "test_metadata_of_a_trajectory_comes_with_its_batch",
        "test_rewards_count_until_hand_out_and_are_late_after_it",
        "test_stats_show_the_ledger_the_queue_and_the_configuration",
        "test_a_trajectory_is_read_as_it_stands_with_its_tree",
        "test_a_long_poll_is_answered_when_something_comes_to_wait",
        "test_steps_are_handed_out_as_they_arrive_each_with_its_whole_prompt",
        "test_groups_that_become_stale_when_the_version_moves_are_dropped",
        "test_a_whole_life_without_blocking",
        "test_errors_are_raised_where_they_are_awaited",
        "test_a_cancelled_fetch_takes_nothing",
        "test_a_batch_holds_exactly_its_size_oldest_first_as_it_was_posted",
        "test_the_awaitable_desk_does_the_same",
    }
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks `long` what runs over Ray beside a cheaper form, and is not in `OVER_RAY`."""
    given = getattr(item, "callspec", None)
    if given is not None and given.params.get("make_pool") == "ray" and item.originalname not in OVER_RAY:  # type: ignore[attr-defined]
        item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    with Host().running() as host:
        yield host


@pytest.fixture(scope="session")
def ray_actor(ray_cluster: str) -> Iterator[tuple[str, Any]]:
    """The pool's actor, by name and handle. It is given a new pool for each test: an actor each would take minutes."""
    import ray
    from tests.pool.actor import RenewedActor

    name = f"pool-{uuid.uuid4().hex}"
    options = {"name": name, "namespace": "default", "lifetime": "detached", "num_cpus": 0, "max_concurrency": 1000}
    actor = ray.remote(RenewedActor).options(**options).remote({})
    yield name, actor
    ray.kill(actor)


def _embedded(request: pytest.FixtureRequest, options: dict[str, Any], stack: ExitStack) -> BlockingPool:
    return stack.enter_context(DataPool(**options))


def _http(request: pytest.FixtureRequest, options: dict[str, Any], stack: ExitStack) -> BlockingPool:
    served = stack.enter_context(DataPool(**options))
    address = stack.enter_context(request.getfixturevalue("host").serving(served))
    return stack.enter_context(connect(address))


def _ray(request: pytest.FixtureRequest, options: dict[str, Any], stack: ExitStack) -> BlockingPool:
    import ray

    name, actor = request.getfixturevalue("ray_actor")
    ray.get(actor.renew.remote(options))
    return stack.enter_context(connect(f"ray-actor://{name}?namespace=default"))


WAYS = {"embedded": _embedded, "http": _http, "ray": _ray}


@pytest.fixture(params=["embedded", "http", pytest.param("ray", marks=pytest.mark.ray)])
def make_pool(request: pytest.FixtureRequest) -> Iterator[MakePool]:
    """Makes pools with the options of `DataPool`. After the test, every ledger must balance."""
    with ExitStack() as stack:
        made: list[BlockingPool] = []

        def make(**options: Any) -> BlockingPool:
            made.append(WAYS[request.param](request, options, stack))
            return made[-1]

        yield make
        for pool in made:
            try:
                check_conservation(pool)
            except PoolClosed:
                pass


@pytest.fixture
def pool(make_pool: MakePool) -> Any:
    return make_pool()


@pytest.fixture
def threads() -> Threads:
    """Threads for calls that block."""
    return Threads()
