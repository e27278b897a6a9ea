"""How tests are shared out and tables thinned: by names that the tests have, so that a renamed one is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cached import made_once
from tests.matrix import crossed, paired
from tests.schedule import APART, OWN_VLLM, VLLM, share_of

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("test", "share"),
    [
        ("tests/pool/test_wire.py::test_it[http]", "tests/pool/test_wire.py"),
        ("tests/pool/test_conformance_fetch.py::test_it[ray]", "ray"),
        ("tests/trainer/test_arrays.py::test_it", "tests/trainer/test_arrays.py"),
        ("tests/demo/test_run.py::test_it[one]", "tests/demo/test_run.py::test_it[one]"),
        ("tests/vllm/test_chat.py::test_it", VLLM),
        ("tests/vllm/test_lora.py::test_it", "tests/vllm/test_lora.py"),
    ],
)
def test_a_test_is_of_one_share(test: str, share: str) -> None:
    assert share_of(test) == share


@pytest.mark.parametrize("place", [*APART, *OWN_VLLM])
def test_what_the_shares_name_is_there(place: str) -> None:
    path, _, name = place.partition("::")
    assert f"def {name}" in (ROOT / path).read_text()


def test_a_crossed_table_has_every_value_and_in_the_long_tier_every_combination() -> None:
    rows = crossed([1, 2, 3], ["a", "b"])
    assert [row.values for row in rows] == [(1, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "a"), (3, "b")]
    assert [row.values for row in rows if not row.marks] == [(1, "a"), (1, "b"), (2, "a"), (3, "a")]


def test_a_paired_table_keeps_what_stands_at_the_same_place() -> None:
    rows = paired([1, 2], ["a", "b"])
    assert [row.values for row in rows] == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert [row.values for row in rows if not row.marks] == [(1, "a"), (2, "b")]


def test_what_is_made_once_is_found_again_and_begun_anew_where_it_failed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(f"no room in {folder}")

    with pytest.raises(OSError, match="no room"):
        made_once(tmp_path_factory, "test-of-once", fail)
    found = made_once(tmp_path_factory, "test-of-once", lambda folder: (folder / "made").touch())
    assert made_once(tmp_path_factory, "test-of-once", fail) == found
    assert [path.name for path in found.iterdir()] == ["made"]
