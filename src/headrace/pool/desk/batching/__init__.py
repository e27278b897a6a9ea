"""Batching: which scored groups the next `GET /batch` takes. Pure: no I/O, no clock, no pool.

batching = Batching()
batching.connect(0, group_size=8, max_token_length=2048, min_allocation=0.25)
batching.add(number, env=0, size=8)        # Added: into the queue, or into the environment's buffer
numbers = batching.take(128)               # exactly 128 sequences, or None
batching.forget(numbers)                   # delivered; give_back(numbers) where the answer never arrived

`Batching` holds the state and is the one thing to import; `choice` chooses, by `packs` or by an `exact` fill.
"""

from headrace.pool.desk.batching.batching import Added, Batching
from headrace.pool.desk.batching.dead_letters import DeadLetter
from headrace.pool.desk.batching.environments import Environment
from headrace.pool.desk.batching.status import EnvStatus

__all__ = ["Added", "Batching", "DeadLetter", "EnvStatus", "Environment"]
