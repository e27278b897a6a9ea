"""What both wires share: how a prompt is compared, and how a server says what is wrong."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import orjson

from headrace.data.errors import shown
from headrace.data.step import INT32_MAX, IntArray
from headrace.gateway.upstream.types import Order, Sampled
from headrace.tokens.vision import folded

TokenId = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
NOT_TOLD = msgspec.Raw(b"null")
#: The field that tells a prompt, and what stands for one that needs no reading.
FIELD = b'"prompt_token_ids":'
AS_SENT = b'"as sent"'
#: Bytes from which a prompt is worth passing over.
LONG = 2048


class Fault(msgspec.Struct):
    """An error as vLLM tells it."""

    message: str = ""
    param: str | None = None
    code: int | str | None = None


class Asked(msgspec.Struct, frozen=True, eq=False):
    """An order with its prompt as JSON: written once, sent as it is, and compared with what comes back."""

    order: Order
    choices: int
    prompt: bytes

    @classmethod
    def of(cls, order: Order) -> Asked:
        n = order.sampling.get("n")
        return cls(order, n if isinstance(n, int) else 1, orjson.dumps(order.prompt, option=orjson.OPT_SERIALIZE_NUMPY))

    def short(self, data: bytes) -> bytes:
        """An answer in which a long prompt that came back as it was sent is a mark: there is nothing in it to parse.

        JSON escapes a quote inside a string, so what reads like the field's name and the whole prompt is that.
        """
        if len(self.prompt) < LONG or len(data) < len(self.prompt):
            return data
        kept, done = [], 0
        at = data.find(FIELD)
        while at >= 0:
            begin = at + len(FIELD)
            if data.startswith(self.prompt, begin):
                kept += [data[done:begin], AS_SENT]
                done = begin + len(self.prompt)
                begin = done
            at = data.find(FIELD, begin)
        return b"".join([*kept, data[done:]]) if kept else data

    def consumed(self, told: msgspec.Raw) -> IntArray | None:
        """The prompt as the server told it: the order's own array where it is that, None where it told none."""
        said = bytes(told)
        if said == self.prompt or said == AS_SENT:
            return self.order.prompt
        if said == b"null":
            return None
        found = np.array(msgspec.json.decode(said, type=list[TokenId]), dtype=np.int32)
        return self.order.prompt if np.array_equal(found, self.order.prompt) else found

    def sent(self) -> bytes:
        """The prompt as the server is to get it: it unfolds the images itself."""
        if not self.order.images:
            return self.prompt
        return orjson.dumps(folded(self.order.prompt, self.order.images), option=orjson.OPT_SERIALIZE_NUMPY)


class Wire(Protocol):
    """A route that samples: what it is asked, and what it answers."""

    def body(self, asked: Asked, model: str, *, stream: bool) -> bytes: ...

    def whole(self, asked: Asked, data: bytes, version: int) -> list[Sampled]:
        """The choices of a whole answer; `spans` only where the server told versions. `version` was known before."""
        ...

    def piece(self, asked: Asked, data: bytes, version: int) -> list[Sampled]:
        """What one event brings; raises `Said` where it is an error."""
        ...


class Nonsense(ValueError):
    """An answer that is JSON of the right shape and still none."""


class Said(Exception):
    """A server's own words about what went wrong."""

    def __init__(self, status: int, message: str, param: str | None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    @classmethod
    def of(cls, fault: Fault) -> Said:
        code = fault.code if isinstance(fault.code, int) else 500
        return cls(code, fault.message or "no reason given", fault.param)


def said(status: int, data: bytes) -> Said:
    """What an answer with an error status says, in whatever shape it says it."""
    try:
        found: Any = orjson.loads(data)
    except ValueError:
        found = data.decode("utf-8", "replace").strip()
    if isinstance(found, dict):
        found = found.get("error", found.get("detail", found.get("message", found)))
    if isinstance(found, dict) and isinstance(found.get("message"), str):
        param = found.get("param")
        return Said(status, found["message"], param if isinstance(param, str) else None)
    text = found if isinstance(found, str) else shown(found, 500)
    return Said(status, text[:2000] or f"status {status} without a reason", None)


def numbers(given: Sequence[float | None]) -> list[float]:
    """Log-probs as they were given; one that is missing is not a number, and the step's check says so."""
    if None in given:
        return [math.nan if value is None else value for value in given]
    return given  # type: ignore[return-value]


def experts(told: str | None) -> Any:
    """The experts that tokens were routed to, out of a `.npy` file in base64."""
    if told is None:
        return None
    try:
        return np.load(io.BytesIO(base64.b64decode(told, validate=True)), allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError) as error:
        raise Nonsense(f"routed_experts is no array: {error}") from error


def no_ids() -> Nonsense:
    return Nonsense("there are no token_ids; a server that returns them is needed (vLLM 0.11 or later)")
