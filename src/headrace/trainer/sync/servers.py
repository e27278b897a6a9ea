"""A rollout server as the trainer controls it: which kind it is, how weights are loaded and verified.

Headrace's engine scores tokens while it is paused. vLLM must run for that; the caller keeps what it samples meanwhile
from being recorded.
"""

from __future__ import annotations

import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

from headrace.data.adapter_name import adapter_version
from headrace.data.errors import shown
from headrace.data.weight_version import UNVERIFIED
from headrace.trainer.sync import vllm_ipc
from headrace.trainer.sync.http import ServerFailed, ServerHttp
from headrace.trainer.sync.weights import DTYPES, WeightDelivery

if TYPE_CHECKING:
    import torch

#: Seconds for requests that a healthy server answers at once.
STATUS_TIMEOUT_S = 10.0
#: Seconds for vLLM's /server_info, which inspects the whole machine first.
VLLM_INFO_TIMEOUT_S = 60.0

Via = Literal["auto", "cuda_ipc", "shared_memory", "files"]


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of its configuration: what it computes in, the largest rank of an adapter that it computes,
    whether it loads adapters while it runs, which GPU it computes on, as (machine, GPU), and whether it takes weights
    by vLLM's own CUDA IPC."""

    dtype: str | None = None
    max_lora_rank: int | None = None
    loads_adapters: bool = False
    gpu: tuple[str, str] | None = None
    vllm_ipc: bool = False


class RolloutServer(ABC):
    """One server. Every method raises `ServerFailed` where the server does not do what it is asked."""

    #: Whether it can score tokens while it is paused.
    scores_paused: ClassVar[bool]

    def __init__(self, http: ServerHttp, model: str, root: str | None, info: ServerInfo, *, shared: bool) -> None:
        self.http, self.model, self.root, self.dtype = http, model, root, info.dtype
        self.address = http.address
        #: Weights come by memory, not by files: by shared memory, unless by CUDA IPC.
        self.shared = shared
        self.cuda_ipc = False
        self.gpu = info.gpu
        #: A LoRA adapter comes by itself; the server has the weights beside which it is trained.
        self.by_adapter = False
        #: The adapter that it samples with, once that is loaded.
        self.adapter: str | None = None

    @abstractmethod
    def load(self, delivery: WeightDelivery) -> None:
        """Loads the weights, and drops caches computed with others."""

    @abstractmethod
    def score(self, ids: list[int]) -> tuple[list[float], str | None]:
        """The log-prob of each token but the first, and the precision that they were computed in, where it is known."""

    @abstractmethod
    def why_no_adapter(self, rank: int) -> str | None:
        """Why it cannot take a LoRA adapter of this rank; None where it can."""

    @abstractmethod
    def why_no_cuda_ipc(self, device: torch.device) -> str | None:
        """Why weights that are on `device` cannot come by CUDA IPC; None where it is agreed that they do."""

    def unload_others(self) -> None:
        """Unloads the adapters of earlier versions. To be called once no call uses them."""
        return  # most have none

    def tied(self) -> bool | None:
        """Whether its model ties `lm_head` to the embeddings; None where its folder cannot be read from here."""
        return None if self.root is None else ties(Path(self.root))

    def pause(self, mode: Literal["keep", "wait", "abort"]) -> None:
        """Pauses, and freezes calls in flight (`keep`), waits for their end (`wait`), or aborts them (`abort`)."""
        self.http.post(f"/pause?mode={mode}")

    def resume(self) -> None:
        self.http.post("/resume")

    def discard(self) -> None:
        """Aborts calls in flight, and marks the server's weights as unverified."""
        self.http.post("/pause?mode=abort", within_s=STATUS_TIMEOUT_S)
        self.set_version(UNVERIFIED, within_s=STATUS_TIMEOUT_S)

    def set_version(self, version: str, within_s: float | None = None) -> None:
        """Sets what the server says of its weights: the number of their version, or `UNVERIFIED`."""
        self.http.post("/update_weight_version", {"new_version": version}, within_s)

    def _from_files(self, delivery: WeightDelivery) -> None:
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(delivery.folder)}}
        self.http.post("/collective_rpc", asked)


