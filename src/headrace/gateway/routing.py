"""How routes read what they are sent, and how FastAPI lists them without its machinery in the way of a call."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import request_response

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.gateway.errors import Refusal, refusal, too_deep
from headrace.gateway.responses import refused

log = logging.getLogger("headrace.gateway")

#: What stands in front of the routes of one trajectory.
BASE = "/{trajectory_uid}/{prompt_uid}"

Handler = Callable[[Request], Awaitable[Any]]
T = TypeVar("T")


class LeanRoute(APIRoute):
    """A route whose endpoint reads the request itself; FastAPI knows it for its OpenAPI."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.app = request_response(endpoint)


def path_uid(request: Request, name: str) -> str:
    try:
        return unquote(request.path_params[name], errors="strict")
    except UnicodeDecodeError:
        raise InvalidInput(f"{name} in the path is no UTF-8: {request.path_params[name]!r}") from None


def plain(handler: Handler) -> Handler:
    """A handler whose refusals become `{"detail": ...}`."""

    async def guarded(request: Request) -> Response:
        try:
            found: Response = await handler(request)
            return found
        except ClientDisconnect:
            return Response(status_code=499)
        except HeadraceError as error:
            return refused(refusal(error))
        except RecursionError:
            return refused(too_deep())
        except Exception as error:
            log.exception("a request failed")
            return refused(Refusal(f"the gateway failed at this ({type(error).__name__}); its log says where", 500))

    guarded.__name__ = handler.__name__
    guarded.__doc__ = handler.__doc__
    return guarded


def read(data: bytes, kind: type[T], *, empty: bool = False) -> T:
    """A body as what a route takes; with `empty`, none is an object without fields."""
    if empty and not data.strip():
        data = b"{}"
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise Refusal(f"the body is not what this route takes: {error}", 400, code="invalid_request") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"the body is no JSON: {error}", 400, code="invalid_json") from None
    except RecursionError:
        raise too_deep() from None
