"""Packed attention: a sequence among others is what it is alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.backends.models import VOCABULARY, gap, llama, qwen3

from headrace.data.errors import InvalidInput
from headrace.trainer import attention

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
SIZES = settings(max_examples=10, deadline=None)


def cuts_of(lengths: list[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


def some_ids(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of every token but the first."""
    return torch.log_softmax(logits[:-1], -1).gather(-1, ids[1:, None])[:, 0]


def packed(model: Any, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    cuts = cuts_of([len(row) for row in rows])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    logits = model(input_ids=torch.cat(rows)[None], position_ids=positions[None], cuts=cuts, use_cache=False).logits[0]
    return [log_probs(logits[a:b], row) for a, b, row in zip(cuts[:-1], cuts[1:], rows, strict=True)]


def padded(model: Any, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return [log_probs(logits[i, : len(row)], row) for i, row in enumerate(rows)]


def alone(model: Any, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [log_probs(model(input_ids=row[None], use_cache=False).logits[0], row) for row in rows]


def learned(model: Any, found: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of the mean log-prob."""
    model.zero_grad()
    torch.cat(found).mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", [llama, qwen3])
@pytest.mark.parametrize(("implementation", "theirs"), [("sdpa", padded), ("eager", padded), ("sdpa", alone)])
@given(lengths=LENGTHS.filter(lambda lengths: max(lengths) > 1))
@SIZES
def test_packed_log_probs_and_gradients_are_those_of_transformers(
    family: Callable[..., Any],
    implementation: str,
    theirs: Callable[[Any, list[torch.Tensor]], list[torch.Tensor]],
    lengths: list[int],
) -> None:
    ours, reference = family(attention.NAME), family(implementation)
    rows = some_ids(lengths)
    found, expected = packed(ours, rows), theirs(reference, rows)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=0, atol=1e-5)
    gradients, wanted = learned(ours, found), learned(reference, expected)
    for name in wanted:
        torch.testing.assert_close(gradients[name], wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def test_sequences_of_very_different_lengths_are_those_of_transformers() -> None:
    rows = some_ids([2048, 32, 300, 33, 700, 1, 301])
    found, expected = packed(llama(attention.NAME), rows), alone(llama("sdpa"), rows)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=0, atol=1e-5)


@given(lengths=LENGTHS, kv_heads=st.sampled_from([1, 2, 4]), scaling=st.sampled_from([None, 0.1, 2.0]))
@SIZES
def test_each_sequence_attends_to_itself_only(lengths: list[int], kv_heads: int, scaling: float | None) -> None:
    """In float64 against the definition, gradients of all three included."""
    generator = torch.Generator().manual_seed(1)
    cuts, heads, width = cuts_of(lengths), 4, 5

    def drawn(count: int) -> torch.Tensor:
        return torch.randn(1, count, cuts[-1], width, generator=generator, dtype=torch.float64).requires_grad_()

    given_, along = (drawn(heads), drawn(kv_heads), drawn(kv_heads)), drawn(heads).detach()
    found, _ = attention.packed_attention(torch.nn.Module(), *given_, None, scaling=scaling, cuts=cuts)
    assert found.shape == (1, cuts[-1], heads, width)

    q, k, v = given_
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (width**-0.5 if scaling is None else scaling)
    sequence = torch.repeat_interleave(torch.tensor(lengths))
    sees = (sequence[:, None] == sequence) & torch.ones(cuts[-1], cuts[-1], dtype=torch.bool).tril()
    expected = torch.softmax(scores.masked_fill(~sees, -torch.inf), -1) @ v
    torch.testing.assert_close(found[0].transpose(0, 1), expected[0])
    ours = torch.autograd.grad((found[0].transpose(0, 1) * along[0]).sum(), given_)
    theirs = torch.autograd.grad((expected * along).sum(), given_)
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60))
@settings(deadline=None)
def test_every_token_has_one_place_and_stands_before_its_sequences_padding(lengths: list[int]) -> None:
    plan = attention.plan_stacks(tuple(cuts_of(lengths)), CPU)
    total = sum(lengths)
    tokens = torch.arange(total) if plan.tokens is None else plan.tokens
    places = torch.arange(total) if plan.places is None else plan.places
    assert len(tokens) == sum(stack.rows * stack.length for stack in plan.stacks)
    assert torch.equal(tokens[places], torch.arange(total))
    at, rows = 0, []
    for stack in plan.stacks:
        block = tokens[at : at + stack.rows * stack.length].view(stack.rows, stack.length)
        rows += [sorted(set(row.tolist())) for row in block]
        assert all(row.tolist() == sorted(row.tolist()) for row in block)
        at += stack.rows * stack.length
    cuts = cuts_of(lengths)
    assert sorted(rows) == [list(range(a, b)) for a, b in pairwise(cuts)]


def attended(lengths: list[int]) -> int:
    """Calls of attention that these sequences take."""
    return len(attention.plan_stacks(tuple(cuts_of(lengths)), CPU).stacks)


def padding(lengths: list[int]) -> float:
    """What attention computes beyond the sequences themselves, as a share of them."""
    stacks = attention.plan_stacks(tuple(cuts_of(lengths)), CPU).stacks
    return sum(stack.rows * stack.length**2 for stack in stacks) / sum(length**2 for length in lengths) - 1


@pytest.mark.parametrize("seed", range(5))
def test_short_sequences_take_few_calls_and_little_padding(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(55, 86, 256).tolist()
    assert attended(lengths) <= 10
    assert padding(lengths) < 0.15


@pytest.mark.parametrize("seed", range(5))
def test_long_and_short_sequences_pad_little(seed: int) -> None:
    lengths = np.exp(np.random.default_rng(seed).uniform(np.log(32), np.log(2048), 64)).astype(int).tolist()
    assert padding(lengths) < 0.05


def test_equal_sequences_are_one_call_and_nothing_is_moved() -> None:
    plan = attention.plan_stacks(tuple(cuts_of([70] * 256)), CPU)
    assert (plan.stacks, plan.tokens) == ((attention.StackedSequences(256, 70),), None)


@pytest.mark.parametrize(
    ("cuts", "again"),
    [
        ((0, 3071, 6142), True),
        ((0, 4096), True),
        ((0, 4097), False),
        ((0, 3071, 6143), False),
        ((0, 1024, 3072), False),
    ],
)
def test_shapes_that_come_again_are_those_of_one_length_or_a_round_one(cuts: tuple[int, ...], again: bool) -> None:
    assert attention._come_again(cuts) == again


def test_the_plan_is_made_once_a_batch() -> None:
    attention.plan_stacks.cache_clear()
    packed(llama(attention.NAME, num_hidden_layers=3), some_ids([5, 9, 9]))
    assert attention.plan_stacks.cache_info().misses == 1


def test_no_mask_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of so many tokens under a mask would take gigabytes."""
    seen: list[object] = []
    true = F.scaled_dot_product_attention

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        seen.append(options.get("attn_mask"))
        return true(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    packed(llama(attention.NAME), some_ids([20] * 2000))
    assert seen == [None, None]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a processor without bfloat16 says so
def test_autocast_computes_in_its_type() -> None:
    model, rows = llama(attention.NAME), some_ids([7, 12])
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.cat(packed(model, rows))
    found.mean().backward()
    torch.testing.assert_close(found.float(), torch.cat(packed(model, rows)), atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cuts": None}, "needs cuts"),
        ({"cuts": [0, 4]}, "from 0 to 4"),
        ({"cuts": [1, 6]}, "from 1 to 6"),
        ({"cuts": [0, 3, 3, 6]}, "must rise"),
        ({"cuts": [0, 4, 2, 6]}, "must rise"),
        ({"dropout": 0.5}, "0.5"),
        ({"sliding_window": 4}, "sliding_window=4"),
        ({"softcap": 30.0}, "softcap=30.0"),
        ({"attention_mask": torch.ones(1, 1, 6, 6)}, "mask"),
    ],
)
def test_what_it_does_not_compute_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    x = torch.zeros(1, 2, 6, 4)
    options = {"attention_mask": None, "cuts": [0, 6], **changes}
    with pytest.raises(InvalidInput, match=named):
        attention.packed_attention(torch.nn.Module(), x, x, x, **options)


def test_a_model_with_a_sliding_window_is_refused() -> None:
    model = qwen3(attention.NAME, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(InvalidInput, match="sliding_window=4"):
        packed(model, some_ids([8]))


def test_several_rows_are_refused() -> None:
    x = torch.zeros(2, 2, 6, 4)
    with pytest.raises(InvalidInput, match="2 rows"):
        attention.packed_attention(torch.nn.Module(), x, x, x, None, cuts=[0, 6])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_on_a_gpu_it_is_what_it_is_on_a_cpu(dtype: torch.dtype, kv_heads: int) -> None:
    """bfloat16 goes through the variable-length kernel, float32 is stacked."""
    generator = torch.Generator().manual_seed(0)
    cuts = cuts_of([70, 3, 1, 300, 71])
    given_ = [
        torch.randn(1, heads, cuts[-1], 32, generator=generator).to(dtype).float() for heads in (4, kv_heads, kv_heads)
    ]
    answers = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        inputs = [x.to(device, kind).requires_grad_() for x in given_]
        found, _ = attention.packed_attention(torch.nn.Module(), *inputs, None, cuts=cuts)
        answers.append([found, *torch.autograd.grad(found.float().square().sum(), inputs)])
    for wanted, got in zip(*answers, strict=True):
        assert gap(got.cpu(), wanted) < (1e-5 if dtype == torch.float32 else 0.02)
