"""LoRA adapters published to a real vLLM: each version under a new name, verified, sampled from through the gateway by
calls that name the model as ever; the version before is unloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.kit import Client
from tests.gateway.kit import Running, running_gateway, told
from tests.gateway.rollout import chat
from tests.trainer.sync.kit import IDS, Stream, address, publisher, states
from tests.vllm.conftest import HEAD
from tests.vllm.kit import TOLERANCE, TRIES, reach
from tests.vllm.server import NAME, vllm

from headrace import DataPool, Step
from headrace.data.adapter_name import adapter_version
from headrace.engine import tiny
from headrace.trainer.config import LoraConfig
from headrace.trainer.policy import Policy
from headrace.trainer.sync import Probe, SyncFailed

#: A vLLM of its own, which takes the better part of a minute to start.
pytestmark = pytest.mark.long

RANK = 8
FLAGS = ("--enable-lora", "--max-lora-rank", str(RANK))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied: an adapter leaves the served weights as they are, so that vLLM need not be able to reload them."""
    found = tmp_path_factory.mktemp("base")
    tiny.build(found, seed=0, head_dim=HEAD, tie_word_embeddings=True)
    return found


@pytest.fixture(scope="module")
def served(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    log = tmp_path_factory.mktemp("vllm") / "lora.log"
    with vllm(base, log, variables=variables, flags=FLAGS) as found, reach(found) as client:
        client.complete([1, 5, 9], max_tokens=1)  # the first answer takes long
        yield client


@pytest.fixture
def gateway(served: Client, base: Path) -> Iterator[Running]:
    with DataPool() as pool, running_gateway(pool, address(served), base) as found:
        yield found


@pytest.fixture
def policy(base: Path) -> Policy:
    return Policy(base, lora=LoraConfig(rank=RANK))


def learn(policy: Policy, seed: int) -> None:
    """A step of some optimizer: every matrix is another."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def probe(policy: Policy) -> Probe:
    return Probe(IDS, policy.raw_log_probs(IDS))


def adapters(server: Client) -> list[int | None]:
    """The versions of the adapters that a server has."""
    cards = server.get("/v1/models")["data"]
    return [adapter_version(card["id"]) for card in cards if card["id"] != NAME]


def off(policy: Policy, step: Step) -> float:
    """How far a recorded answer's log-probs are from those of a policy."""
    assert step.rollout_log_probs is not None
    ids = [*step.prompt_ids.tolist(), *step.response_ids.tolist()]
    expected = policy.raw_log_probs(ids)[len(step.prompt_ids) - 1 :]
    return float(np.abs(np.array(expected) - step.rollout_log_probs).max())


def test_each_version_is_another_adapter_and_the_one_before_is_unloaded(
    served: Client, gateway: Running, policy: Policy, base: Path, tmp_path: Path
) -> None:
    assert policy.adapter is not None
    session = gateway.init()["base_url"]
    uid = session.split("/")[3]
    with publisher(gateway, folder=tmp_path) as found:
        found.check(policy.model.config, RANK)
        for version in (1, 2, 3):
            learn(policy, version)
            report = found.publish(policy.adapter.snapshot(), version, probe(policy))
            assert report.failed == {}
            assert report.gap_max is not None
            assert report.gap_max < TOLERANCE
            assert adapters(served) == [version]
            assert states(gateway) == {address(served): ("up", version)}
            told(chat(gateway, session, "hi", max_tokens=8))
            step = gateway.steps(uid)[-1]
            assert step.policy_version == version
            assert off(policy, step) < TOLERANCE
            with policy.adapter.disabled():
                assert off(policy, step) > 10 * TOLERANCE
            print(f"held {report.hold_s * 1e3:.0f} ms of {report.seconds * 1e3:.0f}, gap {report.gap_max:.1g}")
        (left,) = tmp_path.iterdir()
        assert sum(file.stat().st_size for file in left.iterdir()) < (base / "model.safetensors").stat().st_size
        # A gateway that is started anew finds out by itself which adapter the version is.
        with DataPool() as pool, running_gateway(pool, address(served), base) as other:
            session = other.init()["base_url"]
            told(chat(other, session, "hi", max_tokens=8))
            assert off(policy, other.steps(session.split("/")[3])[-1]) < TOLERANCE
        # What a server does not have is found, and nothing is sampled from it.
        learn(policy, 4)
        wrong = probe(policy)
        learn(policy, 5)
        with pytest.raises(SyncFailed, match="does not have the weights"):
            found.publish(policy.adapter.snapshot(), 4, wrong)
        report = found.publish(policy.adapter.snapshot(), 5, probe(policy))
        assert adapters(served) == [5]
        assert states(gateway) == {address(served): ("up", 5)}


@pytest.mark.alone
def test_an_answer_in_flight_goes_on_under_the_new_adapter(
    served: Client, gateway: Running, policy: Policy, tmp_path: Path
) -> None:
    assert policy.adapter is not None
    with publisher(gateway, folder=tmp_path) as found:
        for version in range(10, 10 + 2 * TRIES, 2):
            learn(policy, version)
            found.publish(policy.adapter.snapshot(), version, probe(policy))
            session = gateway.init()["base_url"]
            stream = Stream(gateway, session, 1500)
            learn(policy, version + 1)
            found.publish(policy.adapter.snapshot(), version + 1, probe(policy))
            stream.ended()
            assert stream.error is None
            (step,) = gateway.steps(session.split("/")[3])
            if step.version_spans is not None:
                break
        else:
            raise AssertionError(f"in {TRIES} tries the answer had ended before the adapter came")
    assert [number for _, number in step.version_spans] == [version, version + 1]
    cut = step.version_spans[1][0]
    ids = [*step.prompt_ids.tolist(), *step.response_ids.tolist()]
    expected = np.array(policy.raw_log_probs(ids)[len(step.prompt_ids) - 1 :])
    assert step.rollout_log_probs is not None
    assert np.abs(expected - step.rollout_log_probs)[cut:].max() < TOLERANCE
    assert np.abs(expected - step.rollout_log_probs)[:cut].max() > 10 * TOLERANCE


def test_an_adapter_that_is_too_wide_is_named_before_training(
    served: Client, gateway: Running, policy: Policy, tmp_path: Path
) -> None:
    with publisher(gateway, folder=tmp_path, lora="adapter") as found:
        with pytest.raises(SyncFailed, match=f"--max-lora-rank {RANK}, and the adapter's rank is 16"):
            found.check(policy.model.config, 16)
        found.check(policy.model.config, RANK)
