"""Deciding on a post: which groups are new, and which were sent before. All or nothing, and nothing is changed yet."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.data.block import Block
from headrace.data.errors import InvalidInput
from headrace.data.scored.piece import Piece
from headrace.pool.desk import facts as f
from headrace.pool.desk.desk import Desk, key_of
from headrace.pool.desk.types import Posted, Posting, check_posting, checked
from headrace.pool.operation import Plan
from headrace.pool.state import State


def post(state: State, now: float, given: Any, request: str) -> Plan:
    """Takes all the groups, or none. `request` tells groups without a key apart from those of another call."""
    desk = state.desk
    postings = [one if type(one) is Posting else _converted(one, at) for at, one in enumerate(given)]
    _check_size(state, postings)
    places: list[int | Posted] = []  # of each posting's answer: among the new ones, or known already
    fresh: dict[str, int] = {}
    taken: list[tuple[f.Entry, Piece]] = []
    for at, posting in enumerate(postings):
        key = posting.key or (f"{request}/{at}" if request else "")
        if key:
            known = desk.seen(posting.env_id, key) or fresh.get(key_of(posting.env_id, key))
            if known is not None:
                places.append(known)
                continue
            fresh[key_of(posting.env_id, key)] = len(taken)
        places.append(len(taken))
        piece = posting.piece
        number = desk.next_number + len(taken)
        taken.append((f.Entry(number, piece.size, piece.crc, posting.sequences, posting.env_id, key), piece))
    desk.duplicates += len(postings) - len(taken)
    if not taken:
        for posting in postings:
            desk.hear(posting.env_id, now)
        return Plan(reply=places)
    desk.shelf.stage([(entry.number, piece) for entry, piece in taken])
    block = Block([], b"", b"", {f.blob_name(entry.number): piece.data for entry, piece in taken})
    fact = f.Posted("", now, tuple(entry for entry, _ in taken))
    return Plan([fact], block, after=lambda: _answers(desk, places, taken[0][0].number))


def forget(state: State, now: float, given: Any) -> Plan:
    """Forgets keys, where they are known."""
    keys = checked(given, list[tuple[int | None, str]], "keys")
    known = tuple((env, key) for env, key in keys if state.desk.seen(env, key) is not None)
    return Plan([f.Forgot("", now, known)] if known else [])


def _answers(desk: Desk, places: list[int | Posted], first: int) -> list[Posted]:
    """The answer to each posting, of which the new ones are the groups from the number `first` on."""
    unservable = desk.unservable()
    answers: list[Posted] = []
    given: set[int] = set()
    for place in places:
        if isinstance(place, Posted):
            answers.append(place)
        else:
            why = unservable.get(first + place)
            misfit = why.reason if why is not None else ""
            answers.append(msgspec.structs.replace(desk.answers[place], duplicate=place in given, misfit=misfit))
            given.add(place)
    return answers


def _converted(one: Any, at: int) -> Posting:
    """A group that comes from another process."""
    try:
        posting = msgspec.convert(one, Posting)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"group {at}: {error}") from None
    check_posting(posting, at)
    return posting


def _check_size(state: State, postings: list[Posting]) -> None:
    size, most = sum(len(posting.piece.data) for posting in postings), state.limits.max_submit_mb
    if size > most * 1e6:
        raise InvalidInput(f"groups of {size / 1e6:.1f} MB at once; at most {most} MB are taken: send them in parts")
