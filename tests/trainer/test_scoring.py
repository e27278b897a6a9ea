"""Trajectories without a reward, scored through `/compute_reward` before they are learned from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests.gateway.kit import running_gateway, serving, until

from headrace import DataPool, Step
from headrace.data.trajectory import Trajectory
from headrace.tokens import load_vocabulary
from headrace.trainer import Trainer, TrainerConfig
from headrace.trainer.config import SyncConfig
from headrace.trainer.examples import GatewayScorer, NotScored
from headrace.trainer.stopping import Stopped, StopSignal


def unrewarded(pool: DataPool, uids: list[str]) -> None:
    for at, uid in enumerate(uids):
        second = {"prompt_ids": [5, 6, 7 + at, 9], "response_ids": [8], "step_index": 1, "is_last": True}
        pool.submit_steps(
            [
                Step(prompt_ids=[5, 6], response_ids=[7 + at], step_index=0, trajectory_uid=uid, prompt_uid="g"),
                Step(trajectory_uid=uid, prompt_uid="g", rollout_log_probs=[-1.0], **second),
            ]
        )


def test_a_trajectory_is_scored_by_its_tokens_and_what_was_registered_with_it() -> None:
    asked: list[dict[str, Any]] = []

    async def compute(request: Request) -> JSONResponse:
        asked.append(await request.json() | {"key": request.headers.get("authorization")})
        return JSONResponse({"reward_score": 0.25, "reward": 0.25, "reward_extra_info": {}})

    with (
        DataPool() as pool,
        serving(Starlette(routes=[Route("/compute_reward", compute, methods=["POST"])])) as address,
    ):
        pool.open("t", "g", metadata={"answer": "42"})
        unrewarded(pool, ["t"])
        batch = pool.fetch_batch(1, timeout=0)
        assert batch is not None
        found = GatewayScorer(address, "secret").scores(batch.groups[0].trajectories)
    assert found == {"t": 0.25}
    (body,) = asked
    assert body == {
        "prompt_ids": [5, 6],
        "response_ids": [7, 9, 8],
        "dataset_fields": {"answer": "42"},
        "num_turns": 2,
        "key": "Bearer secret",
    }


def test_a_run_learns_from_what_was_scored(model: Path, tmp_path: Path) -> None:
    async def compute(request: Request) -> JSONResponse:
        first = (await request.json())["response_ids"][0]
        return JSONResponse({"reward_score": float(first == 7)})

    app = Starlette(routes=[Route("/compute_reward", compute, methods=["POST"])])
    with DataPool(channels={"train": {"n_rollouts": 2}}) as pool, serving(app) as address:
        unrewarded(pool, ["one", "other"])
        config = TrainerConfig(
            model=model, run=tmp_path, steps=1, pool={"batch_size": 1}, score_unrewarded=True, sync={"gateway": address}
        )
        trainer = Trainer(config, pool=pool)
        trainer.publisher = None  # nothing to publish to stands behind this address
        trainer.run()
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (row["reward"], row["sequences"], row["skipped_unrewarded"]) == (0.5, 2, 0)


def test_a_run_waits_for_a_busy_gateway_and_skips_what_it_cannot_score(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    async def compute(request: Request) -> JSONResponse:
        first = (await request.json())["response_ids"][0]
        asked.append(first)
        if len(asked) <= 2:
            return JSONResponse({"detail": "its judge is away", "code": "reward_unavailable"}, 503)
        if first == 8:
            return JSONResponse({"detail": "no ground truth", "code": "reward_failed"}, 422)
        return JSONResponse({"reward_score": float(first == 7)})

    app = Starlette(routes=[Route("/compute_reward", compute, methods=["POST"])])
    with DataPool(channels={"train": {"n_rollouts": 3}}) as pool, serving(app) as address:
        unrewarded(pool, ["one", "lost", "other"])
        config = TrainerConfig(
            model=model, run=tmp_path, steps=1, pool={"batch_size": 1}, score_unrewarded=True, sync={"gateway": address}
        )
        trainer = Trainer(config, pool=pool)
        trainer.publisher = None  # nothing to publish to stands behind this address
        asked.clear()
        trainer.run()
    assert asked == [7, 7, 7, 8, 9]
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (row["reward"], row["sequences"], row["skipped_unrewarded"]) == (0.5, 2, 1)
    assert "1 trajectories could not be scored and are skipped, lost: 422: no ground truth" in caplog.text


class Waits(StopSignal):
    """Ends every wait at once, and remembers how long each was to be."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        return self.is_set()


