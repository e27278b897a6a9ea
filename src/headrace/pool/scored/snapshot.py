"""Scored groups in a snapshot: one record without the groups' bytes, then these, a few groups a record."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping

import msgspec

from headrace.data.block import BlockHeader
from headrace.data.frame import Buffer
from headrace.data.scored.piece import Piece
from headrace.pool.scored.batching import Batching
from headrace.pool.scored.facts import PiecesImage, PostedGroup, ScoredImage, blob_name
from headrace.pool.scored.groups import BatchLease, ScoredGroups
from headrace.pool.scored.piece_store import StoredPiece, load, stored_bytes

#: Bytes and groups of one record, so that none is much larger than a post's.
RECORD_BYTES = 4_000_000
RECORD_GROUPS = 256

Image = tuple[ScoredImage | PiecesImage, BlockHeader | None, Callable[[], list[Buffer]]]


def freeze(scored: ScoredGroups, cursor: int, now: float) -> Callable[[], Iterator[Image]]:
    """Facts that rebuild the scored groups as they are now, each with the bytes that go with it, read when they are
    written. They are made when they are asked for, whatever has happened to the groups by then."""
    if scored.untouched:
        return lambda: iter(())
    image, batching, latest = _image(scored, cursor, now), scored.batching.frozen(), scored.latest
    numbers, pieces = scored.batching.numbers_in_no_order(), scored.pieces.frozen()

    def images() -> Iterator[Image]:
        piece = load(latest) if latest is not None else None
        about_latest = None if piece is None else (piece.data, piece.size, piece.crc)
        yield msgspec.structs.replace(image, batching=batching(), latest=about_latest), None, list
        yield from _all_pieces(sorted(numbers), pieces, now)

    return images


def _all_pieces(numbers: list[int], pieces: Mapping[int, StoredPiece], now: float) -> Iterator[Image]:
    some: list[tuple[int, StoredPiece]] = []
    size = 0
    for number in numbers:
        stored = pieces[number]
        some.append((number, stored))
        size += stored_bytes(stored)
        if size >= RECORD_BYTES or len(some) == RECORD_GROUPS:
            yield _pieces(some, now)
            some, size = [], 0
    if some:
        yield _pieces(some, now)


def _pieces(some: list[tuple[int, StoredPiece]], now: float) -> Image:
    fact = PiecesImage("", now, tuple(PostedGroup(number, stored.size, stored.crc) for number, stored in some))
    header = BlockHeader([], 0, 0, [(blob_name(number), stored_bytes(stored)) for number, stored in some])
    return fact, header, lambda: [load(stored).data for _, stored in some]


def _image(scored: ScoredGroups, cursor: int, now: float) -> ScoredImage:
    """All but the groups in line and the latest one's bytes."""
    leases = [(one.id, one.deadline, one.request, one.groups, one.counted) for one in scored.leases.values()]
    return ScoredImage(
        "",
        now,
        registration=scored.registration,
        uuids=tuple(scored.uuids),
        started=scored.started,
        step=scored.step,
        environments=tuple(scored.environments.items()),
        joined=tuple(scored.joined.items()),
        heard=(*scored.silent.items(), *scored.heard.items()),
        leases=tuple(leases),
        ended=tuple(scored.ended.items()),
        returned=tuple(scored.returned.items()),
        repeated=tuple(sorted(scored.repeated)),
        keys=tuple(scored.keys.items()),
        counts=dict(scored.counts),
        dead=dict(scored.dead),
        misfits=dict(scored.misfits),
        condemned=tuple(sorted(scored.condemned)),
        in_vain=tuple(scored.unservable_sequences.items()),
        misfit=scored.misfit,
        serving=scored.serving,
        next_number=scored.next_number,
        next_lease=scored.next_lease,
        cursor=cursor,
        training_ended=scored.training_ended,
        by_fetch=scored.by_fetch,
        fetched=tuple(scored.fetched),
        made_of=tuple(scored.made_of.items()),
        latest_of=scored.latest_of,
    )


def restore(scored: ScoredGroups, image: ScoredImage) -> None:
    """Fills scored groups that nothing happened to from an image; their bytes follow in `PiecesImage`s."""
    scored.registration, scored.started, scored.step = image.registration, image.started, image.step
    scored.training_ended, scored.by_fetch = image.training_ended, image.by_fetch
    scored.fetched = dict.fromkeys(image.fetched)
    scored.uuids = OrderedDict.fromkeys(image.uuids)
    scored.environments = dict(image.environments)
    scored.names = Counter(registration.desired_name for registration, _ in scored.environments.values())
    scored.joined = OrderedDict(image.joined)
    scored.batching = Batching.restored(image.batching)
    for env, heard in image.heard:
        silent = scored.batching.is_silent(env)
        (scored.silent if silent else scored.heard)[env] = heard
    scored.ended, scored.keys = OrderedDict(image.ended), OrderedDict(image.keys)
    scored.returned, scored.repeated = OrderedDict(image.returned), set(image.repeated)
    scored.counts, scored.dead = Counter(image.counts), Counter(image.dead)
    scored.misfits = Counter(image.misfits)
    scored.condemned, scored.unservable_sequences, scored.misfit = (
        set(image.condemned),
        dict(image.in_vain),
        image.misfit,
    )
    scored.latest = Piece(*image.latest) if image.latest is not None else None
    scored.made_of, scored.latest_of = dict(image.made_of), image.latest_of
    scored.serving = image.serving
    scored.next_number, scored.next_lease = image.next_number, image.next_lease
    for lease in image.leases:
        scored.restore_lease(BatchLease(*lease))
    scored.unchecked = True
