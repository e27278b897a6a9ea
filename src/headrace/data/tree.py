"""The token tree of one trajectory: every token is held once, whatever the agent did with its history.

A step's prompt is stored as a reference to an earlier step (`base`, and how many of its tokens to `keep`) and the rest.
That covers a history that grows (keep all), one that was rewritten half-way, a sub-agent that shares a system prompt,
and `n` choices of one prompt. What is shared is found by comparing tokens, never by trusting an order of arrival.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.data.block import TOKEN_BYTES, Record

#: On whom more steps than this build, their first tokens are looked up, so that a search does not pass each of them.
FEW = 16


class TokenTree(msgspec.Struct, eq=False, gc=False):  # holds records, which hold nothing that could lead back
    """Records by step index, with the search for the longest prefix that is already there."""

    records: dict[int, Record] = {}
    # Who builds on whom; made when the first search asks, since most trajectories of one step never do.
    children: dict[int, list[int]] | None = None
    # Of a step that more than a few build on, these by how many tokens they keep and their first own token.
    crowds: dict[int, dict[tuple[int, bytes], list[int]]] = {}

    def __len__(self) -> int:
        return len(self.records)

    def add(self, record: Record) -> None:
        """Takes a record in under its step index, which no other has; what it builds on must be here."""
        self.records[record.head.step_index] = record
        if self.children is not None:
            self._link(record)

    def discard(self, index: int) -> None:
        """Takes a record out that no other builds on (the undo of `add`)."""
        record = self.records.pop(index)
        if self.children is not None:
            self._unlink(record)

    def longest_prefix(self, prompt: bytes) -> tuple[int, int]:
        """(step index, tokens) of the longest stored run that `prompt` begins with; (-1, 0) where none does."""
        if self.children is None:
            self.children = {}
            for record in self.records.values():
                self._link(record)
        best, best_end = -1, 0
        open_nodes = self._matching(-1, 0, prompt)
        while open_nodes:
            index = open_nodes.pop()
            record = self.records[index]
            start = record.head.keep * TOKEN_BYTES
            own = record.ids
            alike = len(own) if prompt.startswith(own, start) else common_tokens(prompt, own, start) * TOKEN_BYTES
            end = start + alike
            if end > best_end:
                best, best_end = index, end
            open_nodes += self._matching(index, end, prompt)
        return best, best_end // TOKEN_BYTES

    def _matching(self, index: int, end: int, prompt: bytes) -> list[int]:
        """Of the steps that build on one whose bytes a prompt has until `end`: those that may have more of it."""
        assert self.children is not None
        crowd = self.crowds.get(index)
        if crowd is None:
            few = self.children.get(index, ())
            return [child for child in few if self.records[child].head.keep * TOKEN_BYTES <= end]
        found: list[int] = []
        for (keep, token), steps in crowd.items():
            start = keep * TOKEN_BYTES
            if start <= end and prompt.startswith(token, start):
                found += steps
        return found

    def _link(self, record: Record) -> None:
        """Makes a record found by who asks for what builds on its base."""
        assert self.children is not None
        base = self._branches_from(record)
        siblings = self.children.setdefault(base, [])
        siblings.append(record.head.step_index)
        if base in self.crowds:
            self.crowds[base].setdefault(_beginning(record), []).append(record.head.step_index)
        elif len(siblings) > FEW:
            crowd = self.crowds[base] = {}
            for index in siblings:
                crowd.setdefault(_beginning(self.records[index]), []).append(index)

    def _unlink(self, record: Record) -> None:
        """The undo of `_link`."""
        assert self.children is not None
        base, index = self._branches_from(record), record.head.step_index
        self.children[base].remove(index)
        if crowd := self.crowds.get(base):
            key = _beginning(record)
            unread = (record.head.keep, b"")
            crowd[key if index in crowd.get(key, ()) else unread].remove(index)

    def _branches_from(self, record: Record) -> int:
        """The step whose own tokens are the last that a record keeps; a producer may name one that keeps them too."""
        base, keep = record.head.base, record.head.keep
        while base >= 0 and keep <= self.records[base].head.keep:
            base = self.records[base].head.base
        return base

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


def _beginning(record: Record) -> tuple[int, bytes]:
    """How many tokens a record keeps, and the first of its own: nothing, which any prompt goes on with, where they are
    not in memory."""
    return record.head.keep, (record.ids_in_memory or b"")[:TOKEN_BYTES]


def common_tokens(first: bytes, second: bytes, start: int = 0) -> int:
    """How many packed tokens `first`, from its byte `start` on, and `second` begin with alike."""
    n = min(len(first) - start, len(second)) // TOKEN_BYTES
    if n <= 0:
        return 0
    differ = np.frombuffer(first, "<i4", n, start) != np.frombuffer(second, "<i4", n)
    at = int(differ.argmax())
    return at if differ[at] else n
