"""A model's decoder, and how its layers are run: plainly, recomputed in the backward pass, compiled, or both.

A recomputed layer keeps its input alone; what it computed is computed again when its gradient is. The result is the
same, bit for bit. A compiled layer is compiled once for all lengths, without its attention, which has kernels of its
own; where compiling fails, layers run plainly from then on, with one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace.data.errors import InvalidInput
from headrace.trainer import attention

log = logging.getLogger(__name__)

#: Kinds of input that are compiled for: beyond that, torch would give up on a function for good. Layers of one model
#: are of one kind or a few.
MAX_COMPILED = 64
#: Tokens of the pass by which compiled layers are tried.
TRIAL_TOKENS = 256


class Decoder:
    """The layers of a model of transformers, and how they are computed: in which dtype, whether recomputed, whether
    compiled."""

    def __init__(self, module: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._module, self._dtype = module, dtype
        #: Where it computes.
        self.device = device
        self._layers = Layers(module)
        #: Tokens of a pass beyond which its layers are recomputed in the backward pass; None: never.
        self.recompute_beyond: int | None = None

    def states(self, ids: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """The last layer's hidden state of each token of a packed row; `attention` is what packed attention takes."""
        recompute = self.recompute_beyond is not None and len(ids) > self.recompute_beyond
        with self.computing(), self._layers.recomputed(recompute):
            found = self._module(input_ids=ids[None], position_ids=positions[None], use_cache=False, **attention)
        states: Tensor = found.last_hidden_state[0]
        return states

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Casts to the dtype of the computation inside, where the weights have another."""
        with ExitStack() as opened:
            weights = self._module.get_input_embeddings().weight.dtype
            if weights != self._dtype:
                opened.enter_context(torch.autocast(self.device.type, self._dtype))
            yield

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self._module.parameters())

    @property
    def compiled(self) -> bool:
        """Whether layers run compiled; False once compiling has failed."""
        return self._layers.compiled

    def compile(self) -> None:
        """Compiles the layers and runs them once, forward and backward; where that fails, they run as before, with one
        warning. Gradients are left as none."""
        self._layers.compile()
        ids = torch.zeros(TRIAL_TOKENS, dtype=torch.long, device=self.device)
        positions = torch.arange(TRIAL_TOKENS, device=self.device)
        try:
            for cuts in ([0, TRIAL_TOKENS], [0, TRIAL_TOKENS // 3, TRIAL_TOKENS]):  # attention has a way for each
                self.states(ids, positions, cuts=cuts).float().sum().backward()
        except Exception as error:  # whatever a compiler may raise: the plain layers are still there
            self._layers.run_plainly(error)
        for parameter in self._module.parameters():
            parameter.grad = None


class Layers:
    """The layers of a decoder of transformers."""

    def __init__(self, decoder: nn.Module) -> None:
        found = getattr(decoder, "layers", None)
        self._decoder, self._layers = decoder, list(found) if isinstance(found, nn.ModuleList) else []
        self._recompute = self._compiled = False
        for layer in self._layers:
            layer.forward = self._runner(layer.forward)

    @property
    def compiled(self) -> bool:
        return self._compiled

    def compile(self) -> None:
        """Has layers run compiled from now on."""
        self._decoder.config._attn_implementation = _register_uncompiled()
        self._compiled = bool(self._layers)

    @contextmanager
    def recomputed(self, on: bool) -> Iterator[None]:
        """Whether layers that are run inside are recomputed in the backward pass. Raises `InvalidInput` where they are
        to be, and are not known."""
        if on and not self._layers:
            raise InvalidInput("this model has no list of layers to recompute: set memory.recompute: none")
        before, self._recompute = self._recompute, on
        try:
            yield
        finally:
            self._recompute = before

    def run_plainly(self, why: BaseException) -> None:
        """Gives up on compiling, and says why once."""
        if self._compiled:
            self._compiled = False
            reason = " ".join(str(why).split("\n")[:2]) or type(why).__name__  # what follows is a stack
            log.warning("layers cannot be compiled, and run as they are (compile: off does so in silence): %s", reason)

    def _runner(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        fast: Callable[..., Any] | None = None

        def once(*args: Any, **given: Any) -> Any:
            nonlocal fast
            if not self._compiled:
                return plain(*args, **given)
            fast = fast or torch.compile(plain, dynamic=True)
            try:
                return fast(*args, **{name: _boxed(value) for name, value in given.items()})
            except _compile_errors() as error:
                self.run_plainly(error)
                return plain(*args, **given)

        def run(*args: Any, **given: Any) -> Any:
            if self._recompute and torch.is_grad_enabled():
                # No layer draws random numbers: models are in eval mode.
                return checkpoint(once, *args, use_reentrant=False, preserve_rng_state=False, **given)
            return once(*args, **given)

        return run


class _Box:
    """Hides a value from the compiler, which would compile anew for each list of cuts."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _boxed(value: Any) -> Any:
    """Tensors, pairs of them and constants are the compiler's; anything else goes past it."""
    if value is None or isinstance(value, Tensor | bool | _Box):
        return value
    if isinstance(value, tuple) and all(isinstance(one, Tensor) for one in value):
        return value
    return _Box(value)


def _register_uncompiled() -> str:
    """Registers packed attention under a second name, as a function that the compiler calls and does not look into."""
    from transformers import AttentionInterface

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_COMPILED)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def attend(*args: Any, **given: Any) -> Any:
        opened = {name: value.value if isinstance(value, _Box) else value for name, value in given.items()}
        return attention.packed_attention(*args, **opened)

    name = f"{attention.NAME}_uncompiled"
    AttentionInterface.register(name, attend)
    return name


def _compile_errors() -> tuple[type[BaseException], ...]:
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)
