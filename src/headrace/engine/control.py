"""The trainer's routes: pause and resume, weights and their version, and a record of what was sampled.

vLLM has these in its development mode; here they are always open. They are meant for the machine that trains: the
engine listens on loopback unless told otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from headrace.engine import cuda_ipc, weights
from headrace.engine.cuda_ipc import CudaHandle
from headrace.engine.engine import Engine
from headrace.engine.http import EngineRequestError, internal_error, json_response, read_body
from headrace.engine.requests import check_prompt
from headrace.engine.weights import BadWeights

PAUSE_MODES = ("abort", "wait", "keep")


class UpdateVersionRequest(BaseModel):
    """The body of `/update_weight_version`."""

    new_version: str


class AbortRequest(BaseModel):
    """The body of `/abort_requests`: ids of requests; all requests where there are none."""

    request_ids: list[str] | None = None


class ReloadArguments(BaseModel):
    """The arguments of `reload_weights`: a checkpoint's folder; by default the served one."""

    weights_path: str | None = None


class RemoteCall(BaseModel):
    """The body of `/collective_rpc`: a worker method's name, of which `reload_weights` is the only one."""

    model_config = ConfigDict(extra="allow")

    method: str


class SharedTensor(BaseModel):
    """A tensor in a block of shared memory."""

    name: str
    dtype: Literal["float32", "float16", "bfloat16"]
    shape: list[int]
    offset: int = Field(ge=0)


class SharedWeights(BaseModel):
    """The body of `/load_weights_shm`: a block of shared memory, and where its tensors are."""

    name: str
    manifest: list[SharedTensor]
    #: Becomes the weight version in the same moment.
    version: str | None = None


class OpenedBlock(BaseModel):
    """The handle of a block of GPU memory, as `cuda_ipc.CudaHandle` has it."""

    memory: str
    offset: int = Field(ge=0)
    size: int = Field(gt=0)
    counter: str
    counter_offset: int = Field(ge=0)
    event: str
    event_sync: bool

    def handle(self) -> CudaHandle:
        return CudaHandle(**self.model_dump())


class BlockSum(BaseModel):
    """The body of `/sum_cuda_ipc`: a block of GPU memory."""

    block: OpenedBlock


class GpuWeights(BaseModel):
    """The body of `/load_weights_cuda_ipc`: a block of GPU memory, where its tensors are, and the sum of all of it."""

    block: OpenedBlock
    manifest: list[SharedTensor]
    checksum: int
    #: Becomes the weight version in the same moment.
    version: str | None = None


class ScoreTokensRequest(BaseModel):
    """The body of `/score_tokens`."""

    prompt_token_ids: list[int]


