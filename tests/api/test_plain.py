"""Groups for a trainer that takes plain JSON are kept as they came, for as long as few of them wait."""

from __future__ import annotations

import pytest
from tests.data.scored.groups import body, large

from headrace.api import plain_allowance
from headrace.api.plain_allowance import PlainAllowance
from headrace.data.scored import deflate, inflate, read_group, store

TEXT = inflate(read_group(body(large(1))).piece)


@pytest.fixture
def allowance(monkeypatch: pytest.MonkeyPatch) -> PlainAllowance:
    monkeypatch.setattr(plain_allowance, "PLAIN_BYTES", 4 * len(TEXT))
    return PlainAllowance()


def stored(allowance: PlainAllowance, groups: int) -> int:
    """How many of so many groups are stored; the others are compressed."""
    pieces = [allowance.make_piece(TEXT) for _ in range(groups)]
    assert all(piece in (store(TEXT), deflate(TEXT)) for piece in pieces)
    return pieces.count(store(TEXT))


def test_nothing_is_stored_before_a_trainer_asked_for_plain_json(allowance: PlainAllowance) -> None:
    assert stored(allowance, 2) == 0


def test_groups_are_stored_up_to_the_allowance_and_then_compressed(allowance: PlainAllowance) -> None:
    allowance.renew(0)
    assert stored(allowance, 6) == 4


@pytest.mark.parametrize(("queued", "wanted"), [(4, 4), (5, 0)])
def test_it_is_renewed_while_the_queue_is_short(allowance: PlainAllowance, queued: int, wanted: int) -> None:
    allowance.renew(0)
    stored(allowance, 3)
    assert allowance.is_low
    allowance.renew(queued)
    assert stored(allowance, 6) == wanted


def test_it_ends_when_the_trainer_takes_gzip(allowance: PlainAllowance) -> None:
    allowance.renew(0)
    allowance.end()
    assert stored(allowance, 2) == 0


def test_a_group_is_known_again_however_it_was_packed() -> None:
    sent = body(large(1))
    assert read_group(sent, store).digest == read_group(sent, deflate).digest != read_group(body(large(2))).digest