class HeadraceEngine(RolloutServer):
    """Headrace's own engine. Loading weights drops its caches."""

    scores_paused = True

    def load(self, delivery: WeightDelivery) -> None:
        if self.cuda_ipc:
            on_gpu = delivery.on_gpu
            assert on_gpu is not None
            block = {"block": asdict(on_gpu.export()), "manifest": on_gpu.manifest, "checksum": on_gpu.checksum}
            self.http.post("/load_weights_cuda_ipc", block)
        elif self.shared:
            self.http.post("/load_weights_shm", {"name": delivery.block.name, "manifest": delivery.manifest})
        else:
            self._from_files(delivery)

    def why_no_cuda_ipc(self, device: torch.device) -> str | None:
        from headrace.engine import cuda_ipc

        own = cuda_ipc.gpu_id(device)
        if own is None:
            return f"the trainer's weights are on {device.type}, not on a GPU"
        if self.gpu is None:
            return f"{self.address} names no GPU that it computes on"
        if self.gpu[0] != own.host:
            return f"{self.address} runs on another machine"
        if self.gpu[1] != own.uuid:
            return f"{self.address} computes on another GPU ({self.gpu[1]}; the trainer's is {own.uuid})"
        try:
            trial = cuda_ipc.trial_block(device)
            found = self.http.post("/sum_cuda_ipc", {"block": asdict(trial.export())}, STATUS_TIMEOUT_S)
        except (ServerFailed, RuntimeError) as error:  # RuntimeError: CUDA's own
            return f"{self.address} cannot read the trainer's GPU memory: {error}"
        if not isinstance(found, dict) or found.get("checksum") != trial.checksum:
            return f"{self.address} read something else in the trainer's GPU memory: {shown(found)}"
        return None

    def why_no_adapter(self, rank: int) -> str | None:
        return f"{self.address} is Headrace's engine, which computes without adapters"

    def score(self, ids: list[int]) -> tuple[list[float], str | None]:
        found = self.http.post("/score_tokens", {"prompt_token_ids": ids})
        return found["logprobs"], found["dtype"]


class Vllm(RolloutServer):
    """vLLM 0.32 with its development routes (`VLLM_SERVER_DEV_MODE=1`)."""

    scores_paused = False

    def __init__(
        self,
        http: ServerHttp,
        model: str,
        root: str | None,
        info: ServerInfo,
        adapters: Sequence[str] = (),
        *,
        shared: bool = False,
    ) -> None:
        """`adapters` are those of ours that it has loaded already. `shared` is by CUDA IPC alone."""
        super().__init__(http, model, root, info, shared=shared)
        self._info, self._adapters = info, adapters

    def why_no_adapter(self, rank: int) -> str | None:
        if self._info.max_lora_rank is None or not self._info.loads_adapters:
            flags = f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora --max-lora-rank {rank}"
            return f"{self.address} takes no adapters; start vLLM with {flags}"
        if rank > self._info.max_lora_rank:
            return f"{self.address} has --max-lora-rank {self._info.max_lora_rank}, and the adapter's rank is {rank}"
        return None

    def why_no_cuda_ipc(self, device: torch.device) -> str | None:
        if not self._info.vllm_ipc:
            return f"{self.address} is vLLM without it; start it with {vllm_ipc.FLAGS}"
        if device.type != "cuda":
            return f"the trainer's weights are on {device.type}, not on a GPU"
        if not _is_here(self.address):
            return f"{self.address} runs on another machine"
        try:
            size = self.http.get("/get_world_size", STATUS_TIMEOUT_S)
            if size != {"world_size": 1}:
                return f"{self.address} computes on several GPUs: {shown(size)}"
            self.http.post("/init_weight_transfer_engine", vllm_ipc.INIT, STATUS_TIMEOUT_S)
        except ServerFailed as error:
            return str(error)
        return None

    def load(self, delivery: WeightDelivery) -> None:
        if self.by_adapter:
            # Under a new name: nothing that was cached with another adapter is used for it.
            self.http.tell(
                "/v1/load_lora_adapter", {"lora_name": delivery.adapter_name, "lora_path": str(delivery.adapter)}
            )
            self.adapter = delivery.adapter_name
            return
        if self.cuda_ipc:
            assert delivery.on_gpu is not None
            vllm_ipc.send(self.http, delivery.on_gpu)
        else:
            self._from_files(delivery)
        # What was frozen is computed anew: its tokens stay, its keys and values were the old weights'.
        found = self.http.post("/reset_prefix_cache?reset_running_requests=true")
        if not isinstance(found, dict) or found.get("success") is not True:
            raise ServerFailed(f"{self.address} did not reset its prefix cache: {shown(found)}")

    def score(self, ids: list[int]) -> tuple[list[float], str | None]:
        model = self.adapter or self.model
        asked = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        found = self.http.post("/v1/completions", asked)
        try:
            table = found["choices"][0]["prompt_logprobs"]
            values = [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], table[1:], strict=True)]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ServerFailed(f"{self.address} gave no prompt_logprobs: {shown(found)}") from error
        return values, self.dtype

    def unload_others(self) -> None:
        for name in self._adapters:
            if name != self.adapter:
                self.http.tell("/v1/unload_lora_adapter", {"lora_name": name})


