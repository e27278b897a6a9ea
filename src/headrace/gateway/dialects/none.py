"""What is said on a path that no dialect has: that it is not there, in the shape that most SDKs read."""

from __future__ import annotations

from typing import Any, NoReturn

from headrace.gateway.call.turn import Turn
from headrace.gateway.dialects.openai import error_body
from headrace.gateway.errors import Refusal


class NoDialect:
    """Nothing is read here, so nothing is ever answered."""

    vendor = "A provider"

    def read(self, body: bytes) -> NoReturn:
        raise Refusal("there is no such route for a model that is recorded; see /docs", 404, code="no_route")

    def headers(self, call_id: str) -> dict[str, str]:
        return {}

    def whole(self, turns: list[Turn]) -> NoReturn:
        raise NotImplementedError

    def events(self, turns: list[Turn]) -> NoReturn:
        raise NotImplementedError

    def error(self, refusal: Refusal) -> Any:
        return error_body(refusal)
