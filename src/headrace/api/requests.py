"""Reading requests: bodies unpacked within bounds, registrations read as leniently as Python would."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from isal import isal_zlib
from starlette.requests import Request

from headrace.data.errors import HeadraceError, InvalidInput, shown
from headrace.data.scored import values
from headrace.net.server import BodyTooLarge, read_body

T = TypeVar("T", bound=msgspec.Struct)

_GZIP = 31  # `wbits` of a gzip member
_ERROR: type[Exception] = isal_zlib.error  # type: ignore[assignment]  # a class, which its types do not say
#: Members that a gzip body may have: who compresses it whole makes one, and each costs a call.
MAX_GZIP_MEMBERS = 1000
#: Bytes of a gzip member that are read at first; the window then doubles.
FIRST_WINDOW_BYTES = 64 * 1024
#: Megabytes of a body that is an object of settings, far more than any needs.
MAX_OBJECT_MB = 1.0


class BadGzip(HeadraceError):
    """A body that says it is gzip, and is not, or not all of it."""

    code = "bad_gzip"


async def raw_body(request: Request, max_mb: float) -> tuple[bytes, bool]:
    """The body as it was sent, of at most so many megabytes, and whether it has to be unpacked."""
    body = await read_body(request, int(max_mb * 1e6))
    return body, bool(body) and "gzip" in request.headers.get("content-encoding", "").lower()


def gunzip(body: bytes, max_mb: float) -> bytes:
    """What a gzip body holds: never more than is allowed in memory, whatever it would grow to."""
    limit = int(max_mb * 1e6)
    found: list[bytes] = []
    at, members = 0, 0
    try:
        while at < len(body):
            members += 1
            if members > MAX_GZIP_MEMBERS:
                raise BadGzip(f"the body is gzip of more than {MAX_GZIP_MEMBERS} members; send it as one")
            at, limit = _gunzip_member(memoryview(body), at, limit, found)
    except _ERROR as error:
        raise BadGzip(f"the body is no gzip, though its content-encoding says so: {error}") from None
    return found[0] if len(found) == 1 else b"".join(found)


def _gunzip_member(body: memoryview, at: int, limit: int, found: list[bytes]) -> tuple[int, int]:
    """Unpacks the member that begins at a place into `found`; where it ends, and how many bytes more there may be.

    What lies behind a member is copied with it, so a member gets no more of the body at a time than it has shown need
    of: many small ones cost no more than one large one.
    """
    member = isal_zlib.decompressobj(_GZIP)
    window = FIRST_WINDOW_BYTES
    while not member.eof:
        if at >= len(body):
            raise BadGzip("the body is gzip that ends too early; send it again, whole")
        part = body[at : at + window]
        found.append(member.decompress(part, limit + 1))
        limit -= len(found[-1])
        if limit < 0 or member.unconsumed_tail:
            raise BodyTooLarge
        at += len(part) - len(member.unused_data)
        window *= 2
    return at, limit


async def read_object(request: Request) -> dict[str, Any]:
    """A small body as a JSON object."""
    body, gzipped = await raw_body(request, MAX_OBJECT_MB)
    value = values.parse_json(gunzip(body, MAX_OBJECT_MB) if gzipped else body, "the body")
    if not isinstance(value, dict):
        raise InvalidInput(f"the body must be an object, not {shown(value)}")
    return value


def read_record(value: dict[str, Any], kind: type[T]) -> T:
    """An object as a record, its numbers and texts as Python takes them; the field that is wrong is named."""
    hints = typing.get_type_hints(kind)
    given = {
        field.name: _lenient(value[field.name], hints[field.name], field.name)
        for field in msgspec.structs.fields(kind)
        if field.name in value
    }
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"the body is not what this route takes: {error}") from None


def read_env_id(value: dict[str, Any]) -> int:
    """The `env_id` of an object; `InvalidInput` where it has none."""
    if "env_id" not in value:
        raise InvalidInput("env_id is missing")
    return values.as_int(value["env_id"], "env_id")


def read_flag(value: dict[str, Any], name: str) -> bool:
    """A field that is true or false, false where it is absent."""
    found = value.get(name, False)
    if not isinstance(found, bool):
        raise InvalidInput(f"{name} must be true or false, not {shown(found)}")
    return found


def _lenient(value: Any, hint: Any, name: str) -> Any:
    kinds = typing.get_args(hint) or (hint,)
    if value is None:
        return None
    convert: Callable[[Any, str], Any] | None = _NUMBERS.get(kinds[0])
    return convert(value, name) if convert is not None else value


_NUMBERS: dict[Any, Callable[[Any, str], Any]] = {int: values.as_int, float: values.as_float}
