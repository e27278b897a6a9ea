"""How a route reads its body and answers: JSON, or a refusal in the shape and, where it was recorded, in the words
of vLLM.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from headrace.data.errors import HeadraceError


class EngineRequestError(HeadraceError):
    """A request that is answered with an error."""

    code = "refused"

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param

    def response(self) -> Response:
        """The answer, in vLLM's shape."""
        body = {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}
        return Response(orjson.dumps(body), self.status, media_type="application/json")


def no_such_model(name: str, served: str) -> EngineRequestError:
    """404: another model is served."""
    return EngineRequestError(
        f"The model `{name}` does not exist. Valid aliases: {served}.", status=404, kind="NotFoundError", param="model"
    )


def outside_vocabulary(token: int) -> EngineRequestError:
    """400: the model has no such token."""
    return EngineRequestError(f"Token id {token} is out of vocabulary")


def prompt_too_long(length: int, context: int) -> EngineRequestError:
    """400: the prompt alone fills the context."""
    return EngineRequestError(
        f"This model's maximum context length is {context} tokens. However, your prompt contains {length} input tokens"
        ", which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
        f"(parameter=input_tokens, value={length})",
        param="input_tokens",
    )


def too_many_tokens(asked: int, context: int) -> EngineRequestError:
    """400: more tokens are asked for than the context has."""
    return EngineRequestError(
        f"max_tokens={asked} cannot be greater than max_model_len={context}. Please request fewer output tokens. "
        f"(parameter=max_tokens, value={asked})",
        param="max_tokens",
    )


def not_offered(what: str, param: str) -> EngineRequestError:
    """400: vLLM has it, and this engine does not."""
    return EngineRequestError(f"This engine does not offer {what}; vLLM does.", param=param)


def internal_error(message: str) -> EngineRequestError:
    """500, in vLLM's shape."""
    return EngineRequestError(message, status=500, kind="InternalServerError")


def invalid_body(error: ValidationError) -> EngineRequestError:
    """A body that is not what the route takes, with each fault as pydantic names it."""
    lines: list[dict[str, Any]] = []
    for fault in error.errors(include_url=False, include_context=False):
        given = fault["input"]
        if fault["type"] == "json_invalid":
            given = {}
        where = ".".join(["body", *map(str, fault["loc"])])
        lines.append({"type": fault["type"], "loc": where, "msg": fault["msg"], "input": _short(given)})
    count = f"{len(lines)} validation error{'s' if len(lines) > 1 else ''}:"
    said = "\n".join([count, *(f"  {line}" for line in lines)])
    return EngineRequestError(said, kind="Bad Request", param=lines[0]["loc"] if lines else None)


def _short(value: Any) -> Any:
    """An echo of what was sent, no longer than it helps."""
    text = repr(value)
    return value if len(text) <= 500 else text[:500] + "..."


Handler = Callable[[Request], Awaitable[Response]]
M = TypeVar("M", bound=BaseModel)


def with_refusals(handler: Handler) -> Handler:
    """A handler whose refusals become answers."""

    async def guard(request: Request) -> Response:
        try:
            return await handler(request)
        except EngineRequestError as refused:
            return refused.response()
        except ValidationError as error:
            return invalid_body(error).response()
        except ClientDisconnect:
            return Response(status_code=499)

    return guard


def json_response(value: Any, status: int = 200) -> Response:
    """An answer with a JSON body."""
    return Response(orjson.dumps(value), status, media_type="application/json")


async def read_body(request: Request, kind: type[M]) -> M:
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
    """Starlette's own errors (404, 405) in vLLM's shape."""
    assert isinstance(error, HTTPException)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    return EngineRequestError(error.detail, status=error.status_code, kind=kind).response()
