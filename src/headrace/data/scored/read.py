"""A posted body as groups that are ready to be kept: validated, with all fourteen fields, as pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
from crc32c import crc32c
from msgspec import Raw, Struct

from headrace.data.errors import InvalidInput
from headrace.data.scored.piece import Piece, ScoredGroup, deflate
from headrace.data.scored.rows import Lengths
from headrace.data.scored.values import (
    MAX_DEPTH,
    STRING,
    as_float,
    as_int,
    check_other,
    map_nested,
    parse_json,
    plain_floats,
    plain_ints,
)

#: Numbers by how deep they are nested; these can be long, and are served as they came where that is possible.
_INTS = {"tokens": 2, "masks": 2, "distill_token_ids": 3}
_FLOATS = {"scores": 1, "advantages": 2, "ref_logprobs": 2, "inference_logprobs": 2, "distill_logprobs": 3}
#: Fields that every group must have.
_REQUIRED = ("tokens", "masks", "scores")

_ABSENT = Raw(b"")


class _Fields(Struct, gc=False):
    """The fourteen fields in the order in which they are served, each as its text in the body. Unknown ones are read
    over."""

    tokens: Raw = _ABSENT
    masks: Raw = _ABSENT
    scores: Raw = _ABSENT
    advantages: Raw = _ABSENT
    ref_logprobs: Raw = _ABSENT
    messages: Raw = _ABSENT
    generation_params: Raw = _ABSENT
    inference_logprobs: Raw = _ABSENT
    overrides: Raw = _ABSENT
    group_overrides: Raw = _ABSENT
    images: Raw = _ABSENT
    env_id: Raw = _ABSENT
    distill_token_ids: Raw = _ABSENT
    distill_logprobs: Raw = _ABSENT


KEYS: tuple[str, ...] = _Fields.__struct_fields__

_NULL = b"null"
_NO_VALUE = Raw(_NULL)
_GROUP: msgspec.json.Decoder[_Fields] = msgspec.json.Decoder(_Fields)
_GROUPS: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
#: NaN and infinities as Python writes them, outside of strings.
_NOT_A_NUMBER = re.compile(rb"(%b)|-?\b(?:NaN|Infinity)\b" % STRING, re.DOTALL)
#: JSON that every parser reads as infinity.
_INFINITY = b"1e999"

_MAX_ENV_ID = 2**63 - 1
#: Sequences of a group that has to be looked through value by value: more of them are taken for an attack.
_MAX_SEQUENCES = 100_000


#: Makes a piece of a group's JSON: `deflate` or `store`.
MakePiece = Callable[[bytes], Piece]


def read_group(body: bytes, make_piece: MakePiece = deflate) -> ScoredGroup:
    """The group in a JSON body; `InvalidInput` names the field that is missing or wrong."""
    return _group(_decode(_GROUP, body, "a group"), make_piece)


def read_groups(body: bytes, make_piece: MakePiece = deflate) -> list[ScoredGroup]:
    """All groups of a JSON array, or none: an error names the group too."""
    found = []
    for n, text in enumerate(_decode(_GROUPS, body, "groups")):
        try:
            found.append(read_group(bytes(text), make_piece))
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
        raise InvalidInput(f"the body is nested more than {MAX_DEPTH} deep") from None


def _group(fields: _Fields, make_piece: MakePiece) -> ScoredGroup:
    texts: dict[str, bytes] = {}
    found: dict[str, Any] = {}  # lengths or values of the fields that hold numbers
    env_id = None
    for key in _REQUIRED:
        if getattr(fields, key) in (_ABSENT, _NO_VALUE):
            raise InvalidInput(f"{key} is missing; a group has tokens, masks and scores")
    for key in KEYS:
        text = bytes(getattr(fields, key)) or _NULL
        if text != _NULL:
            if key in _INTS or key in _FLOATS:
                text, found[key] = _numbers(key, text)
            elif key == "env_id":
                env_id = _env_id(text)
                text = b"%d" % env_id
            else:
                check_other(key, parse_json(text, key))
        texts[key] = text
    sequences = _count(found["tokens"], found["masks"], found["scores"])
    text = _LAYOUT % tuple(texts.values())
    piece = make_piece(text)
    return ScoredGroup(piece, sequences, env_id, f"{piece.size:x}-{piece.crc:08x}-{crc32c(text):08x}")


#: A group's object, with a place for every field's text.
_LAYOUT = b"{" + b",".join(b'"%b":%%b' % key.encode() for key in KEYS) + b"}"


def _numbers(key: str, text: bytes) -> tuple[bytes, Any]:
    """The field as it is served, and the lengths of its lists (a tuple) where it is plain, else its values."""
    depth = _INTS.get(key) or _FLOATS[key]
    lengths = plain_ints(text, depth) if key in _INTS else plain_floats(text, depth)
    if lengths is not None:
        return text, lengths
    if depth == 2 and text.count(b"[") > _MAX_SEQUENCES:
        raise InvalidInput(f"{key} has more than {_MAX_SEQUENCES} lists; a group has fewer sequences")
    one = as_int if key in _INTS else as_float
    values = map_nested(parse_json(text, key), depth, one, key)
    return json.dumps(values, separators=(",", ":")).encode(), values


def _env_id(text: bytes) -> int:
    env_id = as_int(parse_json(text, "env_id"), "env_id")
    if abs(env_id) > _MAX_ENV_ID:
        raise InvalidInput(f"env_id is {env_id}, which is out of range")
    return env_id


def _count(tokens: Any, masks: Any, scores: Any) -> int:
    """How many sequences there are: as many lists of tokens as of masks, each pair equally long, and as many scores."""
    scored = scores[0] if isinstance(scores, tuple) else len(scores)
    long, masked = _lengths(tokens), _lengths(masks)
    if long == masked and len(long) == scored > 0:
        return len(long)
    if not long:
        raise InvalidInput("tokens is empty; a group has at least one sequence")
    for name, found in (("masks", len(masked)), ("scores", scored)):
        if found != len(long):
            raise InvalidInput(
                f"{name} has {found} entries for {len(long)} sequences of tokens; there must be one each"
            )
    n = next(n for n, (wanted, found) in enumerate(zip(long, masked, strict=True)) if wanted != found)
    raise InvalidInput(f"masks[{n}] has {masked[n]} entries for {long[n]} tokens; there must be one each")


def _lengths(rows: Any) -> Lengths:
    """How long each list is, of lengths that are known or of the lists."""
    return rows if isinstance(rows, tuple) else tuple(map(len, rows))
