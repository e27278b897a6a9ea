"""Reading bodies and writing JSON answers and errors, in vLLM's shape and, where they were recorded, vLLM's words."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from headrace.data.errors import HeadraceError

M = TypeVar("M", bound=BaseModel)


class EngineRequestError(HeadraceError):
    """A request that is answered with an error status."""

    code = "refused"

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param

    def response(self) -> Response:
        """The error as a response in vLLM's shape."""
        body = {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}
        return Response(orjson.dumps(body), self.status, media_type="application/json")


def no_such_model(name: str, served: str) -> EngineRequestError:
    """404: the engine serves another model."""
    return EngineRequestError(
        f"The model `{name}` does not exist. Valid aliases: {served}.", status=404, kind="NotFoundError", param="model"
    )


def outside_vocabulary(token: int) -> EngineRequestError:
    """400: the model has no token of this id."""
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
    """400: vLLM has this feature, and this engine has not."""
    return EngineRequestError(f"This engine does not offer {what}; vLLM does.", param=param)


def internal_error(message: str) -> EngineRequestError:
    """500, in vLLM's shape."""
    return EngineRequestError(message, status=500, kind="InternalServerError")


def invalid_body(error: ValidationError) -> EngineRequestError:
    """400 with every fault that pydantic found in a body."""
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
    """A value that was sent, shortened to quote it in an error."""
    text = repr(value)
    return value if len(text) <= 500 else text[:500] + "..."


Handler = Callable[[Request], Awaitable[Response]]


def with_refusals(handler: Handler) -> Handler:
    """Wraps a handler so that an `EngineRequestError` becomes its response."""

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
    """A response with a JSON body."""
    return Response(orjson.dumps(value), status, media_type="application/json")


async def read_body(request: Request, kind: type[M]) -> M:
    """Parses a request's body as a model. Raises `EngineRequestError`, in Python's words (list, not array) as
    vLLM's."""
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
