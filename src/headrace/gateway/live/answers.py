"""Which conversation does a request continue? The one that gave an answer which the request contains.

An answer is known by a digest of everything up to it, so a look-up costs one digest an answer, and nothing is kept of
what was said; one of which a request holds the tool calls alone is known by their ids. Of several conversations that
are alike up to that answer, the tokens so far are the same: one that nobody has continued yet is taken, so that each
goes on by itself. Pure; its memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from headrace.tokens import Request
from headrace.tokens.digests import DIGEST_BYTES, strict

#: Answers that are remembered, some 300 bytes each; the conversations that were quiet longest are forgotten first.
MOST = 500_000
#: Conversations that are alike up to an answer, of which so many are told apart.
MOST_ALIKE = 64


class Answer(msgspec.Struct, gc=False):
    """One that a conversation gave. `strict` tells it from others that look alike."""

    uid: str
    strict: bytes
    continued: bool = False


class Match(msgspec.Struct, frozen=True):
    """An answer that a request contains. `last`: no other answer follows it there; `alike`: the conversations that gave
    it, at least in these words."""

    answer: Answer
    last: bool
    alike: tuple[str, ...]


class Answers:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._by_key: dict[bytes, list[Answer]] = {}
        self._keys: OrderedDict[str, list[bytes]] = OrderedDict()  # of each conversation, the quietest first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, uid: str) -> bool:
        return uid in self._keys

    def add(
        self, uid: str, scope: str, key: bytes, exact: bytes, named: bytes = b"", *, continued: bool = False
    ) -> None:
        """An answer that a conversation gave, within `scope`: others never find it. `named` is what its tool calls name
        it by, where it has any."""
        given = Answer(uid, exact, continued)
        for scoped in (_scoped(scope, digest) for digest in (key, named) if digest):
            alike = self._by_key.setdefault(scoped, [])
            if any(answer.uid == uid and answer.strict == exact for answer in alike):
                continue
            alike.append(given)
            if len(alike) > MOST_ALIKE:
                del alike[0]
                self._count -= 1
            self._keys.setdefault(uid, []).append(scoped)
            self._keys.move_to_end(uid)
            self._count += 1
        while self._count > self._most and len(self._keys) > 1:
            self.drop(next(iter(self._keys)))

    def find(self, scope: str, request: Request) -> Match | None:
        """The last answer in a request that one of the conversations gave."""
        chain, last = request.chain, True
        for n in range(len(request.messages), 0, -1):
            message = request.messages[n - 1]
            if message.role != "assistant":
                continue
            named = chain.named.get(n)
            found = self._by_key.get(_scoped(scope, named)) if named else None
            found = found or self._by_key.get(_scoped(scope, chain.keys[n]))
            if found:
                meant = _meant(found, strict(message, chain.schemas)) if len(found) > 1 else found[0]
                return Match(meant, last, tuple(answer.uid for answer in found))
            last = False
        return None

    def find_text(self, scope: str, keys: Iterable[bytes]) -> Match | None:
        """The longest text that one of the conversations gave; `keys` are those of a prompt's beginnings."""
        for key in keys:
            found = self._by_key.get(_scoped(scope, key))
            if found:
                return Match(_meant(found, b""), True, tuple(answer.uid for answer in found))
        return None

    def drop(self, uid: str) -> None:
        """Forgets a conversation."""
        for key in self._keys.pop(uid, ()):
            alike = self._by_key.pop(key, [])
            left = [answer for answer in alike if answer.uid != uid]
            self._count -= len(alike) - len(left)
            if left:
                self._by_key[key] = left


def _scoped(scope: str, key: bytes) -> bytes:
    return blake2b(scope.encode("utf-8", "surrogatepass") + key, digest_size=DIGEST_BYTES).digest()


def _meant(found: list[Answer], exact: bytes) -> Answer:
    alike = [answer for answer in found if answer.strict == exact] or found
    return next((answer for answer in reversed(alike) if not answer.continued), alike[-1])
