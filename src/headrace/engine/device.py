"""Where models are computed, by the name that a flag or a file gives it."""

from __future__ import annotations

import torch

from headrace.data.errors import InvalidInput


def device_of(name: str) -> str:
    """The device's name; for `auto`, `cuda` where there is a GPU and else `cpu`. Raises `InvalidInput` for one that
    torch does not know, or cannot use here."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:  # it lists devices that nobody has
        raise InvalidInput(f"device is {name!r}; it is auto, cpu, cuda, or one GPU, as in cuda:1") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        there = ", ".join(["auto", "cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))])
        why = str(error).strip().partition("\n")[0]
        raise InvalidInput(f"device is {name!r}, which torch cannot use here ({why}); set one of {there}") from error
    return name
