"""What each route does, with the pool's desk behind it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from headrace.api import metrics
from headrace.api.answers import GZIP_FROM, TEXT, Answer, Settle, answer, takes_gzip
from headrace.api.keys import Keys
from headrace.api.openapi import docs_page, openapi
from headrace.api.requests import body_of, env_id_of, flag, object_of, record, unpack
from headrace.api.settings import Settings
from headrace.data.errors import HeadraceError, InvalidInput
from headrace.data.scored import (
    ScoredGroup,
    gzip_piece,
    inflate,
    join,
    join_gzip,
    read_group,
    read_groups,
)
from headrace.front_page import KIND as PAGE
from headrace.pool.aio import AsyncPool
from headrace.pool.errors import NotFound, NotRegistered
from headrace.pool.scored.types import (
    EnvRegistration,
    Posted,
    Posting,
    Registration,
    ScoredBatch,
)

log = logging.getLogger("headrace.api")

NOT_REGISTERED = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
WAIT = {"status": "wait for trainer to start"}
#: A batch's name, and whether some of it may have been delivered before; and, on a request, the last batch received.
BATCH, REPEATED = b"headrace-batch", b"headrace-repeated"
LAST_RECEIVED = "headrace-received"
#: What the newest group looks like before there is any.
NO_EXAMPLE: dict[str, list[Any]] = {
    key: []
    for key in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs"),
        *("messages", "images"),
    )
}
#: Bodies from this size on are read in a thread, few at a time, while others are answered.
LARGE = 1_000_000
LARGE_AT_ONCE = 2
#: Characters of a client's own key.
MOST_KEY = 400
#: A batch's lease outlives the time that its answer may take, so that it never ends while that is written.
LEASE_LONGER = 1.5
#: What is said of groups that no batch will ever hold, and what to do about it.
DEAD_LETTER = "dropped, since no batch can ever hold such a group"
FIT = (
    "Let groups add up to batch_size: give the environment another group_size, or register with resume true and another"
)
#: Reasons that the log has had and does not get again; beyond so many it begins anew.
MOST_LOGGED = 256

T = TypeVar("T")


class Routes:
    """The handlers; each takes a request and gives an `Answer`, or raises what is wrong."""

    def __init__(self, pool: AsyncPool, settings: Settings) -> None:
        self._pool = pool
        self._settings = settings
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        self._returning: set[asyncio.Future[None]] = set()
        self._logged: set[str] = set()  # why groups fit no batch, as far as the log says so
        self.keys = Keys(pool)

    # -- trainers ------------------------------------------------------------------------------------------------------

    async def register(self, request: Request) -> Answer:
        given = await object_of(request)
        found = await self._pool.desk_register(record(given, Registration), resume=flag(given, "resume"))
        misfit = (await self._pool.desk_status()).misfit  # what was posted before may fit none of its batches
        return answer({"uuid": found.uuid} | self._warned([found.warning or "", misfit and self._told(misfit)]))

    async def info(self, request: Request) -> Answer:
        held = (await self._pool.desk_info()).registration
        if held is None:
            return answer({"batch_size": -1, "max_token_len": -1})
        return answer({"batch_size": held.batch_size, "max_token_len": held.max_token_len})

    async def wandb_info(self, request: Request) -> Answer:
        held = (await self._pool.desk_info()).registration
        if held is None:
            return answer({"group": None, "project": None})
        return answer({"group": held.wandb_group, "project": held.wandb_project})

    async def batch(self, request: Request) -> Answer:
        await body_of(request, self._settings.max_body_mb)  # nobody sends one; until it is read, nobody can hang up
        try:
            if last := request.headers.get(LAST_RECEIVED):
                await self._pool.desk_received(last)
            found = await self._hand_out()
        except NotRegistered:
            return answer(NOT_REGISTERED)
        if found is None:
            return answer({"batch": None})
        packed = sum(piece.size for piece in found.pieces) >= GZIP_FROM and takes_gzip(request)
        body = join_gzip(found.pieces) if packed else join(found.pieces)
        named = [(BATCH, found.lease.encode()), *([(REPEATED, b"true")] if found.repeated else [])]
        return Answer(body, packed=packed, headers=tuple(named), settle=self._consumed(found.lease))

    async def _hand_out(self) -> ScoredBatch | None:
        """The next batch. Where the call ends while it is handed out, it goes back."""
        lease_s = self._settings.answer_s * LEASE_LONGER
        asked = asyncio.ensure_future(self._pool.desk_batch(uuid.uuid4().hex, lease_s=lease_s))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._give_back)
            raise

    def _give_back(self, asked: asyncio.Future[ScoredBatch | None]) -> None:
        if not asked.cancelled() and asked.exception() is None and (found := asked.result()) is not None:
            returning = asyncio.ensure_future(self._consumed(found.lease)(False))
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)

    def _consumed(self, lease: str) -> Settle:
        async def settle(arrived: bool) -> None:
            try:
                await (self._pool.desk_ack(lease) if arrived else self._pool.desk_nack(lease))
            except HeadraceError as error:
                log.warning("batch %s, which %s: %s", lease, "arrived" if arrived else "did not arrive", error)

        return settle

    # -- environments --------------------------------------------------------------------------------------------------

    async def register_env(self, request: Request) -> Answer:
        environment = record(await object_of(request), EnvRegistration)
        found = await self._pool.desk_register_env(environment, uuid.uuid4().hex)
        if found is None:
            return answer(WAIT)
        said = msgspec.structs.asdict(found)
        misfit = said.pop("misfit")
        if misfit:
            misfit = f"no batch can hold this environment's groups: {misfit}. {FIT}"
            log.warning("%s: %s", found.wandb_name, misfit)
        return answer({"status": "success"} | said | self._warned([misfit]))

    async def disconnect_env(self, request: Request) -> Answer:
        env_id = env_id_of(await object_of(request))
        try:
            await self._pool.desk_disconnect(env_id)
        except NotFound as error:
            return answer({"status": "failure", "error": str(error)})
        return answer({"status": "success"})

    async def scored_data(self, request: Request) -> Answer:
        (found,), settle = await self._post([await self._read(request, read_group)], request)
        said: dict[str, Any] = {"status": found.status}
        if found.status == "buffered":
            said["buffer_size"] = found.buffer_size
        return answer(said | self._misfits([found]), settle=settle)

    async def scored_data_list(self, request: Request) -> Answer:
        found, settle = await self._post(await self._read(request, read_groups), request)
        said: dict[str, Any] = {"status": "received", "groups_processed": len(found)}
        waiting = [one for one in found if one.status == "buffered"]
        if waiting:
            said |= {"buffered": len(waiting), "last_buffer_size": waiting[-1].buffer_size}
        return answer(said | self._misfits(found), settle=settle)

    def _misfits(self, posted: list[Posted]) -> dict[str, Any]:
        """What an answer says beside, where some groups fit no batch."""
        reasons = dict.fromkeys(one.misfit for one in posted if one.misfit)
        return self._warned([self._told(reason) for reason in reasons])

    def _told(self, reason: str) -> str:
        """What to say of groups that fit no batch; it is in the log once for each reason."""
        said = f"{DEAD_LETTER}: {reason}. {FIT}"
        if reason not in self._logged:
            log.warning("groups are %s", said)
            if len(self._logged) >= MOST_LOGGED:
                self._logged.clear()
            self._logged.add(reason)
        return said

    @staticmethod
    def _warned(said: list[str]) -> dict[str, str]:
        warning = "; ".join(one for one in said if one)
        return {"warning": warning} if warning else {}

    async def _read(self, request: Request, read: Callable[[bytes], T]) -> T:
        most = self._settings.max_body_mb
        body, packed = await body_of(request, most)

        def decoded() -> T:
            return read(unpack(body, most) if packed else body)

        # gzip ends with the size of what it holds
        if len(body) < LARGE and not (packed and int.from_bytes(body[-4:], "little") >= LARGE):
            return decoded()
        async with self._large:
            return await asyncio.to_thread(decoded)

    async def _post(self, groups: list[ScoredGroup], request: Request) -> tuple[list[Posted], Settle]:
        """Hands groups in under the client's key, or under keys that hold until the answer has arrived."""
        given = request.headers.get("idempotency-key")
        if given is None:
            keys = await self.keys.take(groups)
        elif 0 < len(given) <= MOST_KEY:
            keys = [(group.env_id, f"client:{given}/{n}") for n, group in enumerate(groups)]
        else:
            raise InvalidInput(f"Idempotency-Key must have 1 to {MOST_KEY} characters, not {len(given)}")

        async def settle(arrived: bool) -> None:
            if given is None:
                self.keys.settle(keys, arrived)

        try:
            postings = [
                Posting(group.piece, group.sequences, group.env_id, key)
                for group, (_, key) in zip(groups, keys, strict=True)
            ]
            return await self._pool.desk_post(postings), settle
        except BaseException:
            await settle(False)
            raise

    # -- both ----------------------------------------------------------------------------------------------------------

    async def root(self, request: Request) -> Answer:
        return answer({"message": "Headrace Trajectory API"})

    async def latest_example(self, request: Request) -> Answer:
        piece = await self._pool.desk_latest()
        if piece is None:
            return answer(NO_EXAMPLE)
        packed = piece.size >= GZIP_FROM and takes_gzip(request)
        return Answer(gzip_piece(piece) if packed else inflate(piece), packed=packed)

    async def status(self, request: Request) -> Answer:
        found = await self._pool.desk_status()
        said: dict[str, Any] = {"current_step": found.step, "queue_size": found.queue_size}
        if found.dead_letters:
            said["dead_letters"] = found.dead_letters
        return answer(said | self._warned([found.misfit and self._told(found.misfit)]))

    async def status_env(self, request: Request) -> Answer:
        """By a body on the GET, as the original has it, or by a query parameter."""
        given: dict[str, Any] = dict(request.query_params)
        env_id = env_id_of(given if "env_id" in given else await object_of(request))
        found = await self._pool.desk_env_status(env_id, self._settings.heartbeat_s)
        return answer(
            {
                "current_step": found.step,
                "queue_size": found.queue_size,
                "unallocated_fraction": found.unallocated_fraction,
                "self_queue_size": found.self_queue_size,
                "max_group_size": found.max_group_size,
                "env_weight": found.env_weight,
            }
            | self._warned([found.misfit and self._told(found.misfit)])
        )

    async def metrics(self, request: Request) -> Answer:
        stats = await self._pool.stats()
        return Answer(metrics.prometheus(stats["desk"]).encode(), kind=metrics.KIND)

    async def openapi(self, request: Request) -> Answer:
        return answer(openapi())

    async def docs(self, request: Request) -> Answer:
        return Answer(docs_page(), kind=PAGE.encode())

    async def reset_data(self, request: Request) -> Answer:
        await self._pool.desk_reset()
        return Answer(b"Reset successful", kind=TEXT)