class TrainerRoutes:
    """The routes that a trainer calls."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.worker = engine.worker

    async def pause(self, request: Request) -> Response:
        """`/pause`: by `mode`, `abort` ends what runs, `wait` waits for its end, `keep` freezes it."""
        mode = request.query_params.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise EngineRequestError(
                f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}.", kind="Bad Request", param="query.mode"
            )
        await self.worker.pause(mode)
        if mode != "keep" and request.query_params.get("clear_cache", "true").lower() not in ("false", "0"):
            await self.worker.ask(lambda scheduler: scheduler.forget())
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """`/resume`: ends a pause; frozen sequences continue."""
        await self.worker.ask(lambda scheduler: scheduler.resume())
        return json_response({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """`/is_paused`: also true while a pause waits for sequences to end."""
        return json_response(
            {"is_paused": await self.worker.ask(lambda scheduler: scheduler.paused or scheduler.draining)}
        )

    async def abort_requests(self, request: Request) -> Response:
        """`/abort_requests`: ends requests, with the tokens they have."""
        asked = (await read_body(request, AbortRequest)).request_ids
        names = {call.request_id for call in self.engine.open} if not asked else _known(self.engine, asked)
        await self.worker.stop_all(lambda sequence: sequence.request_id in names)
        return json_response({"status": "aborted", "aborted": len(names)})

    async def update_weight_version(self, request: Request) -> Response:
        """`/update_weight_version`: sets the version of the loaded weights."""
        asked = await read_body(request, UpdateVersionRequest)
        await self.worker.ask(lambda scheduler: setattr(scheduler, "version", asked.new_version))
        return json_response({"success": True, "new_version": asked.new_version})

    async def weight_info(self, request: Request) -> Response:
        """`/weight_info`: the version of the loaded weights."""
        return json_response({"weight_version": await self.worker.ask(lambda scheduler: scheduler.version)})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """`/reset_prefix_cache`: drops all keys and values; running sequences recompute theirs."""
        await self.worker.ask(lambda scheduler: scheduler.forget())
        return json_response({"success": True})

    async def collective_rpc(self, request: Request) -> Response:
        """`/collective_rpc`: `reload_weights` from a checkpoint's safetensors."""
        asked = await read_body(request, RemoteCall)
        given = ReloadArguments.model_validate((asked.model_extra or {}).get("kwargs") or {})
        if asked.method != "reload_weights":
            raise _failed(f"this engine has no method {asked.method!r}; it has 'reload_weights'")
        folder = self.engine.folder if given.weights_path is None else Path(given.weights_path)
        try:
            found = await asyncio.to_thread(weights.checkpoint, folder)
            await self.worker.ask(lambda scheduler: scheduler.load(found))
        except BadWeights as error:
            raise _failed(str(error)) from error
        return json_response({"results": [None]})

    async def load_weights_shm(self, request: Request) -> Response:
        """`/load_weights_shm`: loads weights, and their version, from a block of shared memory."""
        asked = await read_body(request, SharedWeights)
        manifest = [placed.model_dump() for placed in asked.manifest]
        return await self._load(lambda: weights.shared(asked.name, manifest), asked.version)

    async def load_weights_cuda_ipc(self, request: Request) -> Response:
        """`/load_weights_cuda_ipc`: loads weights, and their version, from a block of this engine's GPU that another
        process exported."""
        asked = await read_body(request, GpuWeights)
        manifest = [placed.model_dump() for placed in asked.manifest]
        device = await self.worker.ask(lambda scheduler: scheduler.model.device)
        return await self._load(
            lambda: cuda_ipc.received(asked.block.handle(), manifest, asked.checksum, device), asked.version
        )

    async def sum_cuda_ipc(self, request: Request) -> Response:
        """`/sum_cuda_ipc`: the sum of such a block: shows whether this engine can read another process's memory."""
        asked = await read_body(request, BlockSum)
        device = await self.worker.ask(lambda scheduler: scheduler.model.device)
        try:
            return json_response({"checksum": await asyncio.to_thread(_sum, asked.block.handle(), device)})
        except BadWeights as error:
            raise EngineRequestError(str(error), param="block") from error

    async def _load(self, read: Callable[[], Mapping[str, torch.Tensor]], version: str | None) -> Response:
        try:
            found = await asyncio.to_thread(read)
            await self.worker.ask(lambda scheduler: scheduler.load(found, version))
            loaded = await self.worker.ask(lambda scheduler: scheduler.version)
        except BadWeights as error:
            raise EngineRequestError(str(error), param="manifest") from error
        return json_response({"success": True, "loaded": len(found), "weight_version": loaded})

    async def score_tokens(self, request: Request) -> Response:
        """`/score_tokens`: the log-probs of given tokens under the loaded weights, paused or not."""
        engine = self.engine
        ids = check_prompt(
            (await read_body(request, ScoreTokensRequest)).prompt_token_ids, engine.vocabulary, engine.context
        )
        logprobs, version, dtype = await self.worker.ask(
            lambda scheduler: (scheduler.score(ids), scheduler.version, scheduler.model.dtype)
        )
        return json_response(
            {"logprobs": logprobs, "weight_version": version, "dtype": str(dtype).removeprefix("torch.")}
        )

    async def debug_calls(self, request: Request) -> Response:
        """`/debug/calls`: the last answers; 404 unless the engine was started with `--record`."""
        if not self.engine.settings.record:
            raise EngineRequestError(
                "This engine keeps no calls; start it with --record N.", status=404, kind="NotFoundError"
            )
        return json_response({"calls": list(self.engine.calls)})


def _known(engine: Engine, asked: list[str]) -> set[str]:
    """The ids of open calls that match, with or without the route's prefix (`cmpl-` and the like)."""
    wanted = set(asked)
    return {
        call.request_id
        for call in engine.open
        if call.request_id in wanted
        or call.request_id.removeprefix("generate-tokens-") in wanted
        or call.request_id.partition("-")[2] in wanted
    }


def _sum(handle: CudaHandle, device: torch.device) -> int:
    with cuda_ipc.opened(handle, device) as block:
        return cuda_ipc.checksum(block)


def _failed(reason: str) -> EngineRequestError:
    return internal_error(f"Call to collective_rpc method failed: {reason}")
