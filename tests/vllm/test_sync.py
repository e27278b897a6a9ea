"""Weights published to a real vLLM: it has them, nothing else was sampled from, and tied embeddings are found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.engine.kit import Client, gap
from tests.gateway.kit import Running, running_gateway, told
from tests.gateway.rollout import chat
from tests.matrix import usual
from tests.trainer.sync.kit import Stream, Trained, address, publisher, states
from tests.vllm.conftest import HEAD
from tests.vllm.kit import PROMPT, TOLERANCE, TRIES, reach
from tests.vllm.server import vllm

from headrace import DataPool
from headrace.engine import tiny
from headrace.trainer.sync import SyncFailed
from headrace.trainer.sync.untie import untie

MODES = usual(["abort-resume", "drain", "keep"])


@pytest.fixture
def policy(folder: Path) -> Trained:
    """What the server serves, as a trainer holds it."""
    return Trained(folder)


@pytest.fixture
def gateway(theirs: Client, folder: Path, policy: Trained) -> Iterator[Running]:
    """A gateway before vLLM, which has its first weights and no version again at the end."""
    with DataPool() as pool, running_gateway(pool, address(theirs), folder) as found:
        yield found
    theirs.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
    theirs.post("/reset_prefix_cache")
    theirs.post("/update_weight_version", {"new_version": "default"})
    theirs.post("/resume")


def learn(policy: Trained, seed: int) -> None:
    """A step of some optimizer: every weight is another."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.reference.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


def sampled(server: Client, policy: Trained) -> float:
    """How far what a server samples is from these weights."""
    found = server.complete(PROMPT, temperature=1.0, max_tokens=20, seed=1, ignore_eos=True)
    return gap(found["logprobs"]["token_logprobs"], policy.reference.logprobs(PROMPT, found["token_ids"]))


@pytest.mark.parametrize("mode", MODES)
def test_three_versions_follow_each_other(
    theirs: Client, gateway: Running, policy: Trained, tmp_path: Path, mode: str
) -> None:
    base = gateway.init()["base_url"]
    with publisher(gateway, mode=mode, folder=tmp_path) as found:
        found.check(policy.config)
        for version in (1, 2, 3):
            before = sampled(theirs, policy)
            learn(policy, version)
            assert sampled(theirs, policy) > 10 * TOLERANCE > before
            report = found.publish(policy.weights, version, policy.probe)
            assert report.failed == {}
            assert report.gap_max is not None
            assert report.gap_max < TOLERANCE
            assert sampled(theirs, policy) < TOLERANCE
            assert states(gateway) == {address(theirs): ("up", version)}
            told(chat(gateway, base, "hi", max_tokens=4))
            print(f"{mode}: held {report.hold_s * 1e3:.0f} ms of {report.seconds * 1e3:.0f}, gap {report.gap_max:.1g}")
    assert [step.policy_version for step in gateway.steps(base.split("/")[3])] == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.alone
@pytest.mark.parametrize("mode", usual(["keep", "abort-resume"]))
def test_an_answer_in_flight_straddles_a_publish(
    gateway: Running, policy: Trained, tmp_path: Path, folder: Path, mode: str
) -> None:
    old = Trained(folder)
    learn(policy, 1)
    with publisher(gateway, mode=mode, folder=tmp_path) as found:
        for version in range(1, 2 * TRIES, 2):
            base = gateway.init()["base_url"]
            found.publish(old.weights, version, old.probe)
            stream = Stream(gateway, base, 1500)
            found.publish(policy.weights, version + 1, policy.probe)
            stream.ended()
            assert stream.error is None
            (step,) = gateway.steps(base.split("/")[3])
            if step.version_spans is not None:
                break
        else:
            raise AssertionError(f"in {TRIES} tries the answer had ended before the weights came")
    (_, one), (cut, two) = step.version_spans
    assert (one, two) == (version, version + 1)
    prompt, ids = step.prompt_ids.tolist(), step.response_ids.tolist()
    expected = old.reference.logprobs(prompt, ids)[:cut] + policy.reference.logprobs(prompt, ids)[cut:]
    assert step.rollout_log_probs is not None
    assert gap(step.rollout_log_probs.tolist(), expected) < TOLERANCE


@pytest.mark.long
def test_tied_embeddings_are_refused_and_a_head_that_stayed_old_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.build(tmp_path / "tied", seed=0, head_dim=HEAD, tie_word_embeddings=True)
    policy = Trained(tmp_path / "tied")
    learn(policy, 1)
    weights = dict(policy.reference.model.named_parameters())
    assert "lm_head.weight" not in weights
    with (
        vllm(tmp_path / "tied", tmp_path / "tied.log") as served,
        publisher(servers=[served], folder=tmp_path / "files") as found,
    ):
        with pytest.raises(SyncFailed, match=r"ties lm_head.*headrace\.trainer\.sync\.untie"):
            found.check(policy.config)
        with monkeypatch.context() as patched:
            patched.setattr("headrace.trainer.sync.weights.EMBED", "none")  # so that lm_head.weight is not named
            with pytest.raises(SyncFailed, match="does not have the weights"):
                found.publish(weights, 1, policy.probe)
        report = found.publish(weights, 1, policy.probe)
        assert report.gap_max is not None
        assert report.gap_max < TOLERANCE
        # What a reload that failed half-way leaves behind is nobody's weights.
        with pytest.raises(SyncFailed, match="/collective_rpc with 500"):
            found.publish({**weights, "model.norm.weight": torch.zeros(7)}, 2, policy.probe)


@pytest.mark.long
def test_an_untied_copy_takes_the_weights_of_a_tied_model(tmp_path: Path) -> None:
    tiny.build(tmp_path / "tied", seed=0, head_dim=HEAD, tie_word_embeddings=True)
    policy = Trained(tmp_path / "tied")
    untie(tmp_path / "tied", tmp_path / "untied")
    with (
        vllm(tmp_path / "untied", tmp_path / "untied.log") as served,
        publisher(servers=[served], folder=tmp_path / "files") as found,
        reach(served) as client,
    ):
        found.check(policy.config)
        for version in (1, 2):
            learn(policy, version)
            report = found.publish(dict(policy.reference.model.named_parameters()), version, policy.probe)
            assert report.gap_max is not None
            assert report.gap_max < TOLERANCE
            assert sampled(client, policy) < TOLERANCE
