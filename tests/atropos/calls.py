"""A call of the Trajectory API and what the contract says of its answer; a scenario is calls to a fresh server.

`...` in an expected answer stands for anything. Numbers are compared with their kind: 1, 1.0 and true are three.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any

JSON = (("content-type", "application/json"),)


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    #: Send the body as gzip, without its last `cut` bytes.
    gzipped: bool = False
    cut: int = 0
    #: What the original answers, by the contract: its status, and the JSON (or the text) where that is said.
    status: int = 200
    answer: Any = ...
    #: Its answer's Content-Encoding.
    encoding: str | None = None

    @property
    def key(self) -> str:
        """Names the call in a record, and changes with anything that is sent."""
        sent = repr((self.headers, self.gzipped, self.cut)).encode() + (self.body or b"")
        return f"{self.method} {self.path} {zlib.crc32(sent):08x}"


@dataclass(frozen=True)
class Scenario:
    name: str
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        return self.name


def get(path: str, answer: Any = ..., *, body: Any = None, **more: Any) -> Call:
    """With a JSON body where one is given, as /status-env wants it."""
    return _call("GET", path, body, answer, more)


def post(path: str, body: Any, answer: Any = ..., **more: Any) -> Call:
    return _call("POST", path, body, answer, more)


def _call(method: str, path: str, body: Any, answer: Any, more: dict[str, Any]) -> Call:
    if body is None:
        return Call(method, path, answer=answer, **more)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = (*JSON, *more.pop("headers", ()))
    return Call(method, path, content, headers, answer=answer, **more)


def same(one: Any, other: Any) -> bool:
    """Equal with the kinds of all numbers; `...` on either side is equal to anything."""
    if one is ... or other is ...:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
