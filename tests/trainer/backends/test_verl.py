"""`VerlBackend` without verl: what it lays down, by hypothesis. `tests/verl` holds it against verl itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.kit import sequence

from headrace import Sequence
from headrace.data.errors import HeadraceError, InvalidInput
from headrace.trainer.backends import VerlBackend

PAD = 99


@pytest.fixture(scope="module")
def verl() -> Iterator[None]:
    """A verl whose DataProto is what it was made from."""
    module: Any = ModuleType("verl")
    module.DataProto = SimpleNamespace(from_dict=lambda **given: SimpleNamespace(**given))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "verl", module)
        yield


@st.composite
def sequences(draw: st.DrawFn) -> list[Sequence]:
    """Of one to three answers, with context around them."""
    found = []
    for at in range(draw(st.integers(0, 6))):
        edges = sorted(draw(st.lists(st.integers(1, 14), min_size=2, max_size=6, unique=True)))
        spans = list(zip(edges[::2], edges[1::2], strict=False))
        rewards = [draw(st.sampled_from([None, -1.0, 2.0])) for _ in spans]
        total = sum(reward or 0.0 for reward in rewards) + draw(st.sampled_from([0.0, 0.5]))
        length = edges[-1] + draw(st.integers(0, 2))
        found.append(sequence(spans, length, rewards=rewards, reward=total, seed=at, uid=f"t{at}"))
    return found


@pytest.mark.usefixtures("verl")
@given(sequences(), st.integers(1, 4))
def test_every_row_is_a_whole_sequence_or_learns_nothing(batch: list[Sequence], world_size: int) -> None:
    data: Any = VerlBackend(5, 10, PAD, world_size=world_size).convert(batch)
    fit = [s for s in batch if s.loss_mask.argmax() <= 5 and len(s) - s.loss_mask.argmax() <= 10]
    rows = {name: tensor.numpy() for name, tensor in data.tensors.items()}
    assert len(rows["input_ids"]) % world_size == 0
    assert data.meta_info["headrace"]["skipped"] == len(batch) - len(fit)
    assert data.meta_info["headrace"]["padding_rows"] == len(rows["input_ids"]) - len(fit) < world_size
    for at, each in enumerate(fit):
        real = rows["attention_mask"][at] == 1
        first = int(each.loss_mask.argmax())
        assert np.array_equal(rows["input_ids"][at][real], each.tokens)
        assert np.array_equal(rows["prompts"][at][5 - first :], each.tokens[:first])
        assert (rows["input_ids"][at][~real] == PAD).all()
        assert rows["position_ids"][at][real].tolist() == list(range(len(each)))
        trained = rows["response_mask"][at] == 1
        assert np.array_equal(rows["responses"][at][trained], each.tokens[each.loss_mask])
        assert np.array_equal(rows["rollout_log_probs"][at][trained], each.log_probs[each.loss_mask])
        assert rows["rm_scores"][at].sum() == pytest.approx(each.reward)
        assert not rows["rm_scores"][at][~trained].any()
    added = slice(len(fit), None)
    assert not rows["response_mask"][added].any()
    assert not rows["rm_scores"][added].any()
    assert (rows["attention_mask"][added].sum(1) == 2).all()
    uids = data.non_tensors["uid"].tolist()
    assert len(set(uids[added]) | set(uids[: len(fit)])) == len(set(uids[: len(fit)])) + len(uids[added])


@pytest.mark.usefixtures("verl")
def test_a_reward_stands_on_the_last_token_of_the_step_that_earned_it() -> None:
    made = sequence([(2, 4), (6, 9)], rewards=[0.25, 1.0], reward=1.25)
    data: Any = VerlBackend(2, 7, PAD).convert([made])
    assert data.tensors["rm_scores"].tolist() == [[0, 0.25, 0, 0, 0, 0, 1.0]]


@pytest.mark.usefixtures("verl")
def test_a_first_token_is_never_part_of_a_response() -> None:
    data: Any = VerlBackend(4, 4, PAD).convert([sequence([(0, 3)])])
    assert data.tensors["response_mask"].tolist() == [[1, 1, 0, 0]]


@pytest.mark.usefixtures("verl")
def test_a_rows_fields_and_what_its_reward_was_made_of_stand_beside_the_tensors() -> None:
    rows = [
        {"data_source": "gsm8k", "extra_info": {"split": "train"}, "reward_extra_info": {"math": 1.0, "format": 0.1}},
        {"data_source": "math", "uid": "the row's own", "prompts": ["?"], "reward_extra_info": {"math": 0.0}},
    ]
    batch = [replace(sequence(uid=f"t{at}"), metadata=row) for at, row in enumerate(rows)]
    data: Any = VerlBackend(4, 4, PAD, world_size=3).convert(batch)
    beside = {name: values.tolist() for name, values in data.non_tensors.items()}
    assert beside["data_source"] == ["gsm8k", "math", None]
    assert beside["extra_info"] == [{"split": "train"}, None, None]
    assert beside["reward_extra_info"] == [{"math": 1.0, "format": 0.1}, {"math": 0.0}, None]
    assert (beside["math"], data.meta_info["reward_extra_keys"]) == ([1.0, 0.0, None], ["math"])
    assert "the row's own" not in beside["uid"]  # by which verl groups rows
    assert "prompts" not in beside  # a tensor's name


def test_a_missing_verl_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(HeadraceError, match="pip install 'verl"):
        VerlBackend(4, 4, PAD).convert([])


@pytest.mark.parametrize("field", ["prompt_length", "response_length", "world_size"])
def test_sizes_are_checked_when_it_is_built(field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        VerlBackend(**{"prompt_length": 4, "response_length": 4, "pad_id": PAD, field: 0})
