"""Rows of data: a JSONL or Parquet file, a folder that `datasets` saved, or any iterable of mappings.

A dataset is read once and checked then, so that a wrong row is known before anything is started. Every row is what JSON
can hold: it travels to the gateway with its trajectory. Errors name the file, the line or row, and the column.
"""

from __future__ import annotations

import datetime
import decimal
import importlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from headrace.data.errors import InvalidInput, shown
from headrace.extras import MissingExtra, install_command
from headrace.flows.task import messages_of

#: How `Dataset.save_to_disk` marks its folder, and how `DatasetDict.save_to_disk` does.
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"

#: The integers that travel to the gateway as they are: those of 64 bits, with or without a sign.
LEAST_INTEGER, MOST_INTEGER = -(1 << 63), (1 << 64) - 1
#: What may be a longer one.
LONG_NUMBER = re.compile(rb"\d{19}")

Row = dict[str, Any]


class Dataset(Sequence[Row]):
    """The rows of one source, in their order. `name` and `place` say where a row stands: `train.jsonl, line 7`."""

    def __init__(self, rows: Sequence[Row], name: str, places: Callable[[int], str]) -> None:
        self._rows = rows
        self._places = places
        self.name = name

    @classmethod
    def read(cls, path: str | Path) -> Dataset:
        """The rows of a file or folder. Raises `InvalidInput` where there are none, or one of them is wrong, and
        `MissingExtra` where the library that reads it is not installed."""
        path = Path(path)
        if path.is_dir():
            return cls._of_folder(path)
        if not path.is_file():
            raise InvalidInput(f"there is no file {path}")
        kind = path.suffix.lower()
        if kind in (".jsonl", ".ndjson"):
            return cls._of_jsonl(path)
        if kind == ".parquet":
            return cls._of_parquet(path)
        raise InvalidInput(f"{path} must be a .jsonl or .parquet file, or a folder that `datasets` saved")

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], name: str = "rows") -> Dataset:
        """The rows of any iterable, which is read to its end."""
        return cls._checked([_row(row, f"{name}, item {at}") for at, row in enumerate(rows)], name, "item", 0)

    @classmethod
    def _of_jsonl(cls, path: Path) -> Dataset:
        rows, lines = [], []
        try:
            with path.open("rb") as file:
                for line, text in enumerate(file, 1):
                    if not text.strip():
                        continue
                    rows.append(_parsed(text, f"{path}, line {line}"))
                    lines.append(line)
        except OSError as error:
            raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
        if not rows:
            raise InvalidInput(f"{path} has no rows")
        return cls(rows, str(path), lambda at: f"{path}, line {lines[at]}")

    @classmethod
    def _of_parquet(cls, path: Path) -> Dataset:
        try:
            parquet = importlib.import_module("pyarrow.parquet")
        except ModuleNotFoundError:
            raise MissingExtra(f"{path} needs pyarrow: {install_command('export')}") from None
        try:
            found = parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:  # pyarrow's errors are of these
            raise InvalidInput(f"{path} cannot be read: {error}") from error
        return cls._checked([_row(row, f"{path}, row {at}") for at, row in enumerate(found, 1)], str(path), "row", 1)

    @classmethod
    def _of_folder(cls, path: Path) -> Dataset:
        if (path / SAVED_SPLITS).is_file():
            splits = ", ".join(sorted(part.name for part in path.iterdir() if part.is_dir()))
            raise InvalidInput(f"{path} holds several splits; name one of them: {splits}")
        if not (path / SAVED).is_file():
            raise InvalidInput(f"{path} is no folder that `datasets` saved: it has no {SAVED}")
        try:
            datasets = importlib.import_module("datasets")
        except ModuleNotFoundError:
            raise MissingExtra(f"{path} needs datasets: {install_command('datasets')}") from None
        try:
            if orjson.loads((path / SAVED).read_bytes())["_data_files"]:
                # Without the format that it was saved with, which may leave columns out.
                found = datasets.load_from_disk(str(path)).with_format(None)
            else:  # no rows, which the library can save but not load
                found = []
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidInput(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        return cls._checked([_row(row, f"{path}, row {at}") for at, row in enumerate(found, 1)], str(path), "row", 1)

    @classmethod
    def _checked(cls, rows: list[Row], name: str, counted: str, first: int) -> Dataset:
        if not rows:
            raise InvalidInput(f"{name} has no rows")
        return cls(rows, name, lambda at: f"{name}, {counted} {at + first}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Any:
        return self._rows[at]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all rows' columns, in the order in which they first appear."""
        return tuple(dict.fromkeys(name for row in self._rows for name in row))

    def place(self, at: int) -> str:
        """Where a row stands, for messages."""
        return self._places(at)

    def check_prompts(self, column: str | None = None) -> None:
        """Raises `InvalidInput` for the first row without a conversation (`messages_of`)."""
        for at, row in enumerate(self._rows):
            try:
                messages_of(row, column)
            except InvalidInput as error:
                raise InvalidInput(f"{self.place(at)}: {error}") from None

    def check_column(self, column: str) -> None:
        """Raises `InvalidInput` for the first row that has no value in a column."""
        for at, row in enumerate(self._rows):
            if row.get(column) is None:
                raise InvalidInput(f"{self.place(at)}: has no {column!r}; its columns are {', '.join(row)}")


def _parsed(text: bytes, place: str) -> Row:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"{place}, column {error.colno}: is no JSON: {error.msg}") from None
    if not isinstance(found, dict):
        raise InvalidInput(f'{place}: must be an object such as {{"question": "..."}}, not {shown(found)}')
    if LONG_NUMBER.search(text):  # orjson makes a float of an integer that is too long
        return _row(json.loads(text), place)
    return found


def _row(given: Any, place: str) -> Row:
    if not isinstance(given, Mapping):
        raise InvalidInput(f"{place}: must be a mapping such as {{'question': '...'}}, not {shown(given)}")
    return {str(name): _plain(value, f"{place}, column {name!r}") for name, value in given.items()}


def _plain(value: Any, place: str) -> Any:
    """A value as JSON has it: times as text, numpy's numbers and arrays as Python's."""
    if hasattr(value, "tolist"):  # numpy's scalars and arrays; some of them are floats and texts too
        return _plain(value.tolist(), place)
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        if not LEAST_INTEGER <= value <= MOST_INTEGER:
            raise InvalidInput(
                f"{place}: holds an integer of more than 64 bits, which would be rounded; write it as text"
            )
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(one, place) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, place) for one in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise InvalidInput(f"{place}: holds {type(value).__name__}, which JSON cannot; convert it or leave it out")
