"""Weights travel in what the servers compute in, tied ones once, and a server has of them what it would have rounded
itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.kit import Client, serving
from tests.trainer.sync.kit import Trained, address, between, publisher

from headrace.engine import tiny
from headrace.trainer.config import LoraConfig
from headrace.trainer.policy import Policy
from headrace.trainer.sync import Probe, SyncFailed
from headrace.trainer.sync.weights import EMBED, HEAD, WeightDelivery, WeightTransport

IDS = list(range(1, 60, 3))


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Iterator[Client]:
    """An engine that computes in bfloat16."""
    with serving(model=str(folder), dtype="bfloat16") as found:
        yield found


def delivered(weights: Any, tmp_path: Path, **transport: Any) -> dict[str, torch.Tensor]:
    found = WeightDelivery(weights, 1, WeightTransport(files=True, **transport), tmp_path)
    found.close()
    assert found.folder is not None
    tensors: dict[str, torch.Tensor] = load_file(found.folder / "model.safetensors")
    return tensors


def test_an_engine_says_what_it_computes_in(narrow: Client, engine: Client) -> None:
    for server, dtype in ((narrow, "torch.bfloat16"), (engine, "torch.float32")):
        assert server.get("/server_info")["vllm_config"]["model_config"]["dtype"] == dtype


def test_weights_go_in_the_servers_dtype_and_are_snapped_in_it(
    narrow: Client, engine: Client, trained: Trained, tmp_path: Path
) -> None:
    for servers, expected in (
        ([narrow], torch.bfloat16),
        ([engine], torch.float32),
        ([narrow, engine], torch.float32),
    ):
        with publisher(servers=[address(one) for one in servers], via="files", folder=tmp_path) as found:
            found.check(trained.config)
            taken = found.snapshot(trained.weights)
            assert {tensor.dtype for tensor in taken.values()} == {expected}
            assert all(tensor.data_ptr() != trained.weights[name].data_ptr() for name, tensor in taken.items())
            found.publish(trained.weights, 1, trained.probe)
        (made,) = tmp_path.iterdir()
        tensors = load_file(made / "model.safetensors")
        assert all(torch.equal(tensor, trained.weights[name].to(expected)) for name, tensor in tensors.items())


def test_what_is_said_of_the_dtype_wins(engine: Client, trained: Trained, tmp_path: Path) -> None:
    with publisher(servers=[address(engine)], via="files", folder=tmp_path, dtype="bfloat16") as found:
        report = found.publish(trained.weights, 1, trained.probe)
    assert report.gap_max is not None
    assert report.gap_max > 1e-5
    (made,) = tmp_path.iterdir()
    assert {tensor.dtype for tensor in load_file(made / "model.safetensors").values()} == {torch.bfloat16}


def test_fewer_bits_are_never_made_more(tmp_path: Path) -> None:
    given = {"a": torch.randn(3, 3).to(torch.bfloat16), "b": torch.randn(3)}
    found = delivered(given, tmp_path, dtype="float32")
    assert (found["a"].dtype, found["b"].dtype) == (torch.bfloat16, torch.float32)


def test_tied_weights_go_once(tmp_path: Path) -> None:
    embed = torch.randn(50, 8)
    both, one = {EMBED: embed, HEAD: embed}, {EMBED: embed}
    for given in (both, one):
        assert set(delivered(given, tmp_path / "apart")) == {EMBED, HEAD}
        assert set(delivered(given, tmp_path / "tied", tied_head=False)) == {EMBED}
        shared = WeightDelivery(given, 1, WeightTransport(shared=True, dtype="bfloat16"))
        try:
            first, second = shared.manifest
            assert first["offset"] == second["offset"]
            assert {first["name"], second["name"]} == {EMBED, HEAD}
            assert 800 <= shared.block.size < 1600 or shared.block.size == 4096  # a whole page, where blocks are pages
        finally:
            shared.close()
    assert set(delivered({EMBED: embed, HEAD: embed + 1}, tmp_path / "untied", tied_head=False)) == {EMBED, HEAD}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tied")
    tiny.build(found, 0, tie_word_embeddings=True)
    return found


def adapted(folder: Path, seed: int = 0) -> Policy:
    """A policy whose adapter has learned something."""
    policy = Policy(folder, lora=LoraConfig(rank=4))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return policy


@pytest.mark.parametrize("via", ["shared_memory", "files"])
def test_an_engine_without_adapters_gets_them_merged(tied: Path, tmp_path: Path, via: str) -> None:
    policy = adapted(tied)
    assert policy.adapter is not None
    with serving(model=str(tied)) as engine, publisher(servers=[address(engine)], via=via, folder=tmp_path) as found:
        found.check(policy.model.config, 4)
        report = found.publish(policy.adapter.snapshot(), 1, Probe(IDS, policy.raw_log_probs(IDS)))
        assert report.gap_max is not None
        assert report.gap_max < 1e-4
        with policy.adapter.disabled(), pytest.raises(SyncFailed, match="does not have the weights"):
            found.publish(policy.adapter.snapshot(), 2, Probe(IDS, policy.raw_log_probs(IDS)))


def test_who_insists_on_adapters_is_told_why_a_server_gets_none(tied: Path, tmp_path: Path) -> None:
    policy = adapted(tied)
    with (
        serving(model=str(tied)) as engine,
        publisher(servers=[address(engine)], folder=tmp_path, lora="adapter") as found,
        pytest.raises(SyncFailed, match="without a gateway"),
    ):
        found.check(policy.model.config, 4)


def test_which_vllm_takes_adapters(engine: Client, trained: Trained, tmp_path: Path) -> None:
    """By what its /server_info says, and by what the adapter is."""
    from headrace.trainer.sync.http import ServerHttp
    from headrace.trainer.sync.servers import identify

    def info(rank: int | None, loads: bool) -> dict[str, Any]:
        lora = None if rank is None else {"max_lora_rank": rank}
        config = {"model_config": {"dtype": "torch.bfloat16"}, "lora_config": lora}
        return {"vllm_config": config, "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": loads}}

    with between(address(engine)) as vllm:
        for rank, loads, said in ((None, True, "--enable-lora"), (8, False, "RUNTIME_LORA"), (2, True, "rank is 4")):
            vllm.answers = {"/version": (200, {"version": "0.32.0"}), "/server_info": (200, info(rank, loads))}
            found = identify(ServerHttp(vllm.address, key=None, timeout_s=30), "auto")
            assert found.dtype == "bfloat16"
            assert said in (found.why_no_adapter(4) or "")
        vllm.answers["/server_info"] = (200, info(8, True))
        assert identify(ServerHttp(vllm.address, key=None, timeout_s=30), "auto").why_no_adapter(4) is None
