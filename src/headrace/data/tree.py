"""The token tree of one trajectory: every token is held once, whatever the agent did with its history.

A step's prompt is stored as a reference to an earlier step (`base`, and how many of its tokens to `keep`) and the rest.
That covers a history that grows (keep all), one that was rewritten half-way, a sub-agent that shares a system prompt,
and `n` choices of one prompt. What is shared is found by comparing tokens, never by trusting an order of arrival.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.data.block import TOKEN_BYTES, Record


class TokenTree(msgspec.Struct, eq=False, gc=False):  # holds records, which hold nothing that could lead back
    """Records by step index, with the search for the longest prefix that is already there."""

    records: dict[int, Record] = {}
    # Who builds on whom; made when the first search asks, since most trajectories of one step never do.
    children: dict[int, list[int]] | None = None

    def __len__(self) -> int:
        return len(self.records)

    def add(self, record: Record) -> None:
        """Takes a record in under its step index, in place of one that is there; what it builds on must be here."""
        head = record.head
        self.records[head.step_index] = record
        if self.children is not None:
            self.children.setdefault(head.base, []).append(head.step_index)

    def discard(self, index: int) -> None:
        """Takes a record out that no other builds on (the undo of `add`)."""
        record = self.records.pop(index)
        if self.children is not None:
            self.children[record.head.base].remove(index)

    def longest_prefix(self, prompt: bytes) -> tuple[int, int]:
        """(step index, tokens) of the longest stored run that `prompt` begins with; (-1, 0) where none does."""
        if self.children is None:
            self.children = {}
            for index, record in self.records.items():
                self.children.setdefault(record.head.base, []).append(index)
        best, best_end = -1, 0
        open_nodes = list(self.children.get(-1, ()))
        while open_nodes:
            index = open_nodes.pop()
            record = self.records[index]
            start = record.head.keep * TOKEN_BYTES
            own = record.ids
            alike = len(own) if prompt.startswith(own, start) else common_tokens(prompt, own, start) * TOKEN_BYTES
            end = start + alike
            if end > best_end:
                best, best_end = index, end
            for child in self.children.get(index, ()):
                if self.records[child].head.keep * TOKEN_BYTES <= end:
                    open_nodes.append(child)
        return best, best_end // TOKEN_BYTES

    def prompt(self, index: int) -> bytes:
        """The whole prompt of a step."""
        record = self.records[index]
        head = record.head
        return self.path(head.base, head.keep) + record.ids[: head.n_prompt * TOKEN_BYTES]

    def path(self, index: int, tokens: int) -> bytes:
        """The first `tokens` of a step's prompt and response."""
        parts: list[bytes] = []
        while tokens > 0:
            record = self.records[index]
            keep = record.head.keep
            if tokens > keep:
                parts.append(record.ids[: (tokens - keep) * TOKEN_BYTES])
                tokens = keep
            index = record.head.base
        parts.reverse()
        return b"".join(parts)

    def whole(self, index: int) -> bytes:
        """A step's prompt and response."""
        return self.path(index, self.records[index].end)

    def tail(self, index: int, start: int) -> bytes:
        """A step's prompt and response from the byte `start` on."""
        record = self.records[index]
        begin = record.head.keep * TOKEN_BYTES
        return record.ids[start - begin :] if start >= begin else self.whole(index)[start:]

    def in_order(self) -> list[Record]:
        """Records with every base before what builds on it, oldest index first where that leaves a choice."""
        records = self.records
        if len(records) == 1:
            return list(records.values())
        ordered: list[Record] = []
        done: set[int] = set()
        for index in sorted(records):
            chain: list[int] = []
            while index >= 0 and index not in done:
                chain.append(index)
                done.add(index)
                index = records[index].head.base
            ordered += [records[link] for link in reversed(chain)]
        return ordered


def common_tokens(first: bytes, second: bytes, start: int = 0) -> int:
    """How many packed tokens `first`, from its byte `start` on, and `second` begin with alike."""
    n = min(len(first) - start, len(second)) // TOKEN_BYTES
    if n <= 0:
        return 0
    differ = np.frombuffer(first, "<i4", n, start) != np.frombuffer(second, "<i4", n)
    at = int(differ.argmax())
    return at if differ[at] else n
