"""Any producer, any consumer: a channel's groups by `desk_batch`, scored groups by `fetch_batch`, each exactly once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.pool.conftest import MakePool
from tests.pool.journal.kit import check_rules, dump, same
from tests.pool.kit import SOON, Threads, drain, fetched, group, ledger, prompts, until_blocked
from tests.pool.scored.kit import drained, joined, names, post, scored_stats, started

from headrace import DataPool
from headrace.data.scored import decode, read_group
from headrace.pool.calls import BlockingPool
from headrace.pool.config import Limits
from headrace.pool.scored.types import Posting


def scored(tokens: list[list[int]], masks: list[list[int]], env: int | None = None, **fields: Any) -> Posting:
    body = {"tokens": tokens, "masks": masks, "scores": [0.5] * len(tokens), **fields}
    return Posting(read_group(msgspec.json.encode(body)).piece, len(tokens), env)


def test_what_environments_posted_is_fetched_as_steps(pool: BlockingPool) -> None:
    pool.desk_serve("train")
    pool.desk_post(
        [
            scored(
                [[1, 2, 3, 4], [1, 5]],
                [[-100, 2, -100, 4], [-100, 5]],
                inference_logprobs=[[1.0, -0.25, 1.0, -0.5], [1.0, -0.75]],
            )
        ]
    )
    batch = fetched(pool)
    [found] = batch.groups
    assert [len(trajectory) for trajectory in found.trajectories] == [2, 1]
    first, second = batch.sequences()
    assert (list(first.tokens), list(first.loss_mask)) == ([1, 2, 3, 4], [False, True, False, True])
    assert list(first.log_probs) == [0.0, -0.25, 0.0, -0.5]
    assert (list(second.tokens), first.reward, second.reward) == ([1, 5], 0.5, 0.5)
    assert (scored_stats(pool)["moved"], scored_stats(pool)["queued"]) == (1, 0)


def test_what_agents_recorded_is_served_in_batches_of_the_trainers_size(make_pool: MakePool) -> None:
    pool = make_pool(defaults={"n_rollouts": 3})
    started(pool)
    pool.desk_serve("train")
    post(pool, 7, sequences=1)
    assert pool.desk_batch() is None
    steps = group("p", 3, turns=2, reward=0.5)
    pool.submit_steps(steps)
    batch = pool.desk_batch()
    assert batch is not None
    own, recorded = map(decode, batch.pieces)
    assert own["tokens"] == [[7, 1000]]
    whole = [[*last.prompt_ids, *last.response_ids] for last in steps[3:]]
    assert recorded["tokens"] == whole
    assert recorded["masks"] == [[-100, -100, -100, *tokens[3:]] for tokens in whole]
    assert recorded["scores"] == [1.0] * 3
    assert recorded["inference_logprobs"] == [[1.0, 1.0, 1.0, -0.5, -0.25, -0.5, -0.25]] * 3
    pool.desk_ack(batch.lease)
    assert (ledger(pool)["consumed"], scored_stats(pool)["served"]) == (6, 2)


def test_a_batch_that_came_from_a_channel_and_was_lost_goes_out_again(pool: BlockingPool) -> None:
    started(pool, batch_size=1)
    pool.desk_serve("train")
    pool.submit_steps(group("p"))
    batch = pool.desk_batch()
    assert batch is not None
    pool.desk_nack(batch.lease)
    again = pool.desk_batch()
    assert again is not None
    assert again.pieces == batch.pieces


def test_groups_that_make_up_no_batch_stay_in_their_channel(make_pool: MakePool) -> None:
    pool = make_pool(defaults={"n_rollouts": 3})
    started(pool)
    pool.desk_serve("train")
    for prompt in "abc":
        pool.submit_steps(group(prompt, 3))
    assert pool.desk_batch() is None
    post(pool, 1, sequences=1)
    batch = pool.desk_batch()
    assert batch is not None
    assert len(batch.pieces) == 2
    assert drain(pool) == ["b", "c"]
    assert scored_stats(pool)["dead_letters"] == {}


def test_a_fetch_that_waits_is_woken_by_a_post(pool: BlockingPool, threads: Threads) -> None:
    pool.desk_serve("train")
    waiting = threads.submit(pool.fetch_batch, 2)
    until_blocked(pool)
    post(pool, 1)
    post(pool, 2)
    assert prompts(waiting.result(SOON)) == ["desk/0", "desk/1"]


def test_a_fetch_that_waits_is_woken_by_a_batch_that_came_back(pool: BlockingPool, threads: Threads) -> None:
    started(pool, batch_size=2)
    pool.desk_serve("train")
    post(pool, 1)
    batch = pool.desk_batch()
    assert batch is not None
    waiting = threads.submit(pool.fetch_batch, 1)
    until_blocked(pool)
    pool.desk_nack(batch.lease)
    assert prompts(waiting.result(SOON)) == ["desk/0"]


def test_single_steps_come_from_as_many_groups_as_they_take(pool: BlockingPool) -> None:
    pool.desk_serve("train")
    for name in range(3):
        post(pool, name)
    assert pool.fetch_batch(7, unit="step", timeout=0) is None
    assert scored_stats(pool)["queued"] == 3
    assert len(fetched(pool, 3, unit="step").steps) == 3
    assert scored_stats(pool)["queued"] == 1


def test_a_fetch_takes_what_its_channel_has_first_and_nothing_where_both_have_too_little(pool: BlockingPool) -> None:
    pool.desk_serve("train")
    post(pool, 1)
    post(pool, 2)
    pool.submit_steps(group("p"))
    assert pool.fetch_batch(4, timeout=0) is None
    assert scored_stats(pool)["queued"] == 2
    assert prompts(pool.fetch_batch(2, timeout=0)) == ["p", "desk/0"]
    assert scored_stats(pool)["queued"] == 1


def test_a_group_that_is_no_steps_stays_for_the_trainer_at_the_desk(pool: BlockingPool) -> None:
    started(pool)
    pool.desk_serve("train")
    pool.desk_post([scored([[1], [2], [3], [4]], [[1], [2], [3], [4]])])
    post(pool, 1)
    assert prompts(pool.fetch_batch(1, timeout=0)) == ["desk/1"]
    assert pool.fetch_batch(1, timeout=0) is None
    batch = pool.desk_batch()
    assert batch is not None
    assert decode(batch.pieces[0])["tokens"] == [[1], [2], [3], [4]]


def test_who_waits_for_groups_that_cannot_be_fetched_is_told_why(
    pool: BlockingPool, caplog: pytest.LogCaptureFixture
) -> None:
    started(pool)
    env = joined(pool)
    pool.desk_serve("train")
    assert (scored_stats(pool)["unmovable"], pool.desk_status().unmovable) == (0, "")
    for _ in range(2):
        pool.desk_post([scored([[1], [2]], [[1], [2]], env=env)])
    post(pool, 7)
    for _ in range(2):
        assert pool.fetch_batch(3, timeout=0) is None
    why = "tokens[0] has 1 entries; a step has at least a prompt and a response"
    found = scored_stats(pool)
    assert (found["queued"], found["unmovable"], found["why_unmovable"]) == (3, 2, why)
    assert (pool.desk_status().unmovable, pool.desk_env_status(env).unmovable) == (why, why)
    assert pool.desk_env_status(joined(pool)).unmovable == "", "of another environment none waits"
    if isinstance(pool, DataPool):
        [logged] = [record.getMessage() for record in caplog.records if "cannot be fetched" in record.getMessage()]
        assert logged.endswith(why)
    assert pool.desk_batch() is not None
    assert (scored_stats(pool)["unmovable"], pool.desk_env_status(env).unmovable) == (0, "")


def teacher(tokens: int) -> dict[str, Any]:
    """What a teacher thinks of 20 candidates for each token: more than metadata may hold."""
    return {
        "distill_token_ids": [[[100_000 + 20 * at + n for n in range(20)] for at in range(tokens)]],
        "distill_logprobs": [[[-(n + 1) / 3 for n in range(20)] for _ in range(tokens)]],
    }


def test_what_environments_say_of_each_of_thousands_of_tokens_is_fetched(pool: BlockingPool) -> None:
    said, images = teacher(4000), ["a picture" * 100_000]
    tokens = [list(range(4000))]
    pool.desk_serve("train")
    pool.desk_post([scored(tokens, [[-100, *tokens[0][1:]]], **said, images=images)])
    batch = pool.fetch_batch(1, timeout=0)
    assert batch is not None
    [sequence], [step] = batch.sequences(), batch.steps
    assert sequence.guidance is not None
    assert sequence.guidance.teacher_ids is not None
    assert sequence.guidance.teacher_log_probs is not None
    assert sequence.guidance.misfit == ""
    np.testing.assert_array_equal(sequence.guidance.teacher_ids, said["distill_token_ids"][0])
    np.testing.assert_array_equal(
        sequence.guidance.teacher_log_probs, np.array(said["distill_logprobs"][0], np.float32)
    )
    assert step.metadata["distill_logprobs"] == said["distill_logprobs"][0], "digit for digit"
    assert step.metadata["images"] == images


@pytest.mark.parametrize("memory_mb", [0, 64])
@pytest.mark.parametrize("compacted", [False, True])
def test_what_environments_say_of_tokens_outlives_a_restart(tmp_path: Path, memory_mb: float, compacted: bool) -> None:
    said = teacher(1000)
    limits = Limits(memory_mb=memory_mb)
    with DataPool(tmp_path, durability="os", limits=limits) as pool:
        pool.desk_serve("train")
        pool.desk_post([scored([list(range(1000))], [list(range(1000))], **said)])
        assert pool.fetch_batch(1, timeout=0, lease_s=1e6) is not None
        if compacted:
            pool.compact()
    with DataPool(tmp_path, durability="os", limits=limits) as pool:
        [lease] = pool._state.look("train").leases
        pool.nack(lease)
        [step] = fetched(pool).steps
        assert step.metadata["distill_token_ids"] == said["distill_token_ids"][0]
        check_rules(pool._state)


def test_serving_ends_when_it_is_told_to(pool: BlockingPool) -> None:
    pool.desk_serve("train")
    pool.desk_serve(None)
    post(pool, 1)
    assert pool.fetch_batch(1, timeout=0) is None
    assert pool.desk_info().serving is None


def test_a_channel_that_is_not_served_keeps_its_groups_and_the_desk_its_own(pool: BlockingPool) -> None:
    started(pool)
    post(pool, 1, sequences=4)
    pool.submit_steps(group("p", 1))
    assert prompts(pool.fetch_batch(1, timeout=0)) == ["p"]
    assert pool.fetch_batch(1, timeout=0) is None
    assert drained(pool) == [1]


def test_a_fetch_that_waits_is_woken_when_a_lease_at_the_desk_runs_out(threads: Threads) -> None:
    with DataPool() as pool:
        started(pool, batch_size=2)
        pool.desk_serve("train")
        post(pool, 1)
        assert pool.desk_batch(lease_s=0.2) is not None
        assert prompts(threads.submit(pool.fetch_batch, 1).result(SOON)) == ["desk/0"]


@pytest.mark.parametrize("compacted", [False, True])
def test_who_serves_whom_and_what_has_moved_outlive_a_restart(tmp_path: Path, compacted: bool) -> None:
    with DataPool(tmp_path, durability="os") as pool:
        started(pool)
        pool.desk_serve("train")
        pool.submit_steps([step for prompt in "abcd" for step in group(prompt)])
        post(pool, 7, sequences=2)
        assert names(pool.desk_batch()) == [7, 1, 1], "its own, and the steps of a and b, whose prompts begin with 1"
        post(pool, 2)
        assert prompts(pool.fetch_batch(3, timeout=0, lease_s=1e6)) == ["c", "d", "desk/3"]
        before = dump(pool._state)
        if compacted:
            pool.compact()
    with DataPool(tmp_path, durability="os") as pool:
        assert same(before, dump(pool._state))
        check_rules(pool._state)
        post(pool, 5)
        assert prompts(pool.fetch_batch(1, timeout=0)) == ["desk/4"]


VICTIM = """
import os, signal, sys
from headrace import DataPool
from tests.pool.scored.kit import *
from tests.pool.kit import group
pool = DataPool(sys.argv[1], durability="os")
started(pool, batch_size=2)
pool.desk_serve("train")
for at in range(20):
    post(pool, at, sequences=2)
    pool.submit_steps(group(f"p{at}"))
    if at % 3 == 0:
        print("fetched", len(pool.fetch_batch(2, timeout=0).groups), flush=True)
    if at % 4 == 3:
        batch = pool.desk_batch()
        pool.desk_ack(batch.lease)
        print("served", len(batch.pieces), flush=True)
