"""What is refused, in the shape and, where it was recorded, in the words of vLLM."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import ValidationError
from starlette.responses import Response

from headrace.data.errors import HeadraceError


class Refused(HeadraceError):
    """A request that is answered with an error."""

    code = "refused"

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param

    def response(self) -> Response:
        body = {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}
        return Response(orjson.dumps(body), self.status, media_type="application/json")


def no_such_model(name: str, served: str) -> Refused:
    return Refused(
        f"The model `{name}` does not exist. Valid aliases: {served}.", status=404, kind="NotFoundError", param="model"
    )


def outside_vocabulary(token: int) -> Refused:
    return Refused(f"Token id {token} is out of vocabulary")


def prompt_too_long(length: int, context: int) -> Refused:
    return Refused(
        f"This model's maximum context length is {context} tokens. However, your prompt contains {length} input tokens"
        ", which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
        f"(parameter=input_tokens, value={length})",
        param="input_tokens",
    )


def too_many_tokens(asked: int, context: int) -> Refused:
    return Refused(
        f"max_tokens={asked} cannot be greater than max_model_len={context}. Please request fewer output tokens. "
        f"(parameter=max_tokens, value={asked})",
        param="max_tokens",
    )


def not_offered(what: str, param: str) -> Refused:
    return Refused(f"This engine does not offer {what}; vLLM does.", param=param)


def broken(message: str) -> Refused:
    return Refused(message, status=500, kind="InternalServerError")


def invalid(error: ValidationError) -> Refused:
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
    return Refused(said, kind="Bad Request", param=lines[0]["loc"] if lines else None)


def _short(value: Any) -> Any:
    """An echo of what was sent, no longer than it helps."""
    text = repr(value)
    return value if len(text) <= 500 else text[:500] + "..."