def identify(http: ServerHttp, via: Via) -> RolloutServer:
    """Finds out which server answers at an address, and how weights reach it. Raises `ServerFailed` where it has no
    control routes."""
    found = http.get("/version", STATUS_TIMEOUT_S)
    version = found.get("version") if isinstance(found, dict) else None
    try:
        http.get("/is_paused", STATUS_TIMEOUT_S)
    except ServerFailed as error:
        if error.status != 404:
            raise
        raise ServerFailed(
            f"{http.address} has no control routes (no /is_paused); start vLLM with VLLM_SERVER_DEV_MODE=1", 404
        ) from None
    try:
        cards = http.get("/v1/models", STATUS_TIMEOUT_S)["data"]
        model, root = str(cards[0]["id"]), cards[0].get("root")
        adapters = [str(card["id"]) for card in cards if adapter_version(str(card["id"])) is not None]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ServerFailed(f"{http.address} names no model in /v1/models") from error
    root = root if isinstance(root, str) else None
    info = _info(http)
    if isinstance(version, str) and "+headrace" in version:
        return HeadraceEngine(
            http, model, root, info, shared=via not in ("auto", "files") or (via == "auto" and _is_here(http.address))
        )
    if via == "shared_memory":
        raise ServerFailed(f"{http.address} is vLLM, which takes weights from files; set sync.via to auto")
    return Vllm(http, model, root, info, adapters, shared=via == "cuda_ipc")


def _info(http: ServerHttp) -> ServerInfo:
    """What a server says of its configuration; nothing where it has no such route."""
    try:
        found: Any = http.get("/server_info?config_format=json", VLLM_INFO_TIMEOUT_S)
        config = found["vllm_config"]
        dtype = str(config["model_config"]["dtype"]).removeprefix("torch.")
        rank = (config.get("lora_config") or {}).get("max_lora_rank")
        variables = found.get("vllm_env") or {}
        loads = bool(variables.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"))
        transfer = (config.get("weight_transfer_config") or {}).get("backend")
        by_ipc = transfer == "ipc" and bool(variables.get("VLLM_ALLOW_INSECURE_SERIALIZATION"))
        gpu = found.get("gpu")
        where = (str(gpu["host"]), str(gpu["uuid"])) if gpu else None
    except (ServerFailed, AttributeError, KeyError, TypeError):
        return ServerInfo()
    known = dtype if dtype in DTYPES else None
    return ServerInfo(known, rank if isinstance(rank, int) else None, loads, where, by_ipc)


def ties(folder: Path) -> bool | None:
    """Whether a checkpoint ties `lm_head` to its embeddings; None where it has no configuration that can be read."""
    try:
        said = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if "tie_word_embeddings" in said:
        return bool(said["tie_word_embeddings"])
    from transformers import AutoConfig

    try:
        return bool(AutoConfig.from_pretrained(folder).get_text_config().tie_word_embeddings)
    except (OSError, ValueError, AttributeError):
        return None


def _is_here(address: str) -> bool:
    """Whether an address is this machine's: a socket can be bound to it."""
    try:
        found = socket.getaddrinfo(urlsplit(address).hostname, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], found[1]) as own:
            own.bind(found[4])
    except OSError:
        return False
    return True
