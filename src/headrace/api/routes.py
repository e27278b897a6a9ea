"""What each route of the Trajectory API does, with the pool's scored groups behind it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from headrace.api import metrics
from headrace.api.openapi import docs_page, openapi
from headrace.api.plain_allowance import PlainAllowance
from headrace.api.requests import gunzip, raw_body, read_env_id, read_flag, read_object, read_record
from headrace.api.responses import GZIP_FROM_BYTES, TEXT, ApiResponse, Settle, json_response, takes_gzip
from headrace.api.retry_keys import RetryKeys
from headrace.api.settings import TrajectoryApiSettings
from headrace.data.errors import HeadraceError, InvalidInput
from headrace.data.scored import (
    MakePiece,
    ScoredGroup,
    gzip_piece,
    inflate,
    join,
    join_gzip,
    read_group,
    read_groups,
)
from headrace.net.exposition import CONTENT_TYPE, exposition, loop_tasks
from headrace.net.front_page import KIND as PAGE
from headrace.pool.calls import AsyncPool
from headrace.pool.errors import NotFound, NotRegistered
from headrace.pool.scored.types import (
    EnvRegistration,
    Posted,
    Posting,
    Registration,
    ScoredBatch,
    ScoredEnvStatus,
    ScoredStatus,
)

log = logging.getLogger("headrace.api")

T = TypeVar("T")

NOT_REGISTERED = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
NOT_STARTED = {"status": "wait for trainer to start"}
#: Headers of a batch: its name, and whether some of it may have been delivered before.
BATCH_HEADER, REPEATED_HEADER = b"headrace-batch", b"headrace-repeated"
#: A header of the request for a batch: the last one that the trainer has.
LAST_RECEIVED_HEADER = "headrace-received"
#: What the newest group looks like before there is any.
NO_EXAMPLE: dict[str, list[Any]] = {
    key: []
    for key in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs"),
        *("messages", "images"),
    )
}
#: Bodies of so many bytes are read in a thread, so many at a time, while others are answered.
LARGE_BODY_BYTES = 1_000_000
LARGE_BODIES_AT_ONCE = 2
#: Most characters of a client's own key; the pool's limit leaves room for what is put around it.
MAX_CLIENT_KEY_CHARACTERS = 400
#: A batch's lease, in times of how long its response may take: it never ends while that is written.
LEASE_FACTOR = 1.5
#: What a warning says of groups that no batch will ever hold, and what to do about it.
DEAD_LETTER = "dropped, since no batch can ever hold such a group"
HOW_TO_FIT = (
    "Let groups add up to batch_size: give the environment another group_size, or register with resume true and another"
)
#: What a warning says of groups that the trainer cannot fetch.
UNMOVABLE = "groups wait that fetch_batch cannot take, only GET /batch"
#: Reasons that are remembered as logged, so that each is logged once; beyond so many all are forgotten.
MAX_REASONS_LOGGED = 256


class Routes:
    """The handlers; each takes a request and gives a response, or raises a `HeadraceError`."""

    def __init__(self, pool: AsyncPool, settings: TrajectoryApiSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._large_bodies = asyncio.Semaphore(LARGE_BODIES_AT_ONCE)
        self._returning: set[asyncio.Future[None]] = set()
        self._logged: set[str] = set()  # why groups fit no batch, as far as the log says so
        self._plain = PlainAllowance()
        self.keys = RetryKeys(pool)

    # -- trainers ------------------------------------------------------------------------------------------------------

    async def register(self, request: Request) -> ApiResponse:
        given = await read_object(request)
        found = await self._pool.desk_register(read_record(given, Registration), resume=read_flag(given, "resume"))
        misfit = (await self._pool.desk_status()).misfit  # what was posted before may fit none of its batches
        return json_response(
            {"uuid": found.uuid} | self._warning([found.warning or "", self._dead_letter_warning(misfit)])
        )

    async def info(self, request: Request) -> ApiResponse:
        found = await self._pool.desk_info()
        held = found.registration
        if held is None:
            return json_response({"batch_size": -1, "max_token_len": -1})
        return json_response({"batch_size": found.batch_size, "max_token_len": held.max_token_len})

    async def wandb_info(self, request: Request) -> ApiResponse:
        held = (await self._pool.desk_info()).registration
        if held is None:
            return json_response({"group": None, "project": None})
        group, project = held.wandb_group, held.wandb_project
        if held.batch_groups is not None:  # a trainer of ours leaves out what it does not have; others' words stay
            return json_response({"group": group or None, "project": project or None})
        return json_response({"group": group, "project": project})

    async def batch(self, request: Request) -> ApiResponse:
        await raw_body(request, self._settings.max_body_mb)  # nobody sends one; until it is read, nobody can hang up
        gzip = takes_gzip(request)
        try:
            if last := request.headers.get(LAST_RECEIVED_HEADER):
                await self._pool.desk_received(last)
            await self._allow_plain(gzip)
            found = await self._hand_out()
        except NotRegistered:
            return json_response(NOT_REGISTERED)
        if found is None:
            return json_response({"batch": None})
        gzipped = gzip and sum(piece.size for piece in found.pieces) >= GZIP_FROM_BYTES
        body = join_gzip(found.pieces) if gzipped else join(found.pieces)
        headers = [(BATCH_HEADER, found.lease.encode()), *([(REPEATED_HEADER, b"true")] if found.repeated else [])]
        return ApiResponse(body, gzipped=gzipped, headers=tuple(headers), settle=self._consumed(found.lease))

    async def _allow_plain(self, gzip: bool) -> None:
        """Says of groups to come whether they may be kept uncompressed, by how the trainer takes batches."""
        if gzip:
            self._plain.end()
        elif self._plain.is_low:
            self._plain.renew((await self._pool.desk_status()).queue_size)

    async def _hand_out(self) -> ScoredBatch | None:
        """The next batch. Where the call ends while it is handed out, it goes back."""
        lease_s = self._settings.answer_s * LEASE_FACTOR
        asked = asyncio.ensure_future(self._pool.desk_batch(uuid.uuid4().hex, lease_s=lease_s))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._give_back)
            raise

    def _give_back(self, asked: asyncio.Future[ScoredBatch | None]) -> None:
        """Returns the batch of a call that was cancelled."""
        if not asked.cancelled() and asked.exception() is None and (found := asked.result()) is not None:
            returning = asyncio.ensure_future(self._consumed(found.lease)(False))
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)

    def _consumed(self, lease: str) -> Callable[[bool], Awaitable[None]]:
        """What ends a batch's lease: an ack where its response arrived, a nack where it did not."""

        async def settle(arrived: bool) -> None:
            try:
                await (self._pool.desk_ack(lease) if arrived else self._pool.desk_nack(lease))
            except HeadraceError as error:
                log.warning("batch %s, which %s: %s", lease, "arrived" if arrived else "did not arrive", error)

        return settle

    # -- environments --------------------------------------------------------------------------------------------------

    async def register_env(self, request: Request) -> ApiResponse:
        environment = read_record(await read_object(request), EnvRegistration)
        found = await self._pool.desk_register_env(environment, uuid.uuid4().hex)
        if found is None:
            return json_response(NOT_STARTED)
        fields = msgspec.structs.asdict(found)
        misfit = fields.pop("misfit")
        if misfit:
            misfit = f"no batch can hold this environment's groups: {misfit}. {HOW_TO_FIT}"
            log.warning("%s: %s", found.wandb_name, misfit)
        return json_response({"status": "success"} | fields | self._warning([misfit]))

    async def disconnect_env(self, request: Request) -> ApiResponse:
        env_id = read_env_id(await read_object(request))
        try:
            await self._pool.desk_disconnect(env_id)
        except NotFound as error:
            return json_response({"status": "failure", "error": str(error)})
        return json_response({"status": "success"})

    async def scored_data(self, request: Request) -> ApiResponse:
        (found,), settle = await self._post([await self._read(request, read_group)], request)
        fields: dict[str, Any] = {"status": found.status}
        if found.status == "buffered":
            fields["buffer_size"] = found.buffer_size
        return json_response(fields | self._misfits([found]), settle=settle)

    async def scored_data_list(self, request: Request) -> ApiResponse:
        found, settle = await self._post(await self._read(request, read_groups), request)
        fields: dict[str, Any] = {"status": "received", "groups_processed": len(found)}
        waiting = [one for one in found if one.status == "buffered"]
        if waiting:
            fields |= {"buffered": len(waiting), "last_buffer_size": waiting[-1].buffer_size}
        return json_response(fields | self._misfits(found), settle=settle)

    def _misfits(self, posted: list[Posted]) -> dict[str, Any]:
        """The warning of a response to a post, where some groups fit no batch."""
        reasons = dict.fromkeys(one.misfit for one in posted if one.misfit)
        return self._warning([self._dead_letter_warning(reason) for reason in reasons])

    def _dead_letter_warning(self, reason: str) -> str:
        """What to tell of groups that fit no batch, nothing without a reason; it is logged once for each."""
        if not reason:
            return ""
        warning = f"{DEAD_LETTER}: {reason}. {HOW_TO_FIT}"
        if reason not in self._logged:
            log.warning("groups are %s", warning)
            if len(self._logged) >= MAX_REASONS_LOGGED:
                self._logged.clear()
            self._logged.add(reason)
        return warning

    def _waiting_in_vain(self, found: ScoredStatus | ScoredEnvStatus) -> dict[str, str]:
        """The warning of a status, where groups fit no batch, or wait for a trainer that cannot fetch them."""
        unmovable = f"{UNMOVABLE}: {found.unmovable}" if found.unmovable else ""  # the pool has logged it
        return self._warning([self._dead_letter_warning(found.misfit), unmovable])

    @staticmethod
    def _warning(texts: list[str]) -> dict[str, str]:
        """A response's `warning` field, where there is anything to warn of."""
        warning = "; ".join(text for text in texts if text)
        return {"warning": warning} if warning else {}

    async def _read(self, request: Request, read: Callable[[bytes, MakePiece], T]) -> T:
        max_mb = self._settings.max_body_mb
        body, gzipped = await raw_body(request, max_mb)

        def decoded() -> T:
            return read(gunzip(body, max_mb) if gzipped else body, self._plain.make_piece)

        # gzip ends with the size of what it holds
        if len(body) < LARGE_BODY_BYTES and not (gzipped and int.from_bytes(body[-4:], "little") >= LARGE_BODY_BYTES):
            return decoded()
        async with self._large_bodies:
            return await asyncio.to_thread(decoded)

    async def _post(self, groups: list[ScoredGroup], request: Request) -> tuple[list[Posted], Settle]:
        """Hands groups in under the client's key, or under keys that hold until the answer has arrived."""
        given = request.headers.get("idempotency-key")
        if given is None:
            keys = await self.keys.take(groups)
        elif 0 < len(given) <= MAX_CLIENT_KEY_CHARACTERS:
            keys = [(group.env_id, f"client:{given}/{n}") for n, group in enumerate(groups)]
        else:
            raise InvalidInput(
                f"Idempotency-Key must have 1 to {MAX_CLIENT_KEY_CHARACTERS} characters, not {len(given)}"
            )

        def settle(arrived: bool) -> None:
            if given is None:
                self.keys.settle(keys, arrived)

        try:
            postings = [
                Posting(group.piece, group.sequences, group.env_id, key)
                for group, (_, key) in zip(groups, keys, strict=True)
            ]
            return await self._pool.desk_post(postings), settle
        except BaseException:
            settle(False)
            raise

    # -- both ----------------------------------------------------------------------------------------------------------

    async def root(self, request: Request) -> ApiResponse:
        return json_response({"message": "Headrace Trajectory API"})

    async def latest_example(self, request: Request) -> ApiResponse:
        piece = await self._pool.desk_latest()
        if piece is None:
            return json_response(NO_EXAMPLE)
        gzipped = piece.size >= GZIP_FROM_BYTES and takes_gzip(request)
        return ApiResponse(gzip_piece(piece) if gzipped else inflate(piece), gzipped=gzipped)

    async def status(self, request: Request) -> ApiResponse:
        found = await self._pool.desk_status()
        fields: dict[str, Any] = {"current_step": found.step, "queue_size": found.queue_size}
        if found.dead_letters:
            fields["dead_letters"] = found.dead_letters
        return json_response(fields | self._waiting_in_vain(found))

    async def status_env(self, request: Request) -> ApiResponse:
        """By a body on the GET, as the original has it, or by a query parameter."""
        given: dict[str, Any] = dict(request.query_params)
        env_id = read_env_id(given if "env_id" in given else await read_object(request))
        found = await self._pool.desk_env_status(env_id, self._settings.heartbeat_s)
        # Past the last step an environment of the original finishes; ours are told where the training ended.
        end = {"ended_at": found.step} if found.ended else {}
        return json_response(
            {
                "current_step": max(found.step, found.num_steps + 1) if found.ended else found.step,
                "queue_size": found.queue_size,
                "unallocated_fraction": found.unallocated_fraction,
                "self_queue_size": found.self_queue_size,
                "max_group_size": found.max_group_size,
                "env_weight": found.env_weight,
            }
            | end
            | self._waiting_in_vain(found)
        )

    async def metrics(self, request: Request) -> ApiResponse:
        stats = await self._pool.stats()
        found = [*metrics.families(stats["desk"]), loop_tasks(metrics.PREFIX)]
        return ApiResponse(exposition(found), content_type=CONTENT_TYPE.encode())

    async def openapi(self, request: Request) -> ApiResponse:
        return json_response(openapi())

    async def docs(self, request: Request) -> ApiResponse:
        return ApiResponse(docs_page(), content_type=PAGE.encode())

    async def reset_data(self, request: Request) -> ApiResponse:
        await self._pool.desk_reset()
        return ApiResponse(b"Reset successful", content_type=TEXT)
