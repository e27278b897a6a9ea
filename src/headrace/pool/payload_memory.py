"""How much memory payloads take, and which of those that come are left in the journal instead.

What is there stays where it is: a payload that comes when memory is full is read from the journal whenever it is
needed. A queue is used up from its oldest end, so what is needed next is in memory as a rule.
"""

from __future__ import annotations

from typing import Any

from headrace.data.block import Blob, BlockPlace, Record
from headrace.data.tree import TokenTree


class PayloadMemory:
    """The payloads of one pool, in bytes: `used` of memory, and `in_journal` beside that. `limit` bounds the first; it
    is None where there is no journal that the others could be read from."""

    __slots__ = ("__weakref__", "in_journal", "limit", "used")

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.used = 0
        self.in_journal = 0

    def _has_room(self, size: int) -> bool:
        return self.limit is None or self.used + size <= self.limit

    def keep(self, record: Record, place: BlockPlace | None, ids_at: int, log_probs_at: int) -> None:
        """Takes a record's arrays in, which are in memory and, unless `place` is None, in a file, where they begin at
        these bytes of its block: in memory where there is room, else there."""
        size = record.array_bytes
        if place is None or self._has_room(size):
            self.used += size
            return
        record.stored = place.arrays(ids_at, log_probs_at, record)
        record.ids_in_memory = record.log_probs_in_memory = None
        self.in_journal += size

    def kept_blob(self, digest: bytes, data: Any, place: BlockPlace | None, at: int) -> Blob:
        """The same for a blob."""
        size = len(data)
        if place is None or self._has_room(size):
            blob = Blob(digest, bytes(data))
            self.used += size
            blob.freed = self._free
        else:
            blob = Blob(digest, None, size, place.blob(at, data))
            self.in_journal += size
            blob.freed = self._free_in_journal
        return blob

    def release(self, tree: TokenTree) -> None:
        """A trajectory's records are let go of."""
        for record in tree.records.values():
            if record.stored is None:
                self.used -= record.array_bytes
            else:
                self.in_journal -= record.array_bytes

    def _free(self, size: int) -> None:
        self.used -= size

    def _free_in_journal(self, size: int) -> None:
        self.in_journal -= size
