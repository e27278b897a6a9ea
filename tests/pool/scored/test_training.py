"""`headrace train` on what environments post, over every pool: it registers, learns as they say, and tells its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gateway.kit import until
from tests.pool.scored.kit import environment, joined

from headrace import Sequence
from headrace.data.scored import read_group
from headrace.engine import tiny
from headrace.pool.calls import BlockingPool
from headrace.pool.scored.types import Posting
from headrace.trainer import Trainer, TrainerConfig
from headrace.trainer.learner import Learner


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainerConfig]:
    model = tmp_path_factory.mktemp("model")
    tiny.build(
        model, 0, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2, head_dim=16
    )

    def made(run: Path, **changes: Any) -> TrainerConfig:
        pool = {"batch_size": 1, "prefetch": False, **changes.pop("pool", {})}
        return TrainerConfig.model_validate({"model": model, "run": run, "pool": pool, "steps": 1, **changes})

    return made


Config = Callable[..., TrainerConfig]


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """What was learned from."""
    seen: list[Sequence] = []
    learn = Learner.learn

    def noting(self: Learner, sequences: list[Sequence], step: int, version: int) -> dict[str, float]:
        seen.extend(sequences)
        return learn(self, sequences, step, version)

    monkeypatch.setattr(Learner, "learn", noting)
    return seen


def scored(**fields: Any) -> Posting:
    body = {
        "tokens": [[1, 2, 3, 4]] * 3,
        "masks": [[-100, 2, -100, 4]] * 3,
        "scores": [0.0, 1.0, 2.0],
        "inference_logprobs": [[1.0, -5.0, 1.0, -5.5]] * 3,
        **fields,
    }
    return Posting(read_group(msgspec.json.encode(body)).piece, 3)


SAID = [[9.0, 0.25, 9.0, -3.0], [9.0, 1.5, 9.0, 0.0], [9.0, 7.0, 9.0, 7.0]]


def test_what_environments_say_of_tokens_is_learned_as_they_say(
    pool: BlockingPool, config: Config, learned: list[Sequence], tmp_path: Path
) -> None:
    pool.desk_serve("train")
    overrides = [{}, {}, {"set_advantage_to_zero": True}]
    teacher = {"distill_token_ids": [[[1], [2], [3], [4]]] * 3, "distill_logprobs": [[[-0.5]] * 4] * 3}
    pool.desk_post([scored(advantages=SAID, overrides=overrides, ref_logprobs=[[1.0, -5.0, 1.0, -5.0]] * 3, **teacher)])
    pool.desk_post([scored(scores=[1.0, 1.0, 1.0], advantages=SAID)])  # equal scores: the advantages teach
    pool.desk_post([scored(scores=[1.0, 1.0, 1.0])])
    pool.desk_post([scored(advantages=[[1.0]] * 3)])
    trainer = Trainer(config(tmp_path / "run", pool={"batch_size": 4}, algorithm={"kl": 0.1}), pool=pool)
    trainer.run()
    given = [one.advantages.tolist() for one in learned if one.advantages is not None]
    assert given == [
        *([0.0, 0.25, 0.0, -3.0], [0.0, 1.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
        *([0.0, 0.25, 0.0, -3.0], [0.0, 1.5, 0.0, 0.0], [0.0, 7.0, 0.0, 7.0]),
    ]
    [row] = [msgspec.json.decode(line) for line in (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()]
    assert (row["skipped_zero_variance"], row["skipped_misaligned"]) == (1, 3)
    assert row["teacher_kl"] > 0
    assert row["reference_kl"] > 0


def test_a_run_registers_itself_and_tells_its_end(pool: BlockingPool, config: Config, tmp_path: Path) -> None:
    pool.desk_serve("train")
    pool.desk_post([scored(), scored()])
    Trainer(config(tmp_path / "run", steps=2, max_length=64), pool=pool).run()
    info = pool.desk_info()
    held = info.registration
    assert held is not None
    assert (held.num_steps, held.starting_step, held.max_token_len, held.batch_groups) == (2, 0, 64, 1)
    assert (info.ended, info.by_fetch, pool.desk_status().step) == (True, False, 2)


def test_a_run_on_another_channel_registers_nowhere(pool: BlockingPool, config: Config, tmp_path: Path) -> None:
    pool.desk_serve("other")
    pool.desk_post([scored()])
    pool.shutdown("train")
    Trainer(config(tmp_path / "run"), pool=pool).run()
    assert pool.desk_info().registration is None


def test_a_pool_that_has_forgotten_the_run_is_registered_at_again(
    pool: BlockingPool, config: Config, tmp_path: Path
) -> None:
    """As one that was restarted without a journal: environments come back at the step that the run is at."""
    pool.desk_serve("train")
    pool.desk_post([scored()])
    trainer = Trainer(config(tmp_path / "run", steps=2), pool=pool)
    running = threading.Thread(target=trainer.run)
    running.start()
    try:
        until(lambda: trainer.progress.step == 1)
        pool.desk_reset()
        until(lambda: (held := pool.desk_info().registration) is not None and held.num_steps == 2)
        until(lambda: pool.desk_info().started)
        found = pool.desk_register_env(environment(group_size=3))
        assert found is not None
        assert (found.starting_step, found.num_steps) == (1, 2)
        pool.desk_post([scored()])
        running.join()
        assert pool.desk_env_status(found.env_id).ended
    finally:
        trainer.stop()
        running.join()


def test_a_run_that_is_stopped_ends_the_work_of_environments_too(
    pool: BlockingPool, config: Config, tmp_path: Path
) -> None:
    pool.desk_serve("train")
    trainer = Trainer(config(tmp_path / "run"), pool=pool)
    running = threading.Thread(target=trainer.run)
    running.start()
    try:
        until(lambda: pool.desk_info().started)
        env = joined(pool)
    finally:
        trainer.stop("SIGTERM")
        running.join()
    assert pool.desk_env_status(env).ended
