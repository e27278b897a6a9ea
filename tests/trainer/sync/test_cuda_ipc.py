"""Weights by CUDA IPC: where trainer and engine are on one GPU of one machine, and can read each other's memory there;
by shared memory everywhere else. What needs a GPU runs where there is one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.kit import Client, serving
from tests.trainer.sync.kit import IDS, Between, Trained, address, between, publisher

from headrace.engine import cuda_ipc
from headrace.engine.cuda_ipc import CudaHandle, GpuId, packed
from headrace.engine.weights import BadWeights, placed, read_manifest
from headrace.net.blocking_client import BlockingHttpClient
from headrace.trainer.sync import SyncFailed
from headrace.trainer.sync.http import ServerHttp
from headrace.trainer.sync.servers import identify

HANDLE = CudaHandle("bQ==", 0, 64, "Yw==", 0, "ZQ==", True)
OWN = GpuId("this-machine", "GPU-1")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class StandInBlock:
    """A block of a GPU that is not there."""

    checksum = 7

    def export(self) -> CudaHandle:
        return HANDLE


@pytest.fixture
def trainer_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer believes its weights to be on a GPU."""
    monkeypatch.setattr(cuda_ipc, "gpu_id", lambda device: OWN)
    monkeypatch.setattr(cuda_ipc, "trial_block", lambda device: StandInBlock())


@contextmanager
def engine_on(engine: Client, gpu: dict[str, str] | None) -> Iterator[Between]:
    """An engine that says that it computes on this GPU."""
    with between(address(engine)) as found:
        info = engine.get("/server_info")
        found.answers["/server_info"] = (200, {**info, "gpu": gpu})
        yield found


SAME = {"host": "this-machine", "uuid": "GPU-1"}


# -- the block ---------------------------------------------------------------------------------------------------------


def test_tensors_are_packed_in_the_asked_dtype_and_what_is_tied_once() -> None:
    embed = torch.randn(50, 8)
    given = {"embed": embed, "head": embed, "norm": torch.randn(3), "narrow": torch.randn(5).to(torch.bfloat16)}
    block, manifest = packed(given, torch.bfloat16, torch.device("cpu"))
    assert manifest[0]["offset"] == manifest[1]["offset"]
    assert len(block) == 832 + 64 + 64

    def read(entry: Any) -> torch.Tensor:
        dtype, shape, place = placed(entry, len(block))
        return block[place].view(dtype).view(shape)

    found = read_manifest(manifest, read)
    assert found["embed"] is found["head"]
    for name, tensor in given.items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16)), name


def test_the_sum_of_a_block_tells_one_changed_byte() -> None:
    block, _ = packed({"a": torch.randn(33)}, None, torch.device("cpu"))
    before = cuda_ipc.checksum(block)
    block[70] ^= 1
    assert cuda_ipc.checksum(block) != before


# -- who gets them so --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "answers", "reason"),
    [
        (None, {}, "names no GPU"),
        ({**SAME, "host": "another"}, {}, "another machine"),
        ({**SAME, "uuid": "GPU-2"}, {}, "another GPU"),
        (SAME, {}, "cannot read the trainer's GPU memory: .*computes on cpu"),
        (SAME, {"/sum_cuda_ipc": (404, {"detail": "Not Found"})}, "cannot read the trainer's GPU memory"),
        (SAME, {"/sum_cuda_ipc": (200, {"checksum": 8})}, "read something else"),
    ],
)
def test_an_engine_that_cannot_gets_shared_memory_or_the_reason(
    engine: Client, trained: Trained, trainer_gpu: None, gpu: Any, answers: dict[str, Any], reason: str
) -> None:
    with engine_on(engine, gpu) as server:
        server.answers.update(answers)
        with (
            publisher(servers=[server.address], via="cuda_ipc") as found,
            pytest.raises(SyncFailed, match=f"sync.via is cuda_ipc: .*{reason}"),
        ):
            found.publish(trained.weights, 1, trained.probe)
        with publisher(servers=[server.address]) as found:
            report = found.publish(trained.weights, 2, trained.probe)
        assert report.gap_max is not None
        assert report.gap_max < 1e-4
        assert "/load_weights_shm" in server.asked
        assert "/load_weights_cuda_ipc" not in server.asked
    assert trained.sampled(engine) < 1e-4


def test_weights_in_the_cpus_memory_are_not_offered(engine: Client, trained: Trained) -> None:
    with (
        publisher(servers=[address(engine)], via="cuda_ipc") as found,
        pytest.raises(SyncFailed, match="weights are on cpu"),
    ):
        found.publish(trained.weights, 1, trained.probe)


