"""Reading calls: small ones on the spot, large ones in a thread, one after the other, and what no model could be meant
to read not at all.

What a body becomes in memory is bounded before it is parsed: its text takes as much as it has bytes, but an object of
two bytes takes a hundred. Text that no context holds is refused later, by its length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from headrace.gateway.ask import Ask, Bad

#: Bytes from which on a body is read in a thread: as much as may take some 10 ms.
LARGE = 256_000
#: Objects and lists that a large body may hold, about 0.1 GB of them. Braces in its texts count too: those of the code
#: in a prompt of a million tokens are some 100,000.
MOST_NESTED = 300_000
#: Commas that it may hold, in its texts too, and so how many values: ids of prompts, mostly, 40 bytes each.
MOST_VALUES = 4_000_000
#: Bytes of fields that are not known here, which every step of the call keeps.
MOST_EXTRA = 1_000_000

#: Bytes of tools: a thousand tools of two kilobytes each are more tokens than any context has.
MOST_TOOLS = 2_000_000


class Reading:
    """What reads the calls of one gateway."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "headrace-read")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def call(self, body: bytes, read: Callable[[bytes], Ask], digest: Callable[[bytes], str]) -> tuple[Ask, str]:
        """What a body asks for, and its digest; `InvalidInput` where it cannot be read, or is too much."""
        if len(body) < LARGE:
            return read(body), digest(body)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _large, body, read, digest)


def _large(body: bytes, read: Callable[[bytes], Ask], digest: Callable[[bytes], str]) -> tuple[Ask, str]:
    nested = body.count(b"{") + body.count(b"[")
    if nested > MOST_NESTED:
        raise Bad(f"the body holds {nested} objects and lists; at most {MOST_NESTED} are taken. Send fewer messages")
    values = body.count(b",")
    if values > MOST_VALUES:
        raise Bad(f"the body holds {values} values; at most {MOST_VALUES} are taken. Send fewer")
    ask = read(body)
    tools = len(msgspec.json.encode(ask.conversation.tools)) if ask.conversation is not None else 0
    if tools > MOST_TOOLS:
        raise Bad(f"tools have {tools} bytes; at most {MOST_TOOLS} are taken. Offer fewer", "tools")
    for name, value in ask.extra.items():
        if (size := len(msgspec.json.encode(value))) > MOST_EXTRA:
            raise Bad(f"{name} has {size} bytes, and is not known here; at most {MOST_EXTRA} are passed on", name)
    return ask, digest(body)
