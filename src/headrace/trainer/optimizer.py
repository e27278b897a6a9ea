"""AdamW over float32 masters of a model whose own weights are narrower, or stand on another device.

The model computes with its weights; the optimizer updates masters of them in float32 and copies these into the model
after each update. A pass's gradient is added to a float32 sum as soon as it is complete and freed, so that several
passes sum up as exactly as one, and the model's own gradients are never held all at once. With `offload` masters and
AdamW's averages are in the memory of the CPU, and the update is computed there; the sums stay on the model's device
until then.

Everything is elementwise in each parameter by itself, but for the norm of all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: What a norm is raised by before it divides: torch's own clipping does the same.
NORM_EPS = 1e-6


def narrow(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Rounds parameters to a dtype where they stand; returns what they were, of those that are trained."""
    exact: dict[nn.Parameter, Tensor] = {}
    for parameter in parameters:
        if parameter.dtype == dtype:
            continue
        if parameter.requires_grad:
            exact[parameter] = parameter.detach().to(torch.float32)
        parameter.data = parameter.detach().to(dtype)
    return exact


class MasterAdamW:
    """AdamW for parameters of any dtype, of which those that require a gradient are trained.

    `exact` has the float32 values of parameters that were narrowed; they become their masters, without a copy. A
    float32 parameter without `offload` is its own master.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        exact: Mapping[nn.Parameter, Tensor] | None = None,
        offload: bool = False,
        **adamw: Any,
    ) -> None:
        given = exact or {}
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._masters = [_master(parameter, given.get(parameter), offload) for parameter in self._trained]
        self._sums: list[Tensor | None] = [None] * len(self._trained)
        self._on_cpu: list[Tensor | None] = [None] * len(self._trained)
        self._offload = offload
        self._inner = torch.optim.AdamW(self._masters, fused=True, **adamw)
        for at, (parameter, master) in enumerate(zip(self._trained, self._masters, strict=True)):
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(self._summing(at))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups  # type: ignore[no-any-return]

    @property
    def gradients(self) -> list[Tensor]:
        """The float32 gradients of all passes since the last update, on the model's device."""
        pairs = zip(self._trained, self._masters, self._sums, strict=True)
        found = [parameter.grad if master is parameter else total for parameter, master, total in pairs]
        return [gradient for gradient in found if gradient is not None]

    def clip(self, max_norm: float) -> Tensor:
        """Scales all gradients down so that their norm is at most `max_norm`; returns what it was."""
        gradients = self.gradients
        norm = torch.nn.utils.get_total_norm(gradients)
        scale = (max_norm / (norm + NORM_EPS)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return norm

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> None:
        """Updates the masters and copies them into the model."""
        for at, (parameter, master) in enumerate(zip(self._trained, self._masters, strict=True)):
            if master is not parameter:
                master.grad = self._where_updated(at, self._sums[at])
        if self._offload and self._trained and self._trained[0].is_cuda:
            torch.cuda.current_stream(self._trained[0].device).synchronize()  # gradients are there, masters are free
        self._inner.step()
        for parameter, master in zip(self._trained, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master, non_blocking=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients. They are freed, never filled with zeros."""
        self._sums = [None] * len(self._trained)
        for tensor in (*self._trained, *self._masters):
            tensor.grad = None

    def master(self, parameter: nn.Parameter) -> Tensor:
        """The float32 values of a trained parameter, which share the optimizer's memory; of any other, itself."""
        return self._by_parameter().get(parameter, parameter).detach()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def restore(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Copies float32 values into masters and model."""
        masters = self._by_parameter()
        for parameter, value in values.items():
            masters.get(parameter, parameter).copy_(value)
            parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """AdamW's own state, as `torch.optim.AdamW` over float32 weights would give it; masters are not in it."""
        return self._inner.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict(state)

    def _by_parameter(self) -> dict[nn.Parameter, Tensor]:
        return dict(zip(self._trained, self._masters, strict=True))

    def _summing(self, at: int) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            total = self._sums[at]
            if total is None:
                self._sums[at] = parameter.grad.to(torch.float32)
            else:
                total.add_(parameter.grad)
            parameter.grad = None

        return add

    def _where_updated(self, at: int, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or not self._offload or not gradient.is_cuda:
            return gradient
        buffer = self._on_cpu[at]
        if buffer is None:
            buffer = self._on_cpu[at] = _pinned(gradient)
        buffer.copy_(gradient, non_blocking=True)
        return buffer


def _master(parameter: nn.Parameter, exact: Tensor | None, offload: bool) -> Tensor:
    if exact is None and parameter.dtype == torch.float32 and not offload:
        return parameter
    value = parameter.detach().to(torch.float32, copy=True) if exact is None else exact
    return _pinned(value).copy_(value) if offload and value.is_cuda else value


def _pinned(like: Tensor) -> Tensor:
    return torch.empty_like(like, device="cpu", pin_memory=True)
