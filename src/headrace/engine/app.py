"""The application: every route of the engine."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from headrace.engine.control import Control
from headrace.engine.engine import Engine
from headrace.engine.info import Info
from headrace.engine.routing import Handler, guarded, no_route
from headrace.engine.service import Service


def create_app(engine: Engine) -> Starlette:
    service, info, control = Service(engine), Info(engine), Control(engine)
    posts: dict[str, Handler] = {
        "/v1/completions": service.completions,
        "/v1/chat/completions": service.chat,
        "/inference/v1/generate": service.generate,
        "/generate": service.atropos_generate,
        "/tokenize": info.tokenize,
        "/detokenize": info.detokenize,
        "/pause": control.pause,
        "/resume": control.resume,
        "/abort_requests": control.abort_requests,
        "/update_weight_version": control.update_weight_version,
        "/reset_prefix_cache": control.reset_prefix_cache,
        "/collective_rpc": control.collective_rpc,
        "/load_weights_shm": control.load_weights_shm,
        "/score_tokens": control.score_tokens,
    }
    gets: dict[str, Handler] = {
        "/v1/models": info.models,
        "/health": info.health,
        "/ping": info.health,
        "/version": info.version,
        "/load": info.load,
        "/memory": info.memory,
        "/is_paused": control.is_paused,
        "/weight_info": control.weight_info,
        "/debug/calls": control.debug_calls,
    }
    routes = [Route(path, guarded(handler), methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, guarded(handler), methods=["GET"]) for path, handler in gets.items()]
    return Starlette(routes=routes, exception_handlers={HTTPException: no_route})
