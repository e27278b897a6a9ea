"""Which posted groups are kept as they came, uncompressed.

Compressing a group and unpacking it for the answer takes longer than all else that is done with it. A group that soon
leaves in plain JSON needs neither; one that waits is compressed, since there may be many.
"""

from __future__ import annotations

from headrace.data.scored import Piece, deflate, store

#: Bytes of groups that are stored until the queue is looked at again, and of the queue that counts as a short one: five
#: batches of 128 sequences of 1,024 tokens. What is stored takes at most about twice as much memory.
PLAIN_BYTES = 32_000_000


class PlainAllowance:
    """How many bytes of groups may still be stored. There are some while the trainer takes plain JSON and the queue was
    short when it last asked."""

    def __init__(self) -> None:
        self._bytes = 0
        self._stored_bytes = 0  # of all groups since the first, with their number: how large one is
        self._stored_groups = 0

    @property
    def is_low(self) -> bool:
        """Whether it should be renewed, where the trainer takes plain JSON and the queue is short."""
        return self._bytes < PLAIN_BYTES / 2

    def renew(self, queued_groups: int) -> None:
        """To be called when the trainer asked for a batch in plain JSON, while so many groups wait."""
        mean = self._stored_bytes / self._stored_groups if self._stored_groups else 0.0
        self._bytes = PLAIN_BYTES if queued_groups * mean <= PLAIN_BYTES else 0

    def end(self) -> None:
        """To be called when the trainer asked for a batch as gzip: what comes next is compressed."""
        self._bytes = 0

    def make_piece(self, text: bytes) -> Piece:
        """A group's JSON, stored where it may be, else compressed. Two threads at once may store one group too many."""
        if len(text) > self._bytes:
            return deflate(text)
        self._bytes -= len(text)
        self._stored_bytes += len(text)
        self._stored_groups += 1
        return store(text)
