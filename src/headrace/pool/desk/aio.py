"""The types of the desk's awaitable calls; see `DeskCalls` for what each does."""

from __future__ import annotations

from typing import Protocol

from headrace.data.scored.piece import Piece
from headrace.pool.desk.types import (
    DeskBatch,
    DeskEnvStatus,
    DeskInfo,
    DeskStatus,
    EnvRegistered,
    EnvRegistration,
    Posted,
    Posting,
    Registered,
    Registration,
)


class AsyncDesk(Protocol):
    async def desk_register(self, registration: Registration, *, resume: bool = False) -> Registered: ...

    async def desk_batch(self, request_id: str = "", *, lease_s: float = 60.0) -> DeskBatch | None: ...

    async def desk_ack(self, lease_id: str) -> None: ...

    async def desk_nack(self, lease_id: str) -> None: ...
    async def desk_release(self) -> None: ...

    async def desk_register_env(self, environment: EnvRegistration, request_id: str = "") -> EnvRegistered | None: ...

    async def desk_disconnect(self, env_id: int) -> None: ...

    async def desk_post(self, postings: list[Posting], request_id: str = "") -> list[Posted]: ...

    async def desk_forget(self, keys: list[tuple[int | None, str]]) -> None: ...

    async def desk_info(self) -> DeskInfo: ...

    async def desk_status(self) -> DeskStatus: ...

    async def desk_env_status(self, env_id: int, heartbeat_s: float | None = None) -> DeskEnvStatus: ...

    async def desk_latest(self) -> Piece | None: ...

    async def desk_serve(self, channel: str | None) -> None: ...

    async def desk_reset(self) -> None: ...
