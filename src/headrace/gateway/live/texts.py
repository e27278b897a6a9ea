"""Which beginnings of a prompt may be texts that were given before?

A text is entered under the digest of its whole chunks, with how many bytes follow them. A prompt is digested once, and
asked for at each chunk: what it costs does not grow with how many texts there are. Pure; its memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

from headrace.gateway.text_key import CHUNK, DIGEST, TextKey

#: Beginnings that are remembered; those that were used longest ago are forgotten first.
MOST = 200_000


class Texts:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._tails: OrderedDict[tuple[str, bytes], set[int]] = OrderedDict()

    def add(self, scope: str, key: TextKey) -> None:
        at = (scope, bytes.fromhex(key.anchor))
        self._tails.setdefault(at, set()).add(key.tail)
        self._tails.move_to_end(at)
        if len(self._tails) > self._most:
            self._tails.popitem(last=False)

    def known(self, scope: str, prompt: str) -> Iterator[bytes]:
        """The digests of a prompt's beginnings that may have been given, the longest first."""
        data = prompt.encode("utf-8", "surrogatepass")
        hasher = blake2b(digest_size=DIGEST)
        places = []
        for start in range(0, len(data) + 1, CHUNK):
            tails = self._tails.get((scope, hasher.digest()))
            if tails:
                places.append((start, hasher.copy(), tails))
            hasher.update(data[start : start + CHUNK])
        for start, before, tails in reversed(places):
            for tail in sorted(tails, reverse=True):
                if start + tail <= len(data):
                    whole = before.copy()
                    whole.update(data[start : start + tail])
                    yield whole.digest()
