"""First prompts that were rendered before: the rollouts of a group ask the same question, and it is tokenised once.

Only conversations of text and without answers are remembered. What systems and users said is the same here only if it
is the same text, so the same key means the same ids.
"""

from __future__ import annotations

from collections import OrderedDict

from headrace.data.step import IntArray
from headrace.tokens import Request

Key = tuple[bytes, bytes, bytes]
#: Tokens that are remembered; four bytes each.
MOST_TOKENS = 2_000_000


class Prompts:
    """Ids by conversation, tools and template options; the least used are forgotten first."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens
        self._known: OrderedDict[Key, IntArray] = OrderedDict()
        self._tokens = 0

    def key(self, conversation: Request) -> Key | None:
        """What a conversation is remembered by; None where it is not to be."""
        if any(message.role not in ("system", "user") or message.parts for message in conversation.messages):
            return None
        return conversation.chain.whole, conversation.tools_key, conversation.options_key

    def get(self, key: Key) -> IntArray | None:
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        return found

    def put(self, key: Key, ids: IntArray) -> None:
        if key in self._known or len(ids) > self._most:
            return
        ids.flags.writeable = False  # many trajectories share it
        self._known[key] = ids
        self._tokens += len(ids)
        while self._tokens > self._most:
            _, oldest = self._known.popitem(last=False)
            self._tokens -= len(oldest)
