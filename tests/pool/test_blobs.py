"""Blobs are kept once for all that refer to them, and as long as something does: in memory and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pool.kit import drain, fetched, step

from headrace import DataPool, Step

IMAGE = bytes(range(256)) * 400  # 100 kB


def seen(uid: str, **fields: Any) -> Step:
    return step(uid, last=True, multi_modal_data={"image": IMAGE}, **fields)


def copies(journal: Path) -> int:
    return sum(file.read_bytes().count(IMAGE) for file in journal.iterdir())


def images(pool: DataPool) -> list[bytes]:
    return [found.multi_modal_data["image"] for found in fetched(pool, len(pool.list_groups()["items"])).steps]


def test_a_blob_that_many_steps_share_is_written_once(tmp_path: Path) -> None:
    with DataPool(tmp_path, durability="os") as pool:
        for i in range(10):
            pool.submit_step(seen(f"t{i}"))
        assert copies(tmp_path) == 1
    with DataPool(tmp_path, durability="os") as pool:
        assert images(pool) == [IMAGE] * 10


def test_a_blob_that_only_a_consumer_still_holds_is_written_again(tmp_path: Path) -> None:
    """Else a recovery, which knows no consumers, would miss it."""
    pool = DataPool(tmp_path, durability="os")
    pool.submit_step(seen("t"))
    held = fetched(pool)
    pool.compact()
    pool.submit_step(seen("u"))
    pool.close()
    assert held.steps[0].multi_modal_data["image"] == IMAGE
    with DataPool(tmp_path, durability="os") as again:
        (found,) = fetched(again).steps
        assert found.quarantined is None
        assert found.multi_modal_data == {"image": IMAGE}


def test_what_a_retry_says_otherwise_at_length_does_not_take_the_place_of_what_is_there() -> None:
    said = {"scored_group": True, "advantages": [0.5] * 20_000}
    with DataPool() as pool:
        pool.submit_step(step(metadata=said, last=True))
        again = pool.submit_step(step(metadata={**said, "advantages": [1.0] * 20_000, "tried": 2}, last=True))
        assert again.duplicates == 1
        [found] = fetched(pool).steps
        assert found.metadata == {**said, "tried": 2}


def test_a_blob_outlives_the_step_that_brought_it(tmp_path: Path) -> None:
    pool = DataPool(tmp_path, durability="os")
    pool.submit_steps([seen("t"), seen("u")])
    pool.fetch_batch(1, timeout=0)
    pool.compact()
    pool.close()
    with DataPool(tmp_path, durability="os") as again:
        assert images(again) == [IMAGE]


def test_a_blob_goes_with_the_last_step_that_refers_to_it(tmp_path: Path) -> None:
    with DataPool(tmp_path, durability="os") as pool:
        pool.submit_steps([seen("t"), seen("u")])
        drain(pool)
        pool.compact()
        assert copies(tmp_path) == 0