def test_an_answer_that_fails_each_time_is_skipped_after_a_few_tries_each_as_late_as_the_gateway_asks() -> None:
    async def compute(request: Request) -> JSONResponse:
        late = {"detail": "the judge took too long", "code": "reward_failed"}
        return JSONResponse(late, 502, {"retry-after": "30"})

    stop = Waits()
    with (
        DataPool() as pool,
        serving(Starlette(routes=[Route("/compute_reward", compute, methods=["POST"])])) as address,
    ):
        assert GatewayScorer(address, stop=stop).scores([lost(pool)]) == {}
    assert stop.seconds == [30.0, 30.0]


def test_a_stop_ends_the_wait_for_a_gateway_that_scores() -> None:
    stop = StopSignal()

    async def compute(request: Request) -> JSONResponse:
        stop.set("a test")
        return JSONResponse({"detail": "busy"}, 429)

    with (
        DataPool() as pool,
        serving(Starlette(routes=[Route("/compute_reward", compute, methods=["POST"])])) as address,
        pytest.raises(Stopped),
    ):
        GatewayScorer(address, stop=stop).scores([lost(pool)])


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_that_every_trajectory_would_get_ends_the_run(status: int) -> None:
    async def compute(request: Request) -> JSONResponse:
        return JSONResponse({"detail": "not you"}, status)

    with (
        DataPool() as pool,
        serving(Starlette(routes=[Route("/compute_reward", compute, methods=["POST"])])) as address,
        pytest.raises(NotScored, match=f"{status} for trajectory lost: not you"),
    ):
        GatewayScorer(address).scores([lost(pool)])


def test_a_gateway_with_a_reward_scores_what_a_batch_brought_without_one(folder: Path, tmp_path: Path) -> None:
    vocabulary = load_vocabulary(folder)
    reward = tmp_path / "reward.json"
    reward.write_text(json.dumps({"rules": [{"use": "exact_match"}]}))
    nobody = "http://127.0.0.1:9"  # scoring needs no rollout server
    with (
        DataPool(channels={"train": {"n_rollouts": 2}}) as pool,
        running_gateway(pool, nobody, folder, until_ready=False, reward=str(reward)) as gateway,
    ):
        for said in ("four", "five"):
            pool.open(said, "g", metadata={"answer": "four"})
            ids = vocabulary.encode(said)
            pool.submit_step(Step(prompt_ids=[5], response_ids=ids, trajectory_uid=said, prompt_uid="g", is_last=True))
        batch = pool.fetch_batch(1, timeout=0)
        assert batch is not None
        scorer = GatewayScorer(gateway.address)
        scorer.check()
        until(lambda: gateway.post("/compute_reward", {"prompt_ids": [5], "response_ids": [6]}).status_code != 503)
        assert scorer.scores(batch.groups[0].trajectories) == {"four": 1.0, "five": 0.0}
        assert scorer.scores([lost(pool)]) == {}  # a rule without its ground truth: no zero


def lost(pool: DataPool) -> Trajectory:
    pool.submit_step(Step(prompt_ids=[5], response_ids=[6], trajectory_uid="lost", is_last=True), "val")
    return pool.trajectory("lost")


def test_a_gateway_without_a_reward_worker_is_a_clear_error(folder: Path) -> None:
    with DataPool() as pool, running_gateway(pool, "http://127.0.0.1:9", folder, until_ready=False) as gateway:
        unrewarded(pool, ["t"])
        batch = pool.fetch_batch(1, timeout=0)
        assert batch is not None
        with pytest.raises(NotScored, match=r"503.*reward worker"):
            GatewayScorer(gateway.address).scores(batch.groups[0].trajectories)


def test_a_run_that_nobody_would_score_for_is_refused_at_its_start(model: Path, folder: Path, tmp_path: Path) -> None:
    with DataPool() as pool, running_gateway(pool, "http://127.0.0.1:9", folder, until_ready=False) as gateway:
        config = TrainerConfig(model=model, run=tmp_path, score_unrewarded=True, sync={"gateway": gateway.address})
        with pytest.raises(NotScored, match="score_unrewarded needs a gateway with a reward worker"):
            Trainer(config, pool=pool)


def test_scoring_needs_a_gateway(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sync\.gateway"):
        TrainerConfig(model=tmp_path, run=tmp_path, score_unrewarded=True)
    with pytest.raises(ValueError, match=r"sync\.gateway"):
        TrainerConfig(model=tmp_path, run=tmp_path, score_unrewarded=True, sync=SyncConfig(servers=["http://h:1"]))
