"""The routes of a trainer: pause and resume, weights and their version, and what the engine really did.

vLLM opens these in its development mode; here they are always open. They are for the machine that trains: the engine
listens on loopback unless told otherwise.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from headrace.engine import weights
from headrace.engine.engine import Engine
from headrace.engine.failures import Refused, broken
from headrace.engine.requests import checked
from headrace.engine.routing import body, json
from headrace.engine.weights import BadWeights

MODES = ("abort", "wait", "keep")


class NewVersion(BaseModel):
    new_version: str


class Aborted(BaseModel):
    request_ids: list[str] | None = None


class Arguments(BaseModel):
    weights_path: str | None = None


class RemoteCall(BaseModel):
    """A method of the workers by its name; `reload_weights` is the one there is."""

    model_config = ConfigDict(extra="allow")

    method: str


class Placed(BaseModel):
    """A tensor in a block of shared memory."""

    name: str
    dtype: Literal["float32", "float16", "bfloat16"]
    shape: list[int]
    offset: int = Field(ge=0)


class SharedWeights(BaseModel):
    name: str
    manifest: list[Placed]
    #: Becomes the weight version in the same moment.
    version: str | None = None


class Scored(BaseModel):
    prompt_token_ids: list[int]


class Control:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.worker = engine.worker

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in MODES:
            raise Refused(
                f"mode must be one of {', '.join(MODES)}, got {mode!r}.", kind="Bad Request", param="query.mode"
            )
        await self.worker.pause(mode)
        if mode != "keep" and request.query_params.get("clear_cache", "true").lower() not in ("false", "0"):
            await self.worker.ask(lambda scheduler: scheduler.forget())
        return json({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self.worker.ask(lambda scheduler: scheduler.resume())
        return json({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return json({"is_paused": await self.worker.ask(lambda scheduler: scheduler.paused or scheduler.draining)})

    async def abort_requests(self, request: Request) -> Response:
        asked = (await body(request, Aborted)).request_ids
        names = {call.request_id for call in self.engine.open} if not asked else _known(self.engine, asked)
        await self.worker.stop_all(lambda sequence: sequence.request_id in names)
        return json({"status": "aborted", "aborted": len(names)})

    async def update_weight_version(self, request: Request) -> Response:
        asked = await body(request, NewVersion)
        await self.worker.ask(lambda scheduler: setattr(scheduler, "version", asked.new_version))
        return json({"success": True, "new_version": asked.new_version})

    async def weight_info(self, request: Request) -> Response:
        return json({"weight_version": await self.worker.ask(lambda scheduler: scheduler.version)})

    async def reset_prefix_cache(self, request: Request) -> Response:
        await self.worker.ask(lambda scheduler: scheduler.forget())
        return json({"success": True})

    async def collective_rpc(self, request: Request) -> Response:
        asked = await body(request, RemoteCall)
        given = Arguments.model_validate((asked.model_extra or {}).get("kwargs") or {})
        if asked.method != "reload_weights":
            raise _failed(f"this engine has no method {asked.method!r}; it has 'reload_weights'")
        folder = self.engine.folder if given.weights_path is None else Path(given.weights_path)
        try:
            found = await asyncio.to_thread(weights.checkpoint, folder)
            await self.worker.ask(lambda scheduler: scheduler.load(found))
        except BadWeights as error:
            raise _failed(str(error)) from error
        return json({"results": [None]})

    async def load_weights_shm(self, request: Request) -> Response:
        asked = await body(request, SharedWeights)
        manifest = [placed.model_dump() for placed in asked.manifest]
        try:
            found = await asyncio.to_thread(weights.shared, asked.name, manifest)
            await self.worker.ask(lambda scheduler: scheduler.load(found, asked.version))
            version = await self.worker.ask(lambda scheduler: scheduler.version)
        except BadWeights as error:
            raise Refused(str(error), param="manifest") from error
        return json({"success": True, "loaded": len(found), "weight_version": version})

    async def score_tokens(self, request: Request) -> Response:
        """The log-probs of a prompt's own tokens under the weights that are loaded now, paused or not."""
        engine = self.engine
        ids = checked((await body(request, Scored)).prompt_token_ids, engine.vocabulary, engine.context)
        logprobs, version, dtype = await self.worker.ask(
            lambda scheduler: (scheduler.score(ids), scheduler.version, scheduler.model.dtype)
        )
        return json({"logprobs": logprobs, "weight_version": version, "dtype": str(dtype).removeprefix("torch.")})

    async def debug_calls(self, request: Request) -> Response:
        if not self.engine.settings.record:
            raise Refused("This engine keeps no calls; start it with --record N.", status=404, kind="NotFoundError")
        return json({"calls": list(self.engine.calls)})


def _known(engine: Engine, asked: list[str]) -> set[str]:
    """The open calls of these names, with or without the route's prefix (`cmpl-` and the like)."""
    wanted = set(asked)
    return {
        call.request_id
        for call in engine.open
        if call.request_id in wanted
        or call.request_id.removeprefix("generate-tokens-") in wanted
        or call.request_id.partition("-")[2] in wanted
    }


def _failed(reason: str) -> Refused:
    return broken(f"Call to collective_rpc method failed: {reason}")
