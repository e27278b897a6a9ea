"""verl on a machine without an accelerator: its platform `cpu`, by the hook that verl has for other people's devices.

For trying a recipe and for tests; a CPU is slow. verl has no such platform of its own: where it finds no device it
takes CUDA's, and stops there. The environment of the driver and of every Ray worker, with this file's folder in
PYTHONPATH:

VERL_USE_EXTERNAL_MODULES=verl_cpu VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda

The last names the engine: verl registers FSDP's for CUDA and NPUs alone, and it computes on a CPU as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class CpuModule(ModuleType):
    """`torch.cpu` with what verl asks of `torch.cuda` beside it: a memory of which nothing is known."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def empty_cache(self) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 0, 0


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Everything is where it is; collectives are gloo's."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuModule("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")  # an index would name a CUDA device

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
