"""Over each way in: a pool whose payloads lie in its journal answers as one that has them in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.pool.kit import fetched, group, ledger, prompts, step, trajectory

from headrace.pool.config import Limits
from headrace.pool.errors import Conflict, PoolFull

MakePool = Callable[..., Any]


@pytest.fixture
def small(make_pool: MakePool, tmp_path: Path) -> Any:
    """A pool that keeps no payload in memory."""
    return make_pool(journal=str(tmp_path / "pool"), durability="os", limits=Limits(memory_mb=0, max_channels=3))


def test_steps_come_back_as_they_were_sent(small: Any) -> None:
    sent = group("p", n=2, turns=3, multi_modal_data={"image": b"cat" * 50})
    small.configure("train", n_rollouts=2)
    small.submit_steps(sent)
    assert small.stats()["memory_bytes"] == 0
    assert small.stats()["in_journal_bytes"] > 0
    batch = fetched(small, lease_s=60)
    batch.nack()
    by_key = {(each.trajectory_uid, each.step_index): each for each in sent}
    for got in fetched(small).steps:
        given = by_key.pop((got.trajectory_uid, got.step_index))
        assert np.array_equal(got.prompt_ids, given.prompt_ids)
        assert np.array_equal(got.response_ids, given.response_ids)
        assert got.multi_modal_data == given.multi_modal_data
    assert not by_key
    assert ledger(small)["consumed"] == len(sent)


def test_a_trajectory_that_is_read_is_whole(small: Any) -> None:
    sent = trajectory("t", 4)
    for each in sent:
        small.submit_step(each)
    found = small.trajectory("t")
    assert [s.response_ids.tolist() for s in found.steps] == [s.response_ids.tolist() for s in sent]
    assert len(found.sequences()) == 1


def test_a_lost_answer_is_given_again(small: Any) -> None:
    small.submit_steps([*trajectory("a"), *trajectory("b")])
    first = fetched(small, 2, request_id="consumer/1")
    again = fetched(small, 2, request_id="consumer/1")
    assert prompts(first) == prompts(again) == ["a", "b"]
    assert np.array_equal(first.steps[1].response_ids, again.steps[1].response_ids)


def test_a_retry_is_told_from_other_content(small: Any) -> None:
    small.submit_step(step("t"))
    assert small.submit_step(step("t")).duplicates == 1
    with pytest.raises(Conflict):
        small.submit_step(step("t", response_ids=[99, 98], rollout_log_probs=None))


def test_one_channel_too_many_is_refused(small: Any) -> None:
    for name in ("a", "b", "c"):
        small.submit_step(step("t"), name)
    with pytest.raises(PoolFull, match="max_channels"):
        small.submit_step(step("t"), "d")
