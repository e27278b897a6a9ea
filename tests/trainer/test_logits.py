"""Log-probs from hidden states: in chunks they are what they are whole, and so are their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.trainer import logits

VOCABULARY, HIDDEN, COUNT = 61, 12, 23


class Wrapped(nn.Module):  # type: ignore[misc]
    """A head that is more than a matrix: its logits are shifted."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.shift = inner, nn.Parameter(torch.linspace(-1, 1, VOCABULARY))

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    def forward(self, states: Tensor) -> Any:
        return self.inner(states) + self.shift


def head_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Linear(HIDDEN, VOCABULARY, bias=kind == "bias")
    nn.init.normal_(made.weight)
    return Wrapped(made) if kind == "wrapped" else made


def given(width: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """States, targets, temperatures and candidates, some of which are no tokens."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(COUNT, HIDDEN, generator=generator).requires_grad_()
    ids = torch.randint(VOCABULARY, (COUNT,), generator=generator)
    temperatures = 0.5 + torch.rand(COUNT, generator=generator)
    if not width:
        return states, ids, temperatures, None
    candidates = torch.randint(VOCABULARY, (COUNT, width), generator=generator)
    candidates[::3, -1], candidates[1::5, 0] = -1, VOCABULARY
    candidates[:, 1] = candidates[:, 2]  # one that is named twice
    return states, ids, temperatures, candidates


def computed(
    head: nn.Module, inputs: tuple[Any, ...], entropy_learns: bool, factor: float = 1.0
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What was found, and the gradients of a random weighting of it."""
    found = logits.log_probs_of(head, *inputs, entropy_learns=entropy_learns, factor=factor)
    generator = torch.Generator().manual_seed(2)
    along = [torch.randn(part.shape, generator=generator) for part in found]
    loss = (found[0] * along[0]).sum() + torch.where(found[2] > -torch.inf, found[2] * along[2], 0.0).sum()
    if entropy_learns:
        loss = loss + (found[1] * along[1]).sum()
    wanted = (inputs[0], *head.parameters())
    return found, torch.autograd.grad(loss, wanted)


@pytest.mark.parametrize("kind", ["plain", "bias", "wrapped"])
@pytest.mark.parametrize("entropy_learns", [False, True])
@pytest.mark.parametrize("width", [0, 4])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_chunks_give_what_the_whole_gives(
    kind: str, entropy_learns: bool, width: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, inputs = head_of(kind), given(width)
    whole, wanted = computed(head, inputs, entropy_learns, factor)
    monkeypatch.setattr(logits, "MAX_LOGITS", 5 * VOCABULARY)
    parts, gradients = computed(head, inputs, entropy_learns, factor)
    for mine, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        assert float(theirs.abs().max()) > 0.1
    assert parts[1].requires_grad == entropy_learns


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_the_whole_is_what_its_formula_says(factor: float) -> None:
    head, (states, ids, temperatures, candidates) = head_of("plain"), given(4)
    assert candidates is not None
    found = logits.log_probs_of(head, states, ids, temperatures, candidates, factor=factor)
    scores = (states @ head.weight.T).double() * factor
    p = torch.softmax(scores / temperatures[:, None].double(), -1)
    torch.testing.assert_close(found[0].double(), p[torch.arange(COUNT), ids].log(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found[1].double(), -(p * p.log()).sum(-1), rtol=1e-6, atol=1e-5)
    for row, column in ((0, 0), (1, 1), (2, 3)):
        wanted = torch.log_softmax(scores[row], -1)[candidates[row, column]]
        assert found[2][row, column].item() == pytest.approx(wanted.item(), abs=1e-5)
    assert found[2][0, -1] == found[2][1, 0] == -torch.inf


def test_a_frozen_head_gets_no_gradient_and_states_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "MAX_LOGITS", 5 * VOCABULARY)
    head, inputs = head_of("plain"), given(0)
    head.requires_grad_(False)
    logits.log_probs_of(head, *inputs)[0].sum().backward()
    assert head.weight.grad is None
    assert inputs[0].grad is not None


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_under_autocast_chunks_compute_in_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    head, inputs = head_of("plain"), given(0)
    with torch.autocast("cpu", torch.bfloat16):
        whole, wanted = computed(head, inputs, False)
        monkeypatch.setattr(logits, "MAX_LOGITS", 5 * VOCABULARY)
        parts, gradients = computed(head, inputs, False)
    torch.testing.assert_close(parts[0], whole[0], rtol=0, atol=1e-5)
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.float32]
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.05)


def test_no_chunk_has_more_logits_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "MAX_LOGITS", 5 * VOCABULARY)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            if isinstance(found, Tensor):
                largest = max(largest, found.numel())
            return found

    head, inputs = head_of("plain"), given(0)
    with Watch():
        logits.log_probs_of(head, *inputs)[0].sum().backward()
    assert largest == VOCABULARY * HIDDEN  # the head itself; all logits would be more
