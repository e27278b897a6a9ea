"""The desk in a snapshot: one record without the groups' bytes, then these, a few groups a record."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from headrace.data.block import BlockHeader
from headrace.data.frame import Buffer
from headrace.data.scored.piece import Piece
from headrace.pool.desk.batching import Batching
from headrace.pool.desk.desk import Desk, Lease
from headrace.pool.desk.facts import DeskImage, Entry, PiecesImage, blob_name
from headrace.pool.desk.shelf import Held, whole

#: Bytes and groups a record.
RECORD_BYTES = 4_000_000
RECORD_GROUPS = 256

Image = tuple[DeskImage | PiecesImage, BlockHeader | None, Callable[[], list[Buffer]]]


def capture(desk: Desk, cursor: int, now: float) -> Iterator[Image]:
    """Facts that rebuild the desk, each with the bytes that go with it, read when they are written."""
    if desk.untouched:
        return
    yield _image(desk, cursor, now), None, list
    some: list[tuple[int, Held]] = []
    size = 0
    for number in desk.batching.numbers():
        held = desk.shelf.held(number)
        some.append((number, held))
        size += _length(held)
        if size >= RECORD_BYTES or len(some) == RECORD_GROUPS:
            yield _pieces(some, now)
            some, size = [], 0
    if some:
        yield _pieces(some, now)


def _pieces(some: list[tuple[int, Held]], now: float) -> Image:
    fact = PiecesImage("", now, tuple(Entry(number, held.size, held.crc) for number, held in some))
    header = BlockHeader([], 0, 0, [(blob_name(number), _length(held)) for number, held in some])
    return fact, header, lambda: [whole(held).data for _, held in some]


def _length(held: Held) -> int:
    return len(held.data) if isinstance(held, Piece) else held.length


def _image(desk: Desk, cursor: int, now: float) -> DeskImage:
    latest = whole(desk.latest) if desk.latest is not None else None
    leases = [(one.id, one.deadline, one.request, one.groups, one.counted) for one in desk.leases.values()]
    return DeskImage(
        "",
        now,
        registration=desk.registration,
        uuids=tuple(desk.uuids),
        started=desk.started,
        step=desk.step,
        environments=tuple(desk.environments.items()),
        joined=tuple(desk.joined.items()),
        heard=(*desk.silent.items(), *desk.heard.items()),
        batching=desk.batching.state(),
        leases=tuple(leases),
        ended=tuple(desk.ended.items()),
        returned=tuple(desk.returned.items()),
        repeated=tuple(sorted(desk.repeated)),
        keys=tuple(desk.keys.items()),
        counts=dict(desk.counts),
        dead=dict(desk.dead),
        misfits=dict(desk.misfits),
        condemned=tuple(sorted(desk.condemned)),
        in_vain=tuple(desk.in_vain.items()),
        misfit=desk.misfit,
        latest=None if latest is None else (latest.data, latest.size, latest.crc),
        serving=desk.serving,
        next_number=desk.next_number,
        next_lease=desk.next_lease,
        cursor=cursor,
    )


def restore(desk: Desk, image: DeskImage) -> None:
    desk.registration, desk.started, desk.step = image.registration, image.started, image.step
    desk.uuids = OrderedDict.fromkeys(image.uuids)
    desk.environments = dict(image.environments)
    desk.names = Counter(registration.desired_name for registration, _ in desk.environments.values())
    desk.joined = OrderedDict(image.joined)
    desk.batching = Batching.restored(image.batching)
    for env, heard in image.heard:
        silent = desk.batching.is_silent(env)
        (desk.silent if silent else desk.heard)[env] = heard
    desk.ended, desk.keys = OrderedDict(image.ended), OrderedDict(image.keys)
    desk.returned, desk.repeated = OrderedDict(image.returned), set(image.repeated)
    desk.counts, desk.dead = Counter(image.counts), Counter(image.dead)
    desk.misfits = Counter(image.misfits)
    desk.condemned, desk.in_vain, desk.misfit = set(image.condemned), dict(image.in_vain), image.misfit
    desk.latest = Piece(*image.latest) if image.latest is not None else None
    desk.serving = image.serving
    desk.next_number, desk.next_lease = image.next_number, image.next_lease
    for lease in image.leases:
        desk.restore_lease(Lease(*lease))
    desk.dubious = True
