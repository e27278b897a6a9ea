"""The desk's calls, for `Calls` to inherit: environments post scored groups, a trainer takes them in exact batches."""

# What `_do` returns depends on the operation: the signatures below are where each answer's type is stated.
# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from headrace.data.block import Block
from headrace.data.errors import InvalidInput, shown
from headrace.data.scored.piece import Piece
from headrace.pool.scored.types import (
    EnvRegistered,
    EnvRegistration,
    Posted,
    Posting,
    Registration,
    RegistrationResult,
    ScoredBatch,
    ScoredEnvStatus,
    ScoredInfo,
    ScoredStatus,
    check_posting,
    checked,
    read,
)


class DeskCalls(ABC):
    @abstractmethod
    def _do(
        self, op: str, args: dict[str, Any], block: Block | None = None, then: Callable[[Any], Any] | None = None
    ) -> Any: ...

    # -- trainers ------------------------------------------------------------------------------------------------------

    def desk_register(self, registration: Registration, *, resume: bool = False) -> RegistrationResult:
        """Takes a trainer in. Where one registered before, its settings stay, with a warning if these are others;
        with `resume` these hold from now on. The queue stays either way."""
        chosen = uuid.uuid4()
        registration = checked(registration, Registration, "registration")
        args = {"registration": registration, "uuid": chosen.hex, "resume": resume}
        return self._do("desk_register", args, then=lambda warning: RegistrationResult(chosen.int, warning))

    def desk_batch(self, request_id: str = "", *, lease_s: float = 60.0) -> ScoredBatch | None:
        """Scored groups of exactly `batch_size` sequences, or None where none make it up; never waits.

        They are the caller's until the lease ends; not acknowledged by then, they stand where they stood. The same
        `request_id` gets the same batch again meanwhile. `NotRegistered` before any trainer registered.
        """
        args = {"request_id": request_id, "lease_s": lease_s}
        return self._do("desk_batch", args, then=lambda found: None if found is None else read(found, ScoredBatch))

    def desk_ack(self, lease_id: str) -> None:
        """The batch arrived: its groups are gone for good."""
        return self._do("desk_ack", {"lease_id": lease_id})

    def desk_nack(self, lease_id: str) -> None:
        """The batch did not arrive: its groups go out again, and it does not count as a step."""
        return self._do("desk_nack", {"lease_id": lease_id})

    def desk_received(self, lease_id: str) -> None:
        """The trainer has this batch, whatever became of its lease: what still waits of it does not go out again."""
        return self._do("desk_received", {"lease_id": lease_id})

    def desk_release(self) -> None:
        """Every batch that is out goes back at once: for an API that was started anew and is the pool's only one."""
        return self._do("desk_release", {})

    # -- environments --------------------------------------------------------------------------------------------------

    def desk_register_env(self, environment: EnvRegistration, request_id: str = "") -> EnvRegistered | None:
        """Takes an environment in; None until the trainer has asked for its first batch."""
        environment = checked(environment, EnvRegistration, "environment")
        args = {"environment": environment, "request_id": request_id}
        return self._do(
            "desk_register_env", args, then=lambda found: None if found is None else read(found, EnvRegistered)
        )

    def desk_disconnect(self, env_id: int) -> None:
        """The environment counts no longer towards weights and shares; its groups stay. `NotFound` if unknown."""
        return self._do("desk_disconnect", {"env_id": env_id})

    def desk_post(self, postings: list[Posting], request_id: str = "") -> list[Posted]:
        """Takes all of the scored groups, or none. A `key` that its environment used before queues nothing."""
        if not isinstance(postings, list):
            raise InvalidInput(f"postings must be a list, not {shown(postings)}")
        for at, posting in enumerate(postings):
            check_posting(posting, at)
        args = {"postings": postings, "request_id": request_id}
        return self._do("desk_post", args, then=lambda found: [read(one, Posted) for one in found])

    def desk_forget(self, keys: list[tuple[int | None, str]]) -> None:
        """Forgets keys, each with its environment: whoever sent a group under one has its answer."""
        return self._do("desk_forget", {"keys": [list(key) for key in keys]})

    # -- reading -------------------------------------------------------------------------------------------------------

    def desk_info(self) -> ScoredInfo:
        """What the trainer registered with, and whether it has started."""
        return self._do("desk_info", {}, then=lambda found: read(found, ScoredInfo))

    def desk_status(self) -> ScoredStatus:
        """Batches handed out, and groups queued."""
        return self._do("desk_status", {}, then=lambda found: read(found, ScoredStatus))

    def desk_env_status(self, env_id: int, heartbeat_s: float | None = None) -> ScoredEnvStatus:
        """How long the queue is for one environment, and its weight among those that called within `heartbeat_s`."""
        args = {"env_id": env_id, "heartbeat_s": heartbeat_s}
        return self._do("desk_env_status", args, then=lambda found: read(found, ScoredEnvStatus))

    def desk_latest(self) -> Piece | None:
        """The group that entered the queue last, also once it is gone."""
        return self._do("desk_latest", {}, then=lambda found: None if found is None else read(found, Piece))

    # -- control -------------------------------------------------------------------------------------------------------

    def desk_serve(self, channel: str | None) -> None:
        """Lets the desk and a channel serve from each other's groups, where either has too few; None ends it."""
        return self._do("desk_serve", {"channel": channel})

    def desk_reset(self) -> None:
        """Forgets trainer, environments, groups and step."""
        return self._do("desk_reset", {})
