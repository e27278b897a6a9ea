"""A journal of which any one record is lost: what a repair leaves keeps the rules, and can be used up."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from tests.pool.journal.kit import check_rules, flip, frames

from headrace import DataPool, Step
from headrace.pool.config import Limits
from headrace.pool.journal.repair import repair

#: What all images are: where the record with its bytes is lost, steps in others have lost it too.
IMAGE = {"image": b"cat" * 50}


class Story:
    """A pool that random calls were made to, then closed. `now` is its clock."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.now = folder, 1000.0
        self._random = random.Random(seed)
        chance = self._random.choice
        self._options = {
            "durability": "os",
            "limits": Limits(memory_mb=chance([0, 64])),
            "defaults": {
                "n_rollouts": 2,
                "history_size": chance([0, 2]),
                "replies_kept": chance([0, 4]),
                "group_timeout_s": chance([None, 30.0]),
                "on_timeout": chance(["drop", "partial"]),
            },
        }
        calls = [self._submit, self._submit, self._fetch, self._fetch, DataPool.compact, self._wait]
        with self.opened(folder) as pool:
            for number in range(self._random.randrange(6, 30)):
                self._number = number
                chance(calls)(pool)

    def opened(self, folder: Path) -> DataPool:
        return DataPool(folder, clock=lambda: self.now, **self._options)

    def _submit(self, pool: DataPool) -> None:
        """A group, which may have a rollout too many."""
        prompt, chance = f"p{self._number}", self._random.choice
        turns, reward, image = chance([1, 2, 3]), chance([None, 1.0]), chance([None, IMAGE])
        pool.submit_steps(
            [
                Step(
                    prompt_ids=list(range(4 * turn + 2)),
                    response_ids=[7, 8],
                    trajectory_uid=f"{prompt}/{rollout}",
                    prompt_uid=prompt,
                    step_index=turn,
                    is_last=turn == turns - 1,
                    reward=reward,
                    multi_modal_data=image,
                )
                for rollout in range(chance([1, 2, 3]))
                for turn in range(turns)
            ]
        )

    def _fetch(self, pool: DataPool) -> None:
        chance = self._random.choice
        pool.fetch_batch(chance([1, 2]), unit=chance(["group", "step"]), lease_s=chance([None, 20.0]), timeout=0)

    def _wait(self, pool: DataPool) -> None:
        self.now += self._random.choice([1.0, 25.0])


def test_a_step_that_lost_its_image_is_quarantined_whatever_was_said_of_it_later(tmp_path: Path) -> None:
    given = {"prompt_ids": [1], "response_ids": [2], "step_index": 0, "is_last": True, "multi_modal_data": IMAGE}
    with DataPool(tmp_path / "pool", durability="os") as pool:
        for uid in ("first", "second"):
            pool.submit_steps([Step(**given, trajectory_uid=uid, prompt_uid=uid)])
        pool.curate("second", 0, tags=["seen"])
        pool.reward("second", 1.0, info={"why": "right"})
    (path,) = (tmp_path / "pool").glob("0*")
    lost = []
    for start in [start for start, _ in frames(path)]:
        holed = tmp_path / f"holed-{start}"
        shutil.copytree(tmp_path / "pool", holed)
        flip(holed / path.name, start + 30)
        repair(holed)
        with DataPool(holed) as pool:
            check_rules(pool._state)
            lost.append(pool._state.channels["train"].ledger.quarantined)
    assert sorted(lost)[-2:] == [0, 1]


@pytest.mark.parametrize("stories", [12, pytest.param(300, marks=pytest.mark.long)])
def test_whichever_record_is_lost_what_a_repair_leaves_keeps_the_rules(tmp_path: Path, stories: int) -> None:
    for seed in range(stories):
        folder, holed = tmp_path / f"story-{seed}", tmp_path / "holed"
        story = Story(folder, seed)
        places = [(path.name, start) for path in sorted(folder.glob("0*")) for start, _ in frames(path)]
        for name, start in places:
            shutil.copytree(folder, holed)
            flip(holed / name, start + 30)
            repair(holed)
            with story.opened(holed) as pool:
                check_rules(pool._state)
                while pool.fetch_batch(1, 1, unit="step", timeout=0) is not None:
                    check_rules(pool._state)
            shutil.rmtree(holed)
        shutil.rmtree(folder)
