"""What a live service's conversations and answers are called.

A call's id begins with its conversation's, so that whoever holds a response id can be told its step by any gateway,
whatever happened since.
"""

from __future__ import annotations

import re
import secrets
from hashlib import blake2b

from headrace.data.errors import InvalidInput, shown

PREFIX = "live-"
#: Hexadecimal digits of a conversation's own, and those that a call adds.
OWN, ADDED = 24, 16
#: The longest name that a client may give a session.
MAX_NAME = 256

_UID = re.compile(rf"(?:.*/)?{PREFIX}[0-9a-f]{{{OWN}}}", re.DOTALL)
_RESPONSE = re.compile(rf"(?:chatcmpl-|cmpl-|resp_|msg_|req_)?([0-9a-f]{{{OWN + ADDED}}}(?:-[0-9]{{1,6}})?)")


def new_uid() -> str:
    return PREFIX + secrets.token_hex(OWN // 2)


def session_uid(name: str, part: int) -> str:
    """The same in every process: what was completed goes on in the next part."""
    return PREFIX + blake2b(f"{part}/{name}".encode(), digest_size=OWN // 2).hexdigest()


def check_name(name: str) -> str:
    """A session's name, from a header."""
    if not 1 <= len(name) <= MAX_NAME or not name.isascii() or not name.isprintable() or name != name.strip():
        raise InvalidInput(
            f"x-headrace-session is {shown(name)}; it must be 1 to {MAX_NAME} printable ASCII characters"
        )
    return name


def call_of(uid: str, unique: str) -> str:
    """The id of a call of a conversation."""
    return uid[-OWN:] + unique[:ADDED]


def call_in(response_id: str) -> str | None:
    """The call that a response id names; None where no call of a live service has such an id."""
    found = _RESPONSE.fullmatch(response_id)
    return None if found is None else found[1]


def uid_of(call: str) -> str:
    """The conversation of a call."""
    return PREFIX + call[:OWN]


def is_live(held: str) -> bool:
    """Whether the pool's name of a trajectory is a conversation's."""
    return _UID.fullmatch(held) is not None


def scope_of(held: str) -> str:
    """What stands in front of a conversation's own name: its tenant's."""
    return held[: -len(PREFIX) - OWN]
