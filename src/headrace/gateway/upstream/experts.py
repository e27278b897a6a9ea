"""The experts that tokens were routed to, as a rollout server tells them: a `.npy` file in base64."""

from __future__ import annotations

import base64
import io
from tokenize import TokenError
from typing import Any

import numpy as np

from headrace.gateway.upstream.errors import MalformedAnswer

#: How the head of a `.npy` file is read, by the format's version. Later ones are for arrays of records alone.
NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
#: What numpy raises where there is no such file: its head is Python's syntax, and read as that.
NOT_NPY = (ValueError, TypeError, KeyError, SyntaxError, OverflowError, RecursionError, MemoryError, TokenError)


def decode_experts(told: str | None) -> Any:
    """The experts that tokens were routed to, out of a `.npy` file in base64. No more memory is taken than the answer
    has, whatever shape the file speaks of. Raises `MalformedAnswer` for what is no array of numbers of at least 0."""
    if told is None:
        return None
    try:
        data = base64.b64decode(told, validate=True)
        file = io.BytesIO(data)
        read_header = NPY_HEADERS[np.lib.format.read_magic(file)]
        shape, by_columns, dtype = read_header(file)
        if dtype.kind not in "iu":
            raise MalformedAnswer(f"routed_experts is an array of {dtype}, not of integers")
        if any(size < 1 for size in shape):
            raise MalformedAnswer(f"routed_experts is an array of shape {shape}, which holds nothing")
        found = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if by_columns else "C")
    except NOT_NPY as error:
        raise MalformedAnswer(f"routed_experts is no array: {error!r}") from error
    if int(found.min()) < 0:
        raise MalformedAnswer("routed_experts holds an index below 0")
    return found
