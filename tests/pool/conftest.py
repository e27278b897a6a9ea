"""The pool in its three forms. A test that asks for `pool` runs once with each: what is true of one is true of all."""

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
