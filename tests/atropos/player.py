"""Plays a scenario against a server, whichever it is, and keeps what a client could see of the answers.

Two plays against one server are equal: what differs from run to run (a trainer's uuid) is replaced by its shape. The
body of an error is left out: clients act on the status alone.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx
from tests.atropos.calls import Call, Scenario, same

#: The headers of an answer that the contract speaks of, and those that a page of another origin needs.
HEADERS = ("content-type", "content-encoding", "access-control-allow-origin")
UUID = "<an integer of 128 bits>"
TIMEOUT_S = 30


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: Any

    @classmethod
    def read(cls, recorded: dict[str, Any]) -> Answer:
        return cls(recorded["status"], recorded["headers"], recorded["body"])


def play(base_url: str, scenario: Scenario, headers: dict[str, str] | None = None) -> list[Answer]:
    """The answers of the server at `base_url`; `headers` go with every call, for a server that wants a key."""
    # Nothing is sent that the scenario does not say, but for what HTTP needs: no `Accept-Encoding` of the client's own.
    # A connection a call: the original closes one after a 500, and the next call would meet it closing.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=base_url, timeout=TIMEOUT_S, trust_env=False, limits=limits) as client:
        client.headers = httpx.Headers({"accept-encoding": "identity", **(headers or {})})
        return [_ask(client, call) for call in scenario.calls]


def _ask(client: httpx.Client, call: Call) -> Answer:
    content, headers = call.body, dict(call.headers)
    if call.gzipped:
        whole = gzip.compress(content or b"", mtime=0)
        content = whole[: len(whole) - call.cut]
        headers.setdefault("content-encoding", "gzip")
    with client.stream(call.method, call.path, content=content, headers=headers) as response:
        raw = b"".join(response.iter_raw())
    seen = {name: response.headers[name] for name in HEADERS if name in response.headers}
    if seen.get("content-encoding") == "gzip":
        raw = zlib.decompress(raw, 31)  # the first member alone, as common clients read it
    return Answer(response.status_code, seen, _body(response.status_code, seen, raw))


def _body(status: int, headers: dict[str, str], raw: bytes) -> Any:
    if status >= 400:
        return None
    if not headers.get("content-type", "").startswith("application/json"):
        return raw.decode()
    body = json.loads(raw)
    if isinstance(body, dict) and isinstance(body.get("uuid"), int) and 0 <= body["uuid"] < 1 << 128:
        body["uuid"] = UUID
    return body


def differ(call: Call, answer: Answer) -> Iterable[str]:
    """Where an answer is not what the call says of the original's, in words."""
    if answer.status != call.status:
        yield f"status {answer.status}, not {call.status}"
    elif answer.status < 400 and not same(call.answer, answer.body):
        yield f"{answer.body!r}, not {call.answer!r}"
    if answer.headers.get("content-encoding") != call.encoding:
        yield f"content-encoding {answer.headers.get('content-encoding')!r}, not {call.encoding!r}"
