"""Rows of data: what is read, and what is said of data that is wrong."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.data.errors import InvalidInput
from headrace.extras import MissingExtra
from headrace.flows import DataConfig, Dataset, Task
from headrace.flows.task import messages_of

ROWS = [{"question": "1 + 1", "answer": "2"}, {"question": "größer 🙂?", "answer": None, "level": 3}]


def jsonl(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_lines_of_json_are_rows_in_their_order(tmp_path: Path) -> None:
    found = Dataset.read(jsonl(tmp_path / "a.jsonl", json.dumps(ROWS[0]), "", json.dumps(ROWS[1])))
    assert list(found) == ROWS
    assert (len(found), found[1], found.columns) == (2, ROWS[1], ("question", "answer", "level"))
    assert found.place(1) == f"{tmp_path / 'a.jsonl'}, line 3"


def test_a_parquet_file_has_the_same_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    rows = [
        {"messages": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "7"}, "x": 0.5},
        {"messages": [{"role": "user", "content": "ho"}], "reward_model": {"ground_truth": "8"}, "x": None},
    ]
    day = datetime.date(2026, 11, 17)
    parquet.write_table(arrow.Table.from_pylist([{**row, "day": day} for row in rows]), tmp_path / "a.parquet")
    found = Dataset.read(tmp_path / "a.parquet")
    assert list(found) == [{**row, "day": "2026-11-17"} for row in rows]
    assert found.place(0).endswith("a.parquet, row 1")


def test_bytes_in_a_column_are_named_with_their_place(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.Table.from_pylist([{"a": 1, "image": b"png"}]), tmp_path / "a.parquet")
    with pytest.raises(InvalidInput, match=r"a.parquet, row 1, column 'image': holds bytes"):
        Dataset.read(tmp_path / "a.parquet")


def test_any_iterable_of_mappings_is_a_dataset() -> None:
    found = Dataset.of(({"n": np.int64(at), "v": np.ones(2)} for at in range(3)), "numbers")
    assert list(found) == [{"n": at, "v": [1.0, 1.0]} for at in range(3)]
    with pytest.raises(InvalidInput, match="numbers, item 1: must be a mapping"):
        Dataset.of([{}, 7], "numbers")  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": }', r"a.jsonl, line 2, column 7: is no JSON"),
        ("a.jsonl", "[1]", r"a.jsonl, line 1: must be an object"),
        ("a.jsonl", "\n\n", "has no rows"),
        ("a.jsonl", '{"a": NaN}', "line 1, column 7"),
        ("a.csv", "a,b", "must be a .jsonl or .parquet file"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match=words):
        Dataset.read(tmp_path / name)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**300])
def test_an_integer_that_would_be_rounded_is_refused(tmp_path: Path, value: int) -> None:
    path = jsonl(tmp_path / "a.jsonl", '{"q": 1}', json.dumps({"q": 1, "ground_truth": [value]}))
    said = r"holds an integer of more than 64 bits, .* write it as text"
    with pytest.raises(InvalidInput, match=rf"a.jsonl, line 2, column 'ground_truth': {said}"):
        Dataset.read(path)
    with pytest.raises(InvalidInput, match=rf"rows, item 1, column 'ground_truth': {said}"):
        Dataset.of([{"q": 1}, {"q": 1, "ground_truth": {"value": value}}])


def test_one_of_64_bits_and_long_numbers_of_other_kinds_are_kept(tmp_path: Path) -> None:
    row = {"a": 2**64 - 1, "b": -(2**63), "c": 3.141592653589793, "d": "1" * 5000, "e": 1180591620717411303424.0}
    text = json.dumps(row).replace("3.141592653589793", "3.14159265358979323846")
    (found,) = Dataset.read(jsonl(tmp_path / "a.jsonl", text))
    assert found == row
    assert [type(value) for value in found.values()] == [int, int, float, str, float]
    assert list(Dataset.of([row])) == [row]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no file"):
        Dataset.read(tmp_path / "a.jsonl")
    with pytest.raises(InvalidInput, match=r"no folder that `datasets` saved: it has no state.json"):
        Dataset.read(tmp_path)
    (tmp_path / "dataset_dict.json").write_text("{}")
    (tmp_path / "train").mkdir()
    with pytest.raises(InvalidInput, match="several splits; name one of them: train"):
        Dataset.read(tmp_path)


def test_damaged_parquet_is_said(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(InvalidInput, match=r"a\.parquet cannot be read"):
        Dataset.read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("module", "name", "extra"), [("pyarrow.parquet", "a.parquet", "export"), ("datasets", "a", "datasets")]
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / name
    if extra == "datasets":
        path.mkdir()
        (path / "state.json").write_text("{}")
    else:
        path.write_bytes(b"")
    with pytest.raises(MissingExtra, match=extra):
        Dataset.read(path)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Folders as `datasets` saves them: `one`, `formatted`, `empty`, and `splits` with `train` and `test`."""
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(SAVED_ROWS)
    made.save_to_disk(str(tmp_path / "one"))
    made.with_format("numpy", columns=["n", "score"]).save_to_disk(str(tmp_path / "formatted"))
    datasets.Dataset.from_dict({"question": []}).save_to_disk(str(tmp_path / "empty"))
    splits = {"train": made, "test": made.select([1])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "splits"))
    return tmp_path