def test_a_gpu_without_room_for_a_copy_is_passed_by(
    engine: Client, trained: Trained, trainer_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(cuda_ipc, "GpuBlock", full)
    with engine_on(engine, SAME) as server:
        server.answers["/sum_cuda_ipc"] = (200, {"checksum": StandInBlock.checksum})
        with publisher(servers=[server.address]) as found:
            found.publish(trained.weights, 1, trained.probe)
        assert "/load_weights_shm" in server.asked
    assert trained.sampled(engine) < 1e-4


def test_a_server_that_refuses_the_block_is_taken_out_and_keeps_what_it_had(
    engine: Client, first: Trained, trained: Trained, trainer_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Packed(StandInBlock):
        def __init__(self, tensors: Any, *_: Any) -> None:
            self.manifest = packed(tensors, None, torch.device("cpu"))[1]

    monkeypatch.setattr(cuda_ipc, "GpuBlock", Packed)
    with engine_on(engine, SAME) as server:
        server.answers["/sum_cuda_ipc"] = (200, {"checksum": StandInBlock.checksum})
        with publisher(servers=[server.address]) as found, pytest.raises(SyncFailed, match="computes on cpu"):
            found.publish(trained.weights, 1, trained.probe)
        assert "/load_weights_cuda_ipc" in server.asked
    assert engine.get("/weight_info") == {"weight_version": "unverified"}
    engine.post("/resume")
    assert first.sampled(engine) < 1e-4


@pytest.mark.parametrize("route", ["/load_weights_cuda_ipc", "/sum_cuda_ipc"])
def test_what_is_no_block_is_refused(own: Client, route: str) -> None:
    block = {"memory": "bQ==", "offset": 0, "size": 64, "counter": "Yw==", "counter_offset": 0, "event": "ZQ=="}
    body = {"manifest": [], "checksum": 1}
    assert own.refused(route, {**body, "block": block})[0] == 400  # without event_sync
    status, error = own.refused(route, {**body, "block": {**block, "event_sync": True}})
    assert status == 400
    assert "CUDA IPC" in error["message"]


# -- vLLM's own --------------------------------------------------------------------------------------------------------


@contextmanager
def vllm_with(engine: Client, answers: dict[str, Any], backend: str | None = "ipc") -> Iterator[Between]:
    """What a vLLM says that was started with a weight transfer."""
    with between(address(engine)) as found:
        info = engine.get("/server_info")
        config = {**info["vllm_config"], "weight_transfer_config": backend and {"backend": backend}}
        variables = {"VLLM_ALLOW_INSECURE_SERIALIZATION": True}
        found.answers["/version"] = (200, {"version": "0.32.0"})
        found.answers["/server_info"] = (200, {"vllm_config": config, "vllm_env": variables})
        found.answers["/get_world_size"] = (200, {"world_size": 1})
        found.answers["/init_weight_transfer_engine"] = (200, {"message": "Weight transfer initialized"})
        found.answers.update(answers)
        yield found


@pytest.mark.parametrize(
    ("backend", "answers", "reason"),
    [
        ("ipc", {}, None),
        (None, {}, "start it with --weight-transfer-config"),
        ("nccl", {}, "start it with --weight-transfer-config"),
        ("ipc", {"/get_world_size": (200, {"world_size": 2})}, "several GPUs"),
        ("ipc", {"/init_weight_transfer_engine": (500, {"error": "not configured"})}, "not configured"),
    ],
)
def test_vllm_is_asked_whether_it_takes_weights_so(
    engine: Client, backend: str | None, answers: dict[str, Any], reason: str | None
) -> None:
    with vllm_with(engine, answers, backend) as server:
        found = identify(ServerHttp(server.address, key=None, timeout_s=60), "cuda_ipc")
        why = found.why_no_cuda_ipc(torch.device("cuda:0"))
        assert why is None if reason is None else reason in str(why)
        assert ("/init_weight_transfer_engine" in server.asked) == (
            backend == "ipc" and "/get_world_size" not in answers
        )


def test_vllm_gets_files_unless_cuda_ipc_is_asked_for_and_then_the_reason(
    engine: Client, trained: Trained, tmp_path: Path
) -> None:
    with vllm_with(engine, {}) as server:
        assert not identify(ServerHttp(server.address, key=None, timeout_s=60), "auto").shared
        with (
            publisher(servers=[server.address], via="cuda_ipc") as found,
            pytest.raises(SyncFailed, match="weights are on cpu"),
        ):
            found.publish(trained.weights, 1, trained.probe)
        assert "/start_weight_update" not in server.asked


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@contextmanager
def engine_process(folder: Path) -> Iterator[str]:
    args = ["--model", str(folder), "--port", "0", "--device", "cuda", "--dtype", "float32"]
    command = [sys.executable, "-m", "headrace", "engine", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        assert "ready" in process.stdout.readline()
        try:
            yield found[0]
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[str]:
    with engine_process(folder) as found:
        yield found


def scored(server: str) -> list[float]:
    answer = BlockingHttpClient(server, timeout_s=120).request("POST", "/score_tokens", json={"prompt_token_ids": IDS})
    found: list[float] = answer.json()["logprobs"]
    return found


def version(server: str) -> str:
    return str(BlockingHttpClient(server, timeout_s=120).request("GET", "/weight_info").json()["weight_version"])


def loaded(server: str) -> tuple[str, list[float]]:
    """The version, and scores under it: no load came in between."""
    while True:
        before, scores = version(server), scored(server)
        if version(server) == before:
            return before, scores


@on_gpu
def test_weights_reach_an_engine_on_the_same_gpu_and_nothing_is_left_behind(
    process: str, first: Trained, trained: Trained
) -> None:
    held = []
    with publisher(servers=[process], via="cuda_ipc") as found:
        for number in range(1, 9):
            which = (first, trained)[number % 2]
            on_device = {name: tensor.cuda() for name, tensor in which.weights.items()}
            report = found.publish(on_device, number, which.probe)
            assert report.failed == {}
            assert version(process) == str(number)
            del on_device
            held.append(torch.cuda.memory_allocated())
    assert len(set(held[1:])) == 1


@on_gpu
def test_an_engine_in_the_trainers_own_process_gets_shared_memory(
    folder: Path, first: Trained, trained: Trained
) -> None:
    with serving(model=str(folder), device="cuda") as own, publisher(servers=[address(own)]) as found:
        report = found.publish({name: tensor.cuda() for name, tensor in trained.weights.items()}, 1, trained.probe)
    assert report.failed == {}


@on_gpu
def test_a_block_that_is_not_what_was_packed_is_refused(process: str, first: Trained) -> None:
    block = cuda_ipc.GpuBlock(
        {name: tensor.cuda() for name, tensor in first.weights.items()}, None, torch.device("cuda:0")
    )
    before = version(process)
    body = {"block": asdict(block.export()), "manifest": block.manifest, "checksum": block.checksum + 1, "version": "x"}
    answer = BlockingHttpClient(process, timeout_s=120).request("POST", "/load_weights_cuda_ipc", json=body)
    assert answer.status == 400
    assert "its sum is another" in answer.error_text()
    assert version(process) == before


KILLED = """
import os, signal, sys, threading, torch
from dataclasses import asdict
from safetensors.torch import load_file
from headrace.engine.cuda_ipc import GpuBlock
from headrace.net.blocking_client import BlockingHttpClient

server, folder, after_ms = sys.argv[1], sys.argv[2], float(sys.argv[3])
tensors = {name: tensor.cuda() for name, tensor in load_file(folder + "/model.safetensors").items()}
block = GpuBlock(tensors, None, torch.device("cuda:0"))
body = {"block": asdict(block.export()), "manifest": block.manifest, "checksum": block.checksum, "version": "killed"}
threading.Timer(after_ms / 1000, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
try:
    BlockingHttpClient(server, timeout_s=60).request("POST", "/load_weights_cuda_ipc", json=body)
finally:
    threading.Event().wait()
"""


@on_gpu
@pytest.mark.parametrize("after_ms", [0.1, 1, 2, 4, 8, 200])
def test_a_trainer_killed_at_any_point_leaves_the_old_weights_or_the_new(
    process: str, first: Trained, trained: Trained, after_ms: float
) -> None:
    with publisher(servers=[process], via="cuda_ipc") as found:
        found.publish({name: tensor.cuda() for name, tensor in first.weights.items()}, 1, first.probe)
    command = [sys.executable, "-c", KILLED, process, str(trained.folder), str(after_ms)]
    ended = subprocess.run(command, env=os.environ.copy(), check=False)
    assert ended.returncode == -signal.SIGKILL
    said, scores = loaded(process)
    assert {"1": first, "killed": trained}[said].probe.gap(scores).largest < 1e-3


@on_gpu
def test_a_handle_of_nothing_is_refused_and_the_engine_goes_on(process: str) -> None:
    with pytest.raises(BadWeights), cuda_ipc.opened(HANDLE, torch.device("cuda:0")):
        pass
    assert scored(process)
