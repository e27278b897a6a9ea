"""Groups become batches: whole, packed by size, after a wait in a buffer, by shares."""

from __future__ import annotations

from collections.abc import Iterator

from tests.atropos.calls import Call, get, post
from tests.atropos.groups import full, group, served
from tests.atropos.words import (
    NO_EXAMPLE,
    NOT_READY,
    RECEIVED,
    buffered,
    environment,
    opening,
    send,
    status,
    status_env,
)


def equal_groups_are_two() -> Iterator[Call]:
    yield from opening(8, environment(4))
    yield from send(group(1, 4, 0), group(1, 4, 0))
    yield status(0, 2)
    yield get("/batch", served(group(1, 4, 0), group(1, 4, 0)))


def a_retry_with_a_key() -> Iterator[Call]:
    keyed = {"headers": (("idempotency-key", "one"),)}
    yield from opening(8, environment(4))
    yield post("/scored_data", group(1, 4, 0), RECEIVED, **keyed)
    yield post("/scored_data", group(1, 4, 0), RECEIVED, **keyed)
    yield status(0, 2)


def a_batch_when_there_is_one() -> Iterator[Call]:
    one, two, three = (group(n, 4, 0) for n in (1, 2, 3))
    yield from opening(8, environment(4))
    yield from send(one)
    yield get("/batch", NOT_READY)
    yield status(0, 1)
    yield from send(two)
    yield get("/batch", served(one, two))
    yield status(1, 0)
    yield get("/batch", NOT_READY)
    yield from send(three)
    yield get("/latest_example", full(three))
    yield status(1, 1)


def two_batches_at_once() -> Iterator[Call]:
    groups = [group(n, 4, 0) for n in range(1, 6)]
    yield from opening(8, environment(4))
    yield from send(*groups)
    yield get("/batch", served(*groups[2:4]))
    yield status(2, 1)
    yield status_env(0, step=2, queued=1, own=1, largest=4)
    yield get("/batch", served(*groups[0:2]))
    yield status(2, 1)
    yield get("/batch", NOT_READY)


def groups_of(size: int) -> Iterator[Call]:
    groups = [group(n, size, 0) for n in (1, 2, 3)]
    yield from opening(2 * size, environment(size))
    yield from send(*groups)
    yield status_env(0, queued=3, own=3, largest=size)
    yield get("/batch", served(*groups[:2]))
    yield status_env(0, step=1, queued=1, own=1, largest=size)
    yield status(1, 1)


def mixed_sizes() -> Iterator[Call]:
    """Packs of the largest size, 4, each of one size: pairs of 2, fours of 1; in the order in which they are full."""
    fours, twos = [group(n, 4, 0) for n in (10, 11)], [group(n, 2, 1) for n in (20, 21, 22)]
    ones = [group(n, 1, 2) for n in (30, 31, 32, 33)]
    yield from opening(12, environment(4), environment(2), environment(1))
    yield from send(ones[0], twos[0], fours[0], ones[1], twos[1], ones[2], twos[2])
    yield get("/batch", NOT_READY)
    yield from send(ones[3])
    yield get("/batch", served(fours[0], twos[0], twos[1], *ones))
    yield status(1, 1)
    yield from send(fours[1])
    yield status(1, 2)
    yield get("/batch", NOT_READY)


def sizes_that_do_not_divide() -> Iterator[Call]:
    """Two threes fill the batch of 6, until a 4 makes packs of 4 of them, which threes cannot be."""
    yield from opening(6, environment(3), environment(4))
    yield from send(group(1, 3, 0), group(2, 4, 1), group(3, 3, 0))
    yield get("/batch", NOT_READY)
    yield status(0, 3)


def a_group_larger_than_the_batch() -> Iterator[Call]:
    yield from opening(4, environment(8), environment(2))
    yield from send(group(1, 8, 0))
    yield get("/batch", NOT_READY)
    yield from send(group(2, 2, 1), group(3, 2, 1))
    yield get("/batch", NOT_READY)


def odd_sizes_wait_in_a_buffer() -> Iterator[Call]:
    two, three, other, one = (group(n, size, 0) for n, size in ((1, 2), (2, 3), (3, 2), (4, 1)))
    yield from opening(8, environment(4))
    yield buffered(two, 2)
    yield get("/latest_example", NO_EXAMPLE)
    yield buffered(three, 5)
    yield status(0, 0)
    yield status_env(0, queued=0, own=0, largest=1)
    yield buffered(other, 3)  # the twos are four, and go
    yield get("/latest_example", full(other))
    yield status(0, 2)
    yield status_env(0, queued=1, own=1, largest=2)
    yield from send(group(5, 4, 0))
    yield buffered(one, 0)
    yield status(0, 5)
    yield status_env(0, queued=3, own=3, largest=4)


