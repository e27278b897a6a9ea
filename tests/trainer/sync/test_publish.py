"""New weights reach the engine, and every record of who sampled what says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.kit import Client, hold_until_resumed
from tests.gateway.kit import Running, running_gateway, told
from tests.gateway.models.kit import with_models
from tests.gateway.rollout import chat
from tests.trainer.sync.kit import SHOWN, Stream, Trained, address, publisher, states

from headrace import DataPool
from headrace.data.errors import InvalidInput
from headrace.trainer.sync import SyncFailed

MODES = ["keep", "drain", "abort-resume"]


@pytest.mark.parametrize("via", ["shared_memory", "files"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_sampled_after_a_publish_is_of_the_new_weights(
    engine: Client, gateway: Running, first: Trained, trained: Trained, tmp_path: Path, mode: str, via: str
) -> None:
    assert first.sampled(engine) < 1e-4
    with publisher(gateway, mode=mode, via=via, folder=tmp_path) as found:
        report = found.publish(trained.weights, 7, trained.probe)
    assert trained.sampled(engine) < 1e-4
    assert first.sampled(engine) > 1e-2
    assert (report.version, report.mode, report.failed) == (7, mode, {})
    assert report.gap_max is not None
    assert report.gap_mean is not None
    assert 0 <= report.gap_mean <= report.gap_max < 1e-4
    assert 0 < report.hold_s <= report.seconds


def test_the_version_is_known_to_the_engine_the_gateway_and_the_pool(
    engine: Client, gateway: Running, trained: Trained
) -> None:
    base = gateway.init()["base_url"]
    with publisher(gateway) as found:
        found.publish(trained.weights, 7, trained.probe)
    assert engine.get("/weight_info") == {"weight_version": "7"}
    assert told(gateway.get("/policy_version")) == {"version": 7, "servers": {address(engine): 7}}
    assert gateway.pool.stats()["channels"]["train"]["policy_version"] == 7
    told(chat(gateway, base, "hi", max_tokens=4))
    assert [step.policy_version for step in gateway.steps(base.split("/")[3])] == [7]


def test_an_answer_that_straddles_a_publish_has_a_span_of_each_version(
    engine: Client, gateway: Running, first: Trained, trained: Trained
) -> None:
    base = gateway.init()["base_url"]
    with publisher(gateway) as found:
        found.publish(first.weights, 1, first.probe)
        hold_until_resumed(engine, steps=SHOWN)
        stream = Stream(gateway, base, 1900)
        report = found.publish(trained.weights, 2, trained.probe)
        stream.ended()
    assert report.mode == "keep"
    assert stream.error is None
    (step,) = gateway.steps(base.split("/")[3])
    assert step.version_spans is not None
    (start, one), (cut, two) = step.version_spans
    assert (start, one, two) == (0, 1, 2)
    prompt, ids = step.prompt_ids.tolist(), step.response_ids.tolist()
    assert len(ids) == 1900
    expected = first.reference.logprobs(prompt, ids)[:cut] + trained.reference.logprobs(prompt, ids)[cut:]
    assert step.rollout_log_probs is not None
    assert max(abs(a - b) for a, b in zip(step.rollout_log_probs.tolist(), expected, strict=True)) < 1e-4


def test_an_answer_that_a_publish_cuts_is_continued_under_the_new_version(
    engine: Client, gateway: Running, first: Trained, trained: Trained
) -> None:
    base = gateway.init()["base_url"]
    with publisher(gateway, mode="abort-resume") as found:
        found.publish(first.weights, 1, first.probe)
        hold_until_resumed(engine, steps=SHOWN)
        stream = Stream(gateway, base, 1900)
        found.publish(trained.weights, 2, trained.probe)
        stream.ended()
    assert stream.error is None
    (step,) = gateway.steps(base.split("/")[3])
    assert step.version_spans is not None
    assert [version for _, version in step.version_spans] == [1, 2]
    assert len(step.response_ids) == 1900


def test_a_drain_lets_an_answer_end_under_the_old_version(gateway: Running, first: Trained, trained: Trained) -> None:
    base = gateway.init()["base_url"]
    with publisher(gateway, mode="drain") as found:
        found.publish(first.weights, 1, first.probe)
        stream = Stream(gateway, base, 500)
        found.publish(trained.weights, 2, trained.probe)
        stream.ended()
    (step,) = gateway.steps(base.split("/")[3])
    assert (step.policy_version, step.version_spans) == (1, None)


def test_two_servers_get_the_same_weights(two: Running, engine: Client, second: Client, trained: Trained) -> None:
    with publisher(two) as found:
        found.check(trained.config)
        report = found.publish(trained.weights, 3, trained.probe)
    assert report.failed == {}
    assert states(two) == {address(engine): ("up", 3), address(second): ("up", 3)}
    assert max(trained.sampled(engine), trained.sampled(second)) < 1e-4


@pytest.mark.parametrize("model", [None, "judge"])
def test_only_the_servers_of_the_model_that_is_trained_are_published_to(
    pool: DataPool,
    engine: Client,
    second: Client,
    folder: Path,
    tmp_path: Path,
    first: Trained,
    trained: Trained,
    model: str | None,
) -> None:
    judge = {"judge": {"mode": "record", "addresses": address(second)}}
    with (
        with_models(pool, address(engine), folder, tmp_path / "models.json", judge) as gateway,
        publisher(gateway, model=model) as found,
    ):
        told(gateway.post(f"/pause?model={'judge' if model is None else ''}"))  # the other's: somebody else's to end
        found.check(trained.config)
        report = found.publish(trained.weights, 1, trained.probe)
        published, other = (engine, second) if model is None else (second, engine)
        assert report.failed == {}
        assert states(gateway) == {address(published): ("up", 1), address(other): ("up", 0)}
        assert published.get("/weight_info") == {"weight_version": "1"}
        assert other.get("/weight_info") == {"weight_version": "default"}
        assert trained.sampled(published) < 1e-4
        assert first.sampled(other) < 1e-4
        paused = [served.upstream.paused for served in gateway.app.state.gateway.models]
        assert paused == ([False, True] if model is None else [True, False])


def test_a_model_that_the_gateway_does_not_have_is_named(gateway: Running, trained: Trained) -> None:
    with publisher(gateway, model="judge") as found, pytest.raises(SyncFailed, match=r"'judge'.*sync\.model"):
        found.check(trained.config)


@pytest.mark.parametrize("mode", MODES)
def test_servers_without_a_gateway_are_published_to_directly(
    engine: Client, second: Client, trained: Trained, mode: str
) -> None:
    with publisher(servers=[address(engine), address(second)], mode=mode) as found:
        found.check(trained.config)
        report = found.publish(trained.weights, 3, trained.probe)
    assert report.failed == {}
    for client in (engine, second):
        assert client.get("/is_paused") == {"is_paused": False}
        assert client.get("/weight_info") == {"weight_version": "3"}
        assert trained.sampled(client) < 1e-4


def test_the_same_version_may_be_published_again_and_an_older_one_may_not(
    engine: Client, gateway: Running, first: Trained, trained: Trained
) -> None:
    with publisher(gateway) as found:
        found.publish(first.weights, 5, first.probe)
        found.publish(trained.weights, 5, trained.probe)
        with pytest.raises(InvalidInput, match="version is 4; the gateway is at 5"):
            found.publish(first.weights, 4, first.probe)
    assert trained.sampled(engine) < 1e-4


def test_a_pause_that_a_killed_trainer_left_ends_with_the_next_publish(
    engine: Client, gateway: Running, trained: Trained
) -> None:
    told(gateway.post("/pause?mode=keep"))
    with publisher(gateway) as found:
        found.publish(trained.weights, 1, trained.probe)
    assert trained.sampled(engine) < 1e-4
    told(chat(gateway, gateway.init()["base_url"], "hi", max_tokens=2))


def test_an_unverified_publish_tells_no_gap(engine: Client, gateway: Running, trained: Trained) -> None:
    with publisher(gateway, verify=False) as found:
        report = found.publish(trained.weights, 1, trained.probe)
    assert (report.gap_max, report.gap_mean) == (None, None)
    assert trained.sampled(engine) < 1e-4


def test_only_the_newest_files_are_kept(gateway: Running, first: Trained, trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with publisher(gateway, via="files", folder=tmp_path) as found:
        found.publish(first.weights, 1, first.probe)
        found.publish(trained.weights, 2, trained.probe)
    kept = sorted(made.name.rpartition("-")[0] or made.name for made in tmp_path.iterdir())
    assert kept == ["mine", "weights-2"]


def test_files_need_a_folder(gateway: Running, trained: Trained) -> None:
    with publisher(gateway, via="files") as found:
        with pytest.raises(InvalidInput, match=r"sync\.folder is not set"):
            found.check(trained.config)
        with pytest.raises(InvalidInput, match=r"sync\.folder is not set"):
            found.publish(trained.weights, 1, trained.probe)
    told(chat(gateway, gateway.init()["base_url"], "hi", max_tokens=2))


def test_the_admin_key_opens_a_gateway_that_has_one(
    pool: DataPool, engine: Client, folder: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_gateway(pool, address(engine), folder, admin_key="secret") as gateway:
        for key in (None, "wrong"):
            with publisher(gateway, admin_key=key) as found, pytest.raises(SyncFailed, match=r"401.*sync\.admin_key"):
                found.publish(trained.weights, 1, trained.probe)
        with publisher(gateway, admin_key="secret") as found:
            found.publish(trained.weights, 1, trained.probe)
        monkeypatch.setenv("HEADRACE_ADMIN_KEY", "secret")
        with publisher(gateway) as found:
            found.publish(trained.weights, 2, trained.probe)
    assert engine.get("/weight_info") == {"weight_version": "2"}


def test_what_is_no_gateway_is_said(engine: Client, trained: Trained) -> None:
    with publisher(address(engine)) as found, pytest.raises(SyncFailed, match=r"404.*Headrace gateway"):
        found.check(trained.config)