#: Rows of all kinds that a `datasets` folder keeps as they are.
SAVED_ROWS: list[dict[str, Any]] = [
    {"question": "a", "n": 1, "score": 0.5, "turns": [{"role": "user", "content": "ü"}], "more": {"of": [1, 2]}},
    {"question": "b", "n": None, "score": 1e300, "turns": [], "more": {"of": []}},
]


def test_a_saved_folder_is_read_as_it_was(saved: Path) -> None:
    assert list(Dataset.read(saved / "one")) == SAVED_ROWS
    assert Dataset.read(saved / "one").place(1) == f"{saved / 'one'}, row 2"


def test_nor_does_the_format_it_was_saved_with_leave_columns_out(saved: Path) -> None:
    found = list(Dataset.read(saved / "formatted"))
    assert found == SAVED_ROWS
    assert {type(value) for row in found for value in row.values()} <= {str, int, float, list, dict, type(None)}


def test_each_split_is_a_folder_of_its_own(saved: Path) -> None:
    with pytest.raises(InvalidInput, match="several splits; name one of them: test, train"):
        Dataset.read(saved / "splits")
    assert list(Dataset.read(saved / "splits" / "train")) == SAVED_ROWS
    assert list(Dataset.read(saved / "splits" / "test")) == SAVED_ROWS[1:]


def test_a_saved_folder_that_is_empty_or_damaged_is_said(saved: Path) -> None:
    with pytest.raises(InvalidInput, match="empty has no rows"):
        Dataset.read(saved / "empty")
    for arrow in (saved / "one").glob("*.arrow"):
        arrow.write_bytes(b"no arrow")
    with pytest.raises(InvalidInput, match="one cannot be read"):
        Dataset.read(saved / "one")
    (saved / "formatted" / "state.json").write_text("{}")
    with pytest.raises(InvalidInput, match="formatted cannot be read"):
        Dataset.read(saved / "formatted")


def test_numbers_and_texts_of_numpy_become_pythons() -> None:
    [row] = Dataset.of([{"t": np.str_("x"), "f": np.float64(0.5), "n": np.int64(3), "bad": np.float32("nan")}])
    assert row == {"t": "x", "f": 0.5, "n": 3, "bad": None}
    assert [type(value) for value in row.values()] == [str, float, int, type(None)]


# -- tasks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "column", "expected"),
    [
        ({"question": "q"}, None, "q"),
        ({"prompt": "p", "question": "q"}, None, "p"),
        ({"messages": [{"role": "user", "content": "m"}], "prompt": "p"}, None, "m"),
        ({"prompt": [{"role": "user", "content": "m"}]}, None, "m"),
        ({"text": "t", "prompt": "p"}, "text", "t"),
    ],
)
def test_a_rows_conversation_is_found(row: dict[str, Any], column: str | None, expected: str) -> None:
    assert messages_of(row, column) == [{"role": "user", "content": expected}]


@pytest.mark.parametrize(
    ("row", "column", "words"),
    [
        ({"text": "t"}, None, "has none of the columns messages, prompt, question; its columns are text"),
        ({"text": "t"}, "texte", "has no column 'texte'; did you mean text?"),
        ({"prompt": 7}, None, "column 'prompt' must be a text or a list of messages"),
        ({"prompt": []}, None, "column 'prompt' must be"),
        ({"prompt": ["x"]}, None, "column 'prompt' must be"),
    ],
)
def test_a_row_without_a_conversation_is_named(row: dict[str, Any], column: str | None, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Dataset.of([{"question": "q", "prompt": "p", "text": "x", "texte": "x"}, row], "data").check_prompts(column)
    assert str(caught.value).startswith("data, item 1: ")
    assert words in str(caught.value)


def test_a_missing_column_is_named_with_its_line(tmp_path: Path) -> None:
    found = Dataset.read(jsonl(tmp_path / "a.jsonl", *map(json.dumps, ROWS)))
    found.check_column("question")
    with pytest.raises(
        InvalidInput, match=r"a\.jsonl, line 2: has no 'answer'; its columns are question, answer, level"
    ):
        found.check_column("answer")


def test_agents_do_not_see_what_only_the_reward_may() -> None:
    row = {"question": "q", "ground_truth": "7", "reward_model": {"ground_truth": "7"}, "answer": "8"}
    task = Task(row=row, prompt_uid="e0-r1", rollout=3, n_rollouts=8, attempt=1)
    assert task.shown_row == {"question": "q", "answer": "8"}
    assert (task.metadata, task.trajectory_uid) == (row, "e0-r1-3-1")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "neither train nor val"),
        ({"train": "a.jsonl", "n_rollouts": 0}, "n_rollouts"),
        ({"train": "a.jsonl", "n_rolouts": 2}, "n_rolouts"),
    ],
)
def test_a_wrong_configuration_of_data_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataConfig(**config)


def test_paths_are_below_the_configurations_folder(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", *map(json.dumps, ROWS))
    config = DataConfig(train=Path("train.jsonl"))
    assert config.val_rows(tmp_path) is None
    found = config.train_rows(tmp_path)
    assert found is not None
    assert list(found) == ROWS
    with pytest.raises(InvalidInput, match="line 1: has no column 'text'"):
        DataConfig(train=Path("train.jsonl"), prompt="text").train_rows(tmp_path)