def any_combination_of_a_buffer() -> Iterator[Call]:
    """First fit would take the 4 and stop there."""
    four, three, two = (group(n, size, 0) for n, size in ((1, 4), (2, 3), (3, 2)))
    yield from opening(5, environment(5))
    yield buffered(four, 4)
    yield buffered(three, 7)
    yield buffered(two, 4)
    yield status(0, 2)
    yield buffered(group(4, 7, 0), 11)  # larger than the environment's: waits for ever
    yield buffered(group(5, 1, 0), 7)


def buffered_groups_are_served() -> Iterator[Call]:
    halves = [group(n, 2, 0) for n in (1, 2)]
    yield from opening(4, environment(4))
    yield buffered(halves[0], 2)
    yield get("/batch", NOT_READY)
    yield buffered(halves[1], 0)
    yield get("/batch", served(*halves))
    yield status(1, 0)


def buffers_are_each_environments_own() -> Iterator[Call]:
    yield from opening(4, environment(4), environment(4))
    yield buffered(group(1, 2, 0), 2)
    yield buffered(group(2, 2, 1), 2)
    yield status(0, 0)
    yield from send(group(3, 2), group(4, 2, 99))  # of no environment, or of none that is known: as they come
    yield status(0, 2)
    yield get("/batch", served(group(3, 2), group(4, 2, 99)))


def lists_of_groups() -> Iterator[Call]:
    groups = [group(n, 4, 0) for n in (1, 2, 3)]
    yield from opening(8, environment(4))
    yield post("/scored_data_list", groups[:2], {"status": "received", "groups_processed": 2})
    yield get("/latest_example", full(groups[1]))
    odd = {"status": "received", "groups_processed": 3, "buffered": 2, "last_buffer_size": 3}
    yield post("/scored_data_list", [group(4, 2, 0), groups[2], group(5, 1, 0)], odd)
    yield status(0, 3)
    yield post("/scored_data_list", [], {"status": "received", "groups_processed": 0})
    yield post("/scored_data_list", [group(6, 4, 0), {"tokens": [[1]]}], status=422)
    yield status(0, 3)
    yield get("/batch", served(*groups[:2]))


def a_minimum_for_one_of_two() -> Iterator[Call]:
    """Half of 8 sequences are the second environment's, although the first has older ones."""
    first, second = [group(n, 2, 0) for n in (1, 2, 3, 4)], [group(n, 2, 1) for n in (11, 12, 13)]
    yield from opening(8, environment(2), environment(2, min_batch_allocation=0.5))
    yield from send(*first)
    yield status_env(0, weight=0.5, free=0.5, queued=4, own=4, largest=2)
    yield from send(*second)
    yield status_env(0, weight=0.5, free=0.5, queued=5, own=4, largest=2)  # (8 + (6 - 4)) // 2
    yield status_env(1, weight=0.5, free=0.5, queued=7, own=3, largest=2)
    yield get("/batch", served(*second[:2], *first[:2]))
    yield status(1, 3)


def shares_over_one() -> Iterator[Call]:
    """0.75 and 0.75 of 8 are 6 and 6, scaled down to 4 and 4."""
    first, second = [group(n, 2, 0) for n in range(1, 5)], [group(n, 2, 1) for n in range(11, 15)]
    shares = {"min_batch_allocation": 0.75}
    yield from opening(8, environment(2, **shares), environment(2, **shares))
    yield from send(*first)
    yield from send(*second[:2])
    yield status_env(0, weight=0.5, free=0.0, queued=4, own=4, largest=2)
    yield get("/batch", served(*first[:2], *second[:2]))
    yield status(1, 2)


def a_share_ends_with_its_environment() -> Iterator[Call]:
    groups = [group(n, 4, 0) for n in (1, 2)]
    yield from opening(8, environment(4), environment(4, min_batch_allocation=0.5))
    yield from send(*groups)
    yield post("/disconnect-env", {"env_id": 1}, {"status": "success"})
    yield status_env(0, weight=1.0, queued=2, own=2, largest=4)
    yield get("/batch", served(*groups))


def a_minimum_and_no_data() -> Iterator[Call]:
    yield from opening(8, environment(4), environment(4, min_batch_allocation=0.5))
    yield from send(group(1, 4, 0), group(2, 4, 0))
    yield get("/batch", NOT_READY)


def minimum_with_other_sizes() -> Iterator[Call]:
    """A quarter of 16 is one pack: two groups of 2 of the second, then the fours by age."""
    fours, twos = [group(n, 4, 0) for n in (1, 2, 3)], [group(n, 2, 1) for n in (11, 12)]
    yield from opening(16, environment(4), environment(2, min_batch_allocation=0.25))
    yield from send(twos[0], *fours)
    yield get("/batch", NOT_READY)
    yield from send(twos[1])
    yield get("/batch", served(*twos, *fours))
