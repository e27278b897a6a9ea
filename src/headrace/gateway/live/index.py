"""What a live service's conversations are called, and which of them a request continues. Pure; its memory is bounded.

A call's id begins with its conversation's, so that whoever holds a response id can be told its step by any gateway.

A request continues the conversation that gave an answer which the request contains. An answer is known by a digest of
everything up to it, so a look-up costs one digest an answer, and nothing is kept of what was said; one of which a
request holds the tool calls alone is known by their ids. Of several conversations that are alike up to that answer, the
tokens so far are the same: one that nobody has continued yet is taken, so that each goes on by itself.

The text of a completion is entered under the digest of its whole chunks, with how many bytes follow them. A prompt is
digested once, and looked up at each chunk: what that costs does not grow with how many texts there are.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import blake2b

import msgspec

from headrace.data.errors import InvalidInput, shown
from headrace.gateway.turn import CHUNK_BYTES, TextKey
from headrace.tokens import Conversation
from headrace.tokens.conversation import DIGEST_BYTES, strict

#: A conversation's uid: this, and hexadecimal digits; a call's id has the same digits and some of its own.
CONVERSATION_PREFIX = "live-"
CONVERSATION_DIGITS, CALL_DIGITS = 24, 16
#: Characters of the name that a client may give a session.
MAX_SESSION_NAME = 256

#: Answers that are remembered, some 300 bytes each; the conversations that were quiet longest are forgotten first.
MAX_ANSWERS = 500_000
#: Conversations that are alike up to an answer, of which so many are told apart.
MAX_ALIKE = 64

#: Beginnings that are remembered; those that were used longest ago are forgotten first.
MAX_TEXTS = 200_000

_UID = re.compile(rf"(?:.*/)?{CONVERSATION_PREFIX}[0-9a-f]{{{CONVERSATION_DIGITS}}}", re.DOTALL)
_RESPONSE = re.compile(
    rf"(?:chatcmpl-|cmpl-|resp_|msg_|req_)?([0-9a-f]{{{CONVERSATION_DIGITS + CALL_DIGITS}}}(?:-[0-9]{{1,6}})?)"
)


def new_conversation_uid() -> str:
    """The uid of a conversation that no session names."""
    return CONVERSATION_PREFIX + secrets.token_hex(CONVERSATION_DIGITS // 2)


def session_uid(name: str, part: int) -> str:
    """The uid of a part of a named session, the same in every process: what was completed goes on in the next part."""
    return CONVERSATION_PREFIX + blake2b(f"{part}/{name}".encode(), digest_size=CONVERSATION_DIGITS // 2).hexdigest()


def check_session_name(name: str) -> str:
    """A session's name from a header; `InvalidInput` where it cannot be one."""
    if not 1 <= len(name) <= MAX_SESSION_NAME or not name.isascii() or not name.isprintable() or name != name.strip():
        raise InvalidInput(
            f"x-headrace-session is {shown(name)}; it must be 1 to {MAX_SESSION_NAME} printable ASCII characters"
        )
    return name


def new_call_id(uid: str, unique: str) -> str:
    """The id of a new call of a conversation; `unique` makes it one."""
    return uid[-CONVERSATION_DIGITS:] + unique[:CALL_DIGITS]


def call_in(response_id: str) -> str | None:
    """The call that a response id names; None where no call of a live service has such an id."""
    found = _RESPONSE.fullmatch(response_id)
    return None if found is None else found[1]


def conversation_of(call: str) -> str:
    """The conversation of a call."""
    return CONVERSATION_PREFIX + call[:CONVERSATION_DIGITS]


def is_live(held: str) -> bool:
    """Whether the pool's name of a trajectory is a conversation's."""
    return _UID.fullmatch(held) is not None


def tenant_prefix(held: str) -> str:
    """What stands in front of a conversation's own name: its tenant's."""
    return held[: -len(CONVERSATION_PREFIX) - CONVERSATION_DIGITS]


class IndexedAnswer(msgspec.Struct, gc=False):
    """An answer that the conversation `uid` gave. `strict` tells it from others that look alike; `continued`: a call
    went on from it."""

    uid: str
    strict: bytes
    continued: bool = False


class AnswerMatch(msgspec.Struct, frozen=True):
    """An answer that a request contains. `last`: no other answer follows it there; `alike`: the conversations that gave
    it, at least in these words."""

    answer: IndexedAnswer
    last: bool
    alike: tuple[str, ...]


class AnswerIndex:
    """Answers by the digest of everything up to them; the conversations that were quiet longest are dropped first."""

    def __init__(self, most: int = MAX_ANSWERS) -> None:
        self._most = most
        self._by_key: dict[bytes, list[IndexedAnswer]] = {}
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
        given = IndexedAnswer(uid, exact, continued)
        for scoped in (_scoped(scope, digest) for digest in (key, named) if digest):
            alike = self._by_key.setdefault(scoped, [])
            if any(answer.uid == uid and answer.strict == exact for answer in alike):
                continue
            alike.append(given)
            if len(alike) > MAX_ALIKE:
                del alike[0]
                self._count -= 1
            self._keys.setdefault(uid, []).append(scoped)
            self._keys.move_to_end(uid)
            self._count += 1
        while self._count > self._most and len(self._keys) > 1:
            self.drop(next(iter(self._keys)))

    def find(self, scope: str, request: Conversation) -> AnswerMatch | None:
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
                return AnswerMatch(meant, last, tuple(answer.uid for answer in found))
            last = False
        return None

    def find_text(self, scope: str, keys: Iterable[bytes]) -> AnswerMatch | None:
        """The longest text that one of the conversations gave; `keys` are those of a prompt's beginnings."""
        for key in keys:
            found = self._by_key.get(_scoped(scope, key))
            if found:
                return AnswerMatch(_meant(found, b""), True, tuple(answer.uid for answer in found))
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


def _meant(found: list[IndexedAnswer], exact: bytes) -> IndexedAnswer:
    alike = [answer for answer in found if answer.strict == exact] or found
    return next((answer for answer in reversed(alike) if not answer.continued), alike[-1])


class TextIndex:
    """Which beginnings of a prompt may be texts that were given before; those used longest ago are dropped first."""

    def __init__(self, most: int = MAX_TEXTS) -> None:
        self._most = most
        self._tails: OrderedDict[tuple[str, bytes], set[int]] = OrderedDict()

    def add(self, scope: str, key: TextKey) -> None:
        """Enters a text, within `scope`: others never find it."""
        at = (scope, bytes.fromhex(key.anchor))
        self._tails.setdefault(at, set()).add(key.tail)
        self._tails.move_to_end(at)
        if len(self._tails) > self._most:
            self._tails.popitem(last=False)

    def known(self, scope: str, prompt: str) -> Iterator[bytes]:
        """The digests of a prompt's beginnings that may have been given, the longest first."""
        data = prompt.encode("utf-8", "surrogatepass")
        hasher = blake2b(digest_size=DIGEST_BYTES)
        places = []
        for start in range(0, len(data) + 1, CHUNK_BYTES):
            tails = self._tails.get((scope, hasher.digest()))
            if tails:
                places.append((start, hasher.copy(), tails))
            hasher.update(data[start : start + CHUNK_BYTES])
        for start, before, tails in reversed(places):
            for tail in sorted(tails, reverse=True):
                if start + tail <= len(data):
                    whole = before.copy()
                    whole.update(data[start : start + tail])
                    yield whole.digest()
