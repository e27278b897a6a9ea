"""How a route reads its body and says no."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from headrace.engine.failures import Refused, invalid

Handler = Callable[[Request], Awaitable[Response]]
M = TypeVar("M", bound=BaseModel)


def guarded(handler: Handler) -> Handler:
    """A handler whose refusals become answers."""

    async def guard(request: Request) -> Response:
        try:
            return await handler(request)
        except Refused as refused:
            return refused.response()
        except ValidationError as error:
            return invalid(error).response()
        except ClientDisconnect:
            return Response(status_code=499)

    return guard


def json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def body(request: Request, kind: type[M]) -> M:
    """A request's body. What is wrong with it is said in Python's words (list, not array), as vLLM does."""
    data = await request.body()
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        try:
            parsed = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise error from None
        return kind.model_validate(parsed)


async def no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    return Refused(error.detail, status=error.status_code, kind=kind).response()
