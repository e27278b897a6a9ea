"""What /status-env tells an environment of its weight and of the queue."""

from __future__ import annotations

from collections.abc import Iterator

from tests.atropos.calls import Call, get, post
from tests.atropos.groups import group
from tests.atropos.words import buffered, environment, joined, opening, send, status_env


def weights() -> Iterator[Call]:
    big, small = environment(4, max_token_length=3072, weight=2.0), environment(4, max_token_length=1024, weight=2)
    idle = environment(4, max_token_length=1024, weight=0.01)
    yield from opening(8, big, small, idle)
    total = 3072 * 2.0 + 1024 * 2.0 + 1024 * 0.01
    yield status_env(0, weight=3072 * 2.0 / total, queued=0, own=0, largest=1)
    yield status_env(1, weight=1024 * 2.0 / total, queued=0, own=0, largest=1)
    yield status_env(2, weight=0.01, queued=0, own=0, largest=1)
    yield post("/disconnect-env", {"env_id": 0}, {"status": "success"})
    total = 1024 * 2.0 + 1024 * 0.01
    yield status_env(1, weight=1024 * 2.0 / total, queued=0, own=0, largest=1)
    yield post("/disconnect-env", {"env_id": 9}, {"status": "failure", "error": ...})


def what_others_queued_counts() -> Iterator[Call]:
    """Rounded up to packs of the largest: three twos are 6 of the other's sequences, which make 8."""
    yield from opening(32, environment(4), environment(2))
    yield from send(group(1, 4, 0), *(group(n, 2, 1) for n in (2, 3, 4)))
    yield status_env(0, weight=0.5, queued=3, own=1, largest=4)  # (4 + 8) // 4
    yield status_env(1, weight=0.5, queued=5, own=3, largest=4)  # (6 + 4) // 2
    yield from send(group(5, 2))
    yield status_env(0, weight=0.5, queued=4, own=1, largest=4)  # nobody's are an environment's too: (4 + 8 + 4) // 4


def groups_of_one_leave_the_others_out() -> Iterator[Call]:
    yield from opening(32, environment(1), environment(1))
    yield from send(group(1, 1, 0), group(2, 1, 1), group(3, 1, 1))
    yield status_env(0, weight=0.5, queued=1, own=1, largest=1)
    yield status_env(1, weight=0.5, queued=2, own=2, largest=1)


def status_raises_the_group_size() -> Iterator[Call]:
    """To that of the largest group that it has queued: one of 8, sent before the environment was known."""
    yield from opening(32, environment(4))
    yield from send(group(1, 8, 1))
    yield post("/register-env", environment(4), joined(1, "env_1"))
    yield status_env(0, weight=0.5, queued=2, own=0, largest=8)
    yield buffered(group(2, 8, 1), 8)
    yield status_env(1, weight=0.5, queued=1, own=1, largest=8)
    yield from send(group(3, 8, 1))  # its group_size is 8 now
    yield buffered(group(4, 4, 1), 4)  # and what waited since is a group


def nobody_is_connected() -> Iterator[Call]:
    yield from opening(8, environment(4))
    yield post("/disconnect-env", {"env_id": 0}, {"status": "success"})
    yield post("/disconnect-env", {"env_id": 0}, {"status": "success"})
    yield get("/status-env", body={"env_id": 0}, status=500)


def no_weight_at_all() -> Iterator[Call]:
    yield from opening(8, environment(4, weight=0.0))
    yield get("/status-env", body={"env_id": 0}, status=500)


def unknown_environments() -> Iterator[Call]:
    yield from opening(8, environment(4))
    yield get("/status-env", body={"env_id": 1}, status=500)