pool.fetch_batch(8, timeout=0, lease_s=1e6)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_whatever_moved_when_the_pool_was_killed_is_in_exactly_one_place(tmp_path: Path) -> None:
    victim = subprocess.run(
        [sys.executable, "-c", VICTIM, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )
    assert victim.returncode == -signal.SIGKILL
    gone = sum(int(line.split()[1]) for line in victim.stdout.splitlines())
    with DataPool(tmp_path, durability="os") as pool:
        check_rules(pool._state)
        for lease in list(pool._state.look("train").leases):
            pool.nack(lease)
        left = len(drain(pool))
        assert gone + left == 40
        assert scored_stats(pool)["queued"] == 0


@pytest.mark.parametrize("where", ["queued", "out", "served"])
def test_what_a_channel_gave_to_the_desk_goes_with_the_trajectory_that_is_forgotten(
    pool: BlockingPool, where: str
) -> None:
    started(pool, batch_size=1)
    pool.desk_serve("train")
    pool.submit_steps(group("p"))
    batch = pool.desk_batch("one")
    assert batch is not None
    if where != "out":
        (pool.desk_nack if where == "queued" else pool.desk_ack)(batch.lease)
    assert pool.desk_latest() is not None
    assert pool.forget("p/0") is True
    again = pool.desk_batch("one")
    assert (again is None) == (where != "out")
    assert again is None or again.pieces == []
    assert pool.desk_latest() is None
    found = scored_stats(pool)
    assert (found["queued"], found["memory_bytes"]) == (0, 0)
    assert found["dead_letters"] == ({} if where == "served" else {"forgotten": 1})


def test_a_trajectory_of_another_channel_takes_nothing_from_the_desk(pool: BlockingPool) -> None:
    started(pool, batch_size=1)
    pool.desk_serve("train")
    pool.submit_steps(group("p"))
    pool.submit_steps(group("p"), channel="val")
    batch = pool.desk_batch()
    assert batch is not None
    pool.desk_nack(batch.lease)
    assert pool.forget("p/0", channel="val") is True
    again = pool.desk_batch()
    assert again is not None
    assert again.pieces == batch.pieces


@pytest.mark.parametrize("compacted", [False, True])
def test_what_was_made_of_a_forgotten_trajectory_is_in_no_file(tmp_path: Path, compacted: bool) -> None:
    with DataPool(tmp_path, durability="os") as pool:
        started(pool, batch_size=2)
        pool.desk_serve("train")
        pool.submit_steps([*group("a"), *group("b")])
        batch = pool.desk_batch()
        assert batch is not None
        pool.desk_nack(batch.lease)
        if compacted:
            pool.compact()
    with DataPool(tmp_path, durability="os") as pool:
        assert pool.forget("b/0") is True
        kept = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
        assert [piece.data in kept for piece in batch.pieces] == [True, False]
        check_rules(pool._state)
        before = dump(pool._state)
    with DataPool(tmp_path, durability="os") as pool:
        assert same(before, dump(pool._state))
