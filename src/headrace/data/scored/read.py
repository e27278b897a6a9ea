"""A posted body as groups that are ready to be kept: validated, with all fourteen keys, compressed."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from msgspec import Raw

from headrace.data.errors import InvalidInput
from headrace.data.scored import lenient, plain
from headrace.data.scored.fields import ABSENT, FLOATS, INTS, KEYS, REQUIRED, Fields
from headrace.data.scored.piece import ScoredGroup, deflate

_NULL = b"null"
_NO_VALUE = Raw(_NULL)
_GROUP: msgspec.json.Decoder[Fields] = msgspec.json.Decoder(Fields)
_GROUPS: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
#: What Python writes for numbers that are none, outside of strings.
_NOT_A_NUMBER = re.compile(rb"(%b)|-?\b(?:NaN|Infinity)\b" % lenient.STRING, re.DOTALL)
#: Read by everybody as infinity.
_INFINITY = b"1e999"

_MOST_ENV_ID = 2**63 - 1
#: Sequences of a group that has to be looked through value by value.
_MOST_ROWS = 100_000


def read_group(body: bytes) -> ScoredGroup:
    """The group that `body` is; `InvalidInput` names the field where it is none."""
    return _group(_decode(_GROUP, body, "a group"))


def read_groups(body: bytes) -> list[ScoredGroup]:
    """All groups of a JSON array, or none: an error names the group too."""
    found = []
    for n, text in enumerate(_decode(_GROUPS, body, "groups")):
        try:
            found.append(read_group(bytes(text)))
        except InvalidInput as error:
            raise InvalidInput(f"group {n}: {error}") from None
    return found


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes, what: str) -> Any:
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            # NaN is not JSON; as an infinity it is found again, in the field that holds it.
            return decoder.decode(_NOT_A_NUMBER.sub(lambda match: match[1] or _INFINITY, body))
    except msgspec.ValidationError as error:
        wanted = "an array of groups" if decoder is _GROUPS else "an object with tokens, masks and scores"
        raise InvalidInput(f"the body must be {wanted}: {error}") from None
    except msgspec.DecodeError as error:
        raise InvalidInput(f"the body is not JSON ({what} cannot be read from it): {error}") from None
    except RecursionError:
        raise InvalidInput(f"the body is nested more than {lenient.DEEPEST} deep") from None


def _group(fields: Fields) -> ScoredGroup:
    texts: dict[str, bytes] = {}
    shapes: dict[str, Any] = {}
    env_id = None
    for key in REQUIRED:
        if getattr(fields, key) in (ABSENT, _NO_VALUE):
            raise InvalidInput(f"{key} is missing; a group has tokens, masks and scores")
    for key in KEYS:
        text = bytes(getattr(fields, key)) or _NULL
        if text != _NULL:
            if key in INTS or key in FLOATS:
                text, shapes[key] = _numbers(key, text, shapes.get("tokens"))
            elif key == "env_id":
                env_id = _env_id(text)
                text = b"%d" % env_id
            else:
                lenient.check_other(key, lenient.parse(text, key))
        texts[key] = text
    sequences = _count(shapes["tokens"], shapes["masks"], shapes["scores"])
    return ScoredGroup(deflate(_LAYOUT % tuple(texts.values())), sequences, env_id)


#: A group's object, with a place for every field's text.
_LAYOUT = b"{" + b",".join(b'"%b":%%b' % key.encode() for key in KEYS) + b"}"


def _numbers(key: str, text: bytes, like: Any) -> tuple[bytes, Any]:
    """The field as it is served, and its shape (bytes) where it is plain, else its values.

    `like` is what was found of the tokens.
    """
    depth = INTS.get(key) or FLOATS[key]
    known = like if depth == INTS["tokens"] and isinstance(like, bytes) else None
    shape = plain.ints(text, depth, known) if key in INTS else plain.floats(text, depth, known)
    if shape is not None:
        return text, shape
    if depth == 2 and text.count(b"[") > _MOST_ROWS:
        raise InvalidInput(f"{key} has more than {_MOST_ROWS} lists; a group has fewer sequences")
    one = lenient.integer if key in INTS else lenient.number
    values = lenient.nested(lenient.parse(text, key), depth, one, key)
    return json.dumps(values, separators=(",", ":")).encode(), values


def _env_id(text: bytes) -> int:
    env_id = lenient.integer(lenient.parse(text, "env_id"), "env_id")
    if abs(env_id) > _MOST_ENV_ID:
        raise InvalidInput(f"env_id is {env_id}, which is out of range")
    return env_id


def _count(tokens: Any, masks: Any, scores: Any) -> int:
    """How many sequences there are: as many lists of tokens as of masks, each pair equally long, and as many scores."""
    scored = plain.numbers(scores) if isinstance(scores, bytes) else len(scores)
    if isinstance(tokens, bytes) and tokens == masks and plain.rows(tokens) == scored:
        return scored
    long, masked = _lengths(tokens), _lengths(masks)
    if not long:
        raise InvalidInput("tokens is empty; a group has at least one sequence")
    for name, found in (("masks", len(masked)), ("scores", scored)):
        if found != len(long):
            raise InvalidInput(
                f"{name} has {found} entries for {len(long)} sequences of tokens; there must be one each"
            )
    for n, (wanted, found) in enumerate(zip(long, masked, strict=True)):
        if wanted != found:
            raise InvalidInput(f"masks[{n}] has {found} entries for {wanted} tokens; there must be one each")
    return len(long)


def _lengths(rows: Any) -> list[int]:
    if isinstance(rows, bytes):
        return [row.count(b",") + 1 for row in rows[2:-2].split(b"],[")]
    return [len(row) for row in rows]
