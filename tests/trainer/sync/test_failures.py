"""A server that did not take the weights is taken out and named; nothing is sampled from what nobody checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.kit import Client, hold_until_resumed, serving
from tests.gateway.kit import Running, await_ready, running_gateway, told, until
from tests.gateway.rollout import chat, error_of, scripted
from tests.trainer.sync.kit import SHOWN, Between, Stream, Trained, address, between, publisher, states

from headrace import DataPool
from headrace.data.errors import InvalidInput
from headrace.pool.errors import PoolUnreachable
from headrace.pool.operation import Operation
from headrace.trainer.sync import Probe, SyncFailed
from headrace.trainer.sync.weights import WeightDelivery, WeightTransport

#: Nothing listens there.
DEAD = "http://127.0.0.1:9"
#: A load that is answered and not done.
LIES = {"/load_weights_shm": (200, {"success": True, "loaded": 21, "weight_version": "7"})}


@pytest.fixture
def liar(engine: Client) -> Iterator[Between]:
    with between(address(engine)) as found:
        yield found


@pytest.fixture
def beside(pool: DataPool, liar: Between, second: Client, folder: Path) -> Iterator[Running]:
    """A gateway in front of a server that may lie, and one that does not."""
    with running_gateway(pool, [liar.address, address(second)], folder) as found:
        yield found


def test_a_server_that_kept_its_old_weights_is_found_and_taken_out(
    beside: Running, liar: Between, second: Client, trained: Trained
) -> None:
    liar.answers = LIES
    with publisher(beside) as found:
        report = found.publish(trained.weights, 7, trained.probe)
    assert set(report.failed) == {liar.address}
    assert "does not have the weights" in report.failed[liar.address]
    assert report.gap_max is not None
    assert report.gap_max < 1e-4
    assert states(beside) == {address(second): ("up", 7)}
    base = beside.init()["base_url"]
    for _ in range(4):
        told(chat(beside, base, "hi", max_tokens=2))
    assert {step.metadata["server"] for step in beside.steps(base.split("/")[3])} == {address(second)}


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"/load_weights_shm": (400, {"error": {"message": "no such weights"}})}, "400: no such weights"),
        ({"/load_weights_shm": (500, {"detail": "out of memory"})}, "500: out of memory"),
        ({"/score_tokens": (200, {"logprobs": [0.0], "dtype": "float32"})}, "scored 1 tokens"),
        ({"/is_paused": (404, {})}, "VLLM_SERVER_DEV_MODE=1"),
        ({"/v1/models": (200, {"data": []})}, "names no model"),
        ({"/version": (503, {"detail": "starting"})}, "503: starting"),
    ],
    ids=["refused", "broken", "too few", "no control", "no model", "not there"],
)
def test_why_a_server_failed_is_told(
    beside: Running, liar: Between, second: Client, trained: Trained, answers: dict[str, Any], reason: str
) -> None:
    liar.answers = answers
    with publisher(beside) as found:
        report = found.publish(trained.weights, 7, trained.probe)
    assert set(report.failed) == {liar.address}
    assert reason in report.failed[liar.address]
    assert states(beside) == {address(second): ("up", 7)}


def test_weights_of_a_server_that_failed_have_no_version_that_anybody_would_believe(
    beside: Running, liar: Between, engine: Client, trained: Trained
) -> None:
    liar.answers = {"/score_tokens": (200, {"logprobs": [0.0] * 11, "dtype": "float32"})}
    with publisher(beside) as found:
        found.publish(trained.weights, 7, trained.probe)
    assert engine.get("/weight_info") == {"weight_version": "unverified"}


def test_answers_that_were_frozen_on_a_server_that_failed_are_errors_and_no_steps(
    pool: DataPool, engine: Client, liar: Between, folder: Path, trained: Trained
) -> None:
    with running_gateway(pool, liar.address, folder) as gateway, publisher(gateway) as found:
        base = gateway.init()["base_url"]
        hold_until_resumed(engine, steps=SHOWN)
        stream = Stream(gateway, base, 1900)
        liar.answers = LIES
        with pytest.raises(SyncFailed):
            found.publish(trained.weights, 7, trained.probe)
        stream.ended()
        assert stream.error is not None
        assert gateway.steps(base.split("/")[3]) == []


def test_one_of_two_that_is_dead_does_not_hold_up_the_other(
    pool: DataPool, engine: Client, folder: Path, trained: Trained
) -> None:
    with running_gateway(pool, [address(engine), DEAD], folder) as gateway, publisher(gateway) as found:
        with pytest.raises(SyncFailed, match="cannot be reached"):
            found.check(trained.config)
        report = found.publish(trained.weights, 2, trained.probe)
        assert set(report.failed) == {DEAD}
        assert "cannot be reached" in report.failed[DEAD]
        assert states(gateway) == {address(engine): ("up", 2)}
    assert trained.sampled(engine) < 1e-4


def test_where_no_server_is_left_agents_are_told_at_once(
    pool: DataPool, liar: Between, folder: Path, trained: Trained
) -> None:
    with running_gateway(pool, [liar.address, DEAD], folder) as gateway, publisher(gateway) as found:
        liar.answers = LIES
        with pytest.raises(SyncFailed, match="no rollout server has the new weights") as caught:
            found.publish(trained.weights, 2, trained.probe)
        assert set(caught.value.reasons) == {liar.address, DEAD}
        assert all(reason in str(caught.value) for reason in caught.value.reasons.values())
        answer = chat(gateway, gateway.init()["base_url"], "hi")
        error_of(answer, 503)
        assert "retry-after" in answer.headers


def test_a_gateway_whose_pool_is_away_for_a_while_keeps_its_servers(
    pool: DataPool, engine: Client, folder: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute_async, refused = pool.execute_async, []

    async def away(operation: Operation[Any], *rest: Any, **options: Any) -> Any:
        if operation.name == "set_version" and len(refused) < 2:
            refused.append(operation)
            raise PoolUnreachable("the pool is being started anew")
        return await execute_async(operation, *rest, **options)

    with running_gateway(pool, address(engine), folder) as gateway, publisher(gateway) as found:
        monkeypatch.setattr(pool, "execute_async", away)
        assert found.publish(trained.weights, 7, trained.probe).failed == {}
        assert len(refused) == 2
        assert states(gateway) == {address(engine): ("up", 7)}


def test_a_server_that_comes_back_is_brought_in_with_the_newest_weights(
    beside: Running, liar: Between, engine: Client, second: Client, trained: Trained
) -> None:
    with publisher(beside) as found:
        liar.answers = LIES
        found.publish(trained.weights, 1, trained.probe)
        report = found.publish(trained.weights, 2, trained.probe)
        assert set(report.failed) == {liar.address}
        assert set(states(beside)) == {address(second)}
        liar.answers = {}
        report = found.publish(trained.weights, 3, trained.probe)
    assert report.failed == {}
    assert states(beside) == {liar.address: ("up", 3), address(second): ("up", 3)}
    assert trained.sampled(engine) < 1e-4


def test_a_server_that_is_added_has_its_own_version_until_the_next_publish(
    gateway: Running, engine: Client, second: Client, first: Trained, trained: Trained
) -> None:
    with publisher(gateway) as found:
        found.publish(trained.weights, 4, trained.probe)
        told(gateway.post("/servers", {"address": address(second)}))
        assert states(gateway) == {address(engine): ("up", 4), address(second): ("up", 0)}
        found.publish(trained.weights, 5, trained.probe)
    assert states(gateway) == {address(engine): ("up", 5), address(second): ("up", 5)}
    assert trained.sampled(second) < 1e-4


def test_a_server_that_failed_stays_paused_where_no_gateway_keeps_calls_from_it(
    liar: Between, engine: Client, trained: Trained
) -> None:
    liar.answers = LIES
    with publisher(servers=[liar.address]) as found:
        with pytest.raises(SyncFailed):
            found.publish(trained.weights, 2, trained.probe)
        assert engine.get("/is_paused") == {"is_paused": True}
        liar.answers = {}
        found.publish(trained.weights, 2, trained.probe)
    assert engine.get("/is_paused") == {"is_paused": False}
    assert trained.sampled(engine) < 1e-4


def test_a_pause_that_cannot_be_had_leaves_the_old_weights_and_calls_go_on(
    pool: DataPool, liar: Between, engine: Client, folder: Path, first: Trained, trained: Trained
) -> None:
    with running_gateway(pool, liar.address, folder) as gateway, publisher(gateway) as found:
        liar.answers = {"/pause": (500, {"detail": "no"})}
        with pytest.raises(SyncFailed, match="/pause"):
            found.publish(trained.weights, 2, trained.probe)
        told(chat(gateway, gateway.init()["base_url"], "hi", max_tokens=2))
    assert first.sampled(engine) < 1e-4


def test_servers_that_a_gateway_paused_as_it_died_go_on(gateway: Running, engine: Client, trained: Trained) -> None:
    gone = (500, {"detail": "it was killed"})
    with between(gateway.address) as front, publisher(front.address) as found:
        front.answers = {"/pause": gone, "/resume": gone}
        engine.post("/pause?mode=keep")  # it came so far
        with pytest.raises(SyncFailed, match="/pause"):
            found.publish(trained.weights, 2, trained.probe)
    assert engine.get("/is_paused") == {"is_paused": False}


def test_a_gateway_whose_predecessor_left_a_server_paused_is_published_to(
    pool: DataPool, engine: Client, folder: Path, trained: Trained
) -> None:
    engine.post("/pause?mode=keep")
    with running_gateway(pool, address(engine), folder, until_ready=False) as gateway, publisher(gateway) as found:
        found.check(trained.config)
        assert states(gateway) == {address(engine): ("paused", 0)}
        assert "not by this gateway" in gateway.get("/ready").json()["detail"]
        assert found.publish(trained.weights, 2, trained.probe).failed == {}
        await_ready(gateway.address)
        assert states(gateway) == {address(engine): ("up", 2)}
    assert trained.sampled(engine) < 1e-4


def test_a_publish_that_is_interrupted_leaves_nothing_held_and_nothing_unchecked(
    two: Running, engine: Client, second: Client, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.trainer.sync.servers import HeadraceEngine

    score = HeadraceEngine.score

    def interrupted(self: HeadraceEngine, ids: list[int]) -> tuple[list[float], str | None]:
        if self.address == address(second):
            raise KeyboardInterrupt
        return score(self, ids)

    monkeypatch.setattr(HeadraceEngine, "score", interrupted)
    with publisher(two) as found, pytest.raises(KeyboardInterrupt):
        found.publish(trained.weights, 2, trained.probe)
    assert states(two) == {address(engine): ("up", 2)}
    told(chat(two, two.init()["base_url"], "hi", max_tokens=2))


def test_what_a_publish_has_not_verified_is_not_sampled_when_its_pause_ends_without_it(
    gateway: Running, engine: Client, first: Trained, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.trainer.sync.servers import HeadraceEngine

    score, seen = HeadraceEngine.score, []

    def after_the_pause(self: HeadraceEngine, ids: list[int]) -> tuple[list[float], str | None]:
        told(gateway.post("/pause?mode=keep&lease_s=0.05"))
        until(lambda: states(gateway) == {address(engine): ("paused", 1)})
        seen.append(engine.get("/weight_info"))
        return score(self, ids)

    with publisher(gateway) as found:
        found.publish(first.weights, 1, first.probe)
        monkeypatch.setattr(HeadraceEngine, "score", after_the_pause)
        assert found.publish(trained.weights, 2, trained.probe).failed == {}
    assert seen == [{"weight_version": "unverified"}]
    until(lambda: states(gateway) == {address(engine): ("up", 2)})
    assert engine.get("/weight_info") == {"weight_version": "2"}
    told(chat(gateway, gateway.init()["base_url"], "hi", max_tokens=2))


def test_weights_that_are_of_another_model_are_refused_whole(
    two: Running, engine: Client, first: Trained, trained: Trained
) -> None:
    weights = {name: tensor for name, tensor in trained.weights.items() if name != "model.norm.weight"}
    with publisher(two) as found, pytest.raises(SyncFailed, match="weights are missing"):
        found.publish(weights, 2, trained.probe)
    assert engine.get("/is_paused") == {"is_paused": False}
    assert first.sampled(engine) < 1e-4


def test_wrong_weights_are_found_in_a_server_that_speaks_vllms_wire_alone(
    beside: Running, liar: Between, engine: Client, second: Client, trained: Trained, tmp_path: Path
) -> None:
    liar.answers = {
        "/version": (200, {"version": "0.32.0"}),
        "/collective_rpc": (200, {"results": [None]}),
    }
    with publisher(beside, folder=tmp_path) as found:
        report = found.publish(trained.weights, 7, trained.probe)
        assert (report.mode, set(report.failed)) == ("abort-resume", {liar.address})
        assert "does not have the weights" in report.failed[liar.address]
        del liar.answers["/collective_rpc"]
        report = found.publish(trained.weights, 8, trained.probe)
    assert report.failed == {}
    assert states(beside) == {liar.address: ("up", 8), address(second): ("up", 8)}
    assert trained.sampled(engine) < 1e-4


@pytest.mark.parametrize("said", [{"success": False}, None, []], ids=str)
def test_a_prefix_cache_that_was_not_reset_is_a_failure(
    beside: Running, liar: Between, trained: Trained, tmp_path: Path, said: Any
) -> None:
    liar.answers = {"/version": (200, {"version": "0.32.0"}), "/reset_prefix_cache": (200, said)}
    with publisher(beside, folder=tmp_path) as found:
        report = found.publish(trained.weights, 7, trained.probe)
    assert "did not reset its prefix cache" in report.failed[liar.address]


def test_a_server_without_control_routes_is_refused_before_training(
    pool: DataPool, folder: Path, trained: Trained
) -> None:
    with (
        scripted(folder) as rollout,
        running_gateway(pool, rollout.address, folder) as gateway,
        publisher(gateway) as found,
        pytest.raises(SyncFailed, match="/version with 404"),
    ):
        found.check(trained.config)


def test_vllm_with_tied_embeddings_is_refused_before_training(
    engine: Client, liar: Between, folder: Path, tmp_path: Path, trained: Trained
) -> None:
    from tests.engine.test_forward import family

    tied = family(folder, tmp_path / "tied", model_type="llama", tie_word_embeddings=True)
    liar.answers = {"/version": (200, {"version": "0.32.0"})}
    with publisher(servers=[liar.address], folder=tmp_path) as found:
        found.check(trained.config)
        liar.answers["/v1/models"] = (200, {"data": [{"id": "tiny", "root": str(tied)}]})
        with pytest.raises(SyncFailed, match=r"ties lm_head.*headrace\.trainer\.sync\.untie"):
            found.check(trained.config)


def test_vllm_cannot_be_given_shared_memory(liar: Between, trained: Trained) -> None:
    liar.answers = {"/version": (200, {"version": "0.32.0"})}
    with (
        publisher(servers=[liar.address], via="shared_memory") as found,
        pytest.raises(SyncFailed, match=r"takes weights from files; set sync\.via to auto"),
    ):
        found.publish(trained.weights, 1, trained.probe)


def test_a_bfloat16_engine_is_held_to_what_its_precision_allows(folder: Path, trained: Trained) -> None:
    with serving(model=str(folder), dtype="bfloat16") as engine, publisher(servers=[address(engine)]) as found:
        report = found.publish(trained.weights, 1, trained.probe)
        assert report.gap_max is not None
        assert 1e-4 < report.gap_max < 0.8
        with (
            publisher(servers=[address(engine)], tolerance=1e-4) as strict,
            pytest.raises(SyncFailed, match=r"0\.0001"),
        ):
            strict.publish(trained.weights, 2, trained.probe)


@pytest.mark.parametrize(
    ("ids", "log_probs"), [([1], []), ([1, 2], []), ([1, 2], [-1.0, -1.0]), ([1, 2], [float("nan")])], ids=str
)
def test_a_probe_that_proves_nothing_is_refused(ids: list[int], log_probs: list[float]) -> None:
    with pytest.raises(InvalidInput, match="probe"):
        Probe(ids, log_probs)


def test_log_probs_that_are_no_numbers_are_a_gap_without_bounds() -> None:
    assert Probe([1, 2], [-1.0]).gap([float("nan")]).largest == float("inf")


def test_weights_that_no_server_takes_are_refused_before_anything_is_held(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="float64"):
        WeightDelivery({"a": torch.zeros(2, dtype=torch.float64)}, 1, WeightTransport(shared=True))
