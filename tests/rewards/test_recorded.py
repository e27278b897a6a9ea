"""What a pool recorded, as samples: text, messages and the row's fields, read back from exact tokens."""

from __future__ import annotations

import pytest
from tests.rewards.recorded import record

from headrace import DataPool, Step
from headrace.data.errors import InvalidInput
from headrace.rewards.recorded import SampleReader, last_answer
from headrace.tokens import Message, Renderer

CALL = '<tool_call>\n{"name": "sum", "arguments": {"a": 2}}\n</tool_call>'


def test_a_trajectory_is_its_last_path_from_beginning_to_end(
    pool: DataPool, renderer: Renderer, reader: SampleReader
) -> None:
    row = {"data_source": "sums", "ground_truth": "4", "level": 2}
    record(pool, renderer, "t", [("2 + 2?", "let me see"), ("well?", f"so {CALL}")], prompt_uid="p", row=row)
    trajectory = pool.trajectory("t")
    found = reader.outcome(trajectory)
    assert found is not None
    first, second = trajectory.steps
    assert found.prompt_ids == first.prompt_ids.tolist()
    assert found.prompt_ids + found.response_ids == [*second.prompt_ids.tolist(), *second.response_ids.tolist()]
    assert found.text == f"so {CALL}"
    assert [(message["role"], message["content"]) for message in found.messages] == [
        ("user", "2 + 2?"),
        ("assistant", "let me see"),
        ("user", "well?"),
        ("assistant", "so"),
    ]
    (call,) = found.messages[-1]["tool_calls"]
    assert call["function"] == {"name": "sum", "arguments": '{"a": 2}'}
    assert (found.ground_truth, found.data_source, found.metadata["level"]) == ("4", "sums", 2)
    assert (found.trajectory_uid, found.prompt_uid, found.num_turns, found.step_index) == ("t", "p", 2, None)


def test_each_step_is_a_sample_with_the_conversation_before_it(
    pool: DataPool, renderer: Renderer, reader: SampleReader
) -> None:
    record(pool, renderer, "t", [("one", "1"), ("two", "2"), ("three", "3")])
    found = reader.steps(pool.trajectory("t"))
    assert [(sample.step_index, sample.text) for sample in found] == [(0, "1"), (1, "2"), (2, "3")]
    assert [message["content"] for message in found[2].messages] == ["one", "1", "two", "2", "three", "3"]


def test_what_follows_no_template_is_text(pool: DataPool, renderer: Renderer, reader: SampleReader) -> None:
    encode = renderer.vocabulary.encode
    step = Step(prompt_ids=encode("Once upon a"), response_ids=encode(" time"), trajectory_uid="t", is_last=True)
    pool.submit_step(step)
    found = reader.outcome(pool.trajectory("t"))
    assert found is not None
    assert found.messages == [
        {"role": "user", "content": "Once upon a"},
        {"role": "assistant", "content": " time"},
    ]


def test_a_trajectory_of_quarantined_steps_is_no_sample(pool: DataPool, reader: SampleReader) -> None:
    step = Step(prompt_ids=[5], response_ids=[6], trajectory_uid="t", prompt_uid="p", quarantined="drift", is_last=True)
    pool.open("t", "p", n_rollouts=2)
    pool.submit_step(step)
    assert reader.outcome(pool.trajectory("t")) is None
    assert reader.steps(pool.trajectory("t")) == []


def test_a_named_column_has_the_ground_truth(pool: DataPool, renderer: Renderer) -> None:
    record(pool, renderer, "t", [("q", "a")], row={"solution": 7, "answer": "no"})
    found = SampleReader(renderer, "solution").outcome(pool.trajectory("t"))
    assert found is not None
    assert found.ground_truth == 7
    with pytest.raises(InvalidInput, match="no column 'truth'"):
        SampleReader(renderer, "truth").outcome(pool.trajectory("t"))


def test_padding_is_taken_off_where_ids_have_the_padded_length(renderer: Renderer, reader: SampleReader) -> None:
    pad = renderer.vocabulary.hf.pad_token_id
    assert reader.unpadded([pad, pad, 5, pad, 6], 5, left=True) == [5, pad, 6]
    assert reader.unpadded([5, pad, 6, pad, pad], 5, left=False) == [5, pad, 6]
    assert reader.unpadded([pad, 5], 5, left=True) == [pad, 5]
    assert reader.unpadded([pad, 5], None, left=True) == [pad, 5]
    prompt = renderer.render([Message("user", "hi")])
    sample = reader.of_ids(prompt, renderer.vocabulary.encode("yo"), {"answer": "x"}, num_turns=1)
    assert [message["content"] for message in sample.messages] == ["hi", "yo"]
    assert (sample.ground_truth, sample.num_turns) == ("x", 1)


def test_the_last_answer_of_a_conversation() -> None:
    assert last_answer([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]) == "a"
    assert last_answer([{"role": "assistant", "content": [{"type": "text", "text": "x"}, {"text": "y"}]}]) == "xy"
    assert last_answer([{"role": "assistant", "content": None, "tool_calls": []}]) == ""
    assert last_answer([{"role": "user", "content": "b"}]) == ""
