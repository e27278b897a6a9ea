"""Scored groups, trainers and environments for tests of scored groups."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace import DataPool
from headrace.data.scored import Piece, decode, read_group
from headrace.pool.calls import BlockingPool
from headrace.pool.scored.types import (
    EnvRegistered,
    EnvRegistration,
    Posted,
    Posting,
    Registration,
    ScoredBatch,
)

TRAINER = Registration("group", "project", 4, 2048, "checkpoints", 10, 0, 100)


def trainer(**changes: Any) -> Registration:
    return msgspec.structs.replace(TRAINER, **changes)


def environment(**changes: Any) -> EnvRegistration:
    return msgspec.structs.replace(EnvRegistration(1024, "maze", 1.0, 2), **changes)


def body(name: int, sequences: int = 2) -> dict[str, Any]:
    """A group that no other has the tokens of."""
    rows = [[name, 1000 + at] for at in range(sequences)]
    return {
        "tokens": rows,
        "masks": [[-100, row[1]] for row in rows],
        "scores": [float(at) for at in range(sequences)],
        "inference_logprobs": [[1.0, -0.5] for _ in rows],
    }


def piece(name: int, sequences: int = 2) -> Piece:
    return read_group(msgspec.json.encode(body(name, sequences))).piece


def posting(name: int, env: int | None = None, sequences: int = 2, key: str = "") -> Posting:
    return Posting(piece(name, sequences), sequences, env, key)


def post(pool: BlockingPool, name: int, env: int | None = None, sequences: int = 2, key: str = "") -> Posted:
    [answer] = pool.desk_post([posting(name, env, sequences, key)])
    return answer


def name_of(found: Piece) -> int:
    return int(decode(found)["tokens"][0][0])


def names(batch: ScoredBatch | None) -> list[int]:
    assert batch is not None
    return [name_of(found) for found in batch.pieces]


def started(pool: BlockingPool, **changes: Any) -> None:
    """A trainer that has asked for its first batch."""
    pool.desk_register(trainer(**changes))
    pool.desk_batch()


def joined(pool: BlockingPool, **changes: Any) -> int:
    """The number of a new environment."""
    found = pool.desk_register_env(environment(**changes))
    assert isinstance(found, EnvRegistered)
    return found.env_id


def scored_stats(pool: BlockingPool) -> dict[str, Any]:
    """The numbers of scored groups. Whatever was posted is in one place."""
    found: dict[str, Any] = pool.stats()["desk"]
    placed = [found[name] for name in ("queued", "buffered", "out", "served", "moved", "cleared")]
    assert found["posted"] == sum(placed) + sum(found["dead_letters"].values()), found
    return found


def queued(pool: DataPool) -> set[int]:
    """The names of the groups in the queue."""
    found = pool._state.scored
    return {name_of(found.pieces.piece(number)) for number in found.batching.oldest_first()}


def drained(pool: BlockingPool) -> list[int]:
    """Takes and acknowledges every batch there is; the groups in the order in which they came."""
    found: list[int] = []
    while (batch := pool.desk_batch()) is not None:
        pool.desk_ack(batch.lease)
        found += names(batch)
    return found
