"""What a channel holds, as a file for other tools: Parquet or JSONL, one row a step or a Sequence.

Rows are read from the pool a trajectory at a time and written as they come, so an export costs the memory of a few.
The file appears under its name once it is whole. A step's row has every field of `Step`; `read_steps` gives back the
same steps. Structured fields (`metadata`, `sampling`, `multi_modal_data`) are JSON text in Parquet; bytes and arrays in
them become `{"$bytes": base64}` and `{"$array": base64, "dtype", "shape"}`, a dict whose keys are not all text becomes
`{"$items": [[key, value], ...]}`.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import orjson

from headrace.data.errors import InvalidInput, shown
from headrace.data.sequence import Sequence
from headrace.data.step import Step, step_from_dict
from headrace.data.trajectory import Trajectory
from headrace.extras import install_command
from headrace.pool.config import DEFAULT_CHANNEL, choice
from headrace.pool.errors import NotFound, PoolError

What = Literal["steps", "sequences"]
Row = dict[str, Any]

#: A step's columns. `builds_on` is how a producer may send one; a step that is read has its whole prompt.
STEP_FIELDS = tuple(name for name in Step.__struct_fields__ if name != "builds_on")

#: Trajectories listed at a time.
TRAJECTORIES_A_PAGE = 1_000
#: A row group is written once it holds so many rows or tokens.
ROW_GROUP_ROWS = 4_096
ROW_GROUP_TOKENS = 4_000_000


class Readable(Protocol):
    """What an export asks of a pool: the embedded, the remote and the read-only one have it."""

    def list_trajectories(self, channel: str = ..., **filters: Any) -> Any: ...

    def trajectory(self, trajectory_uid: str, channel: str | None = ...) -> Any: ...


class ExportError(PoolError):
    """A file that cannot be written or read as asked."""

    code = "export_error"


@dataclass(frozen=True, slots=True)
class Exported:
    """`gone` trajectories were listed and had left the pool when it was their turn."""

    path: Path
    rows: int
    trajectories: int
    gone: int
    bytes: int


def export(
    pool: Readable, path: str | os.PathLike[str], channel: str = DEFAULT_CHANNEL, what: What = "steps"
) -> Exported:
    """Writes what the channel holds, queued and leased, to `path`: `.parquet`, `.jsonl` or `.ndjson`."""
    choice(what, What, "what")
    path = Path(path)
    open_writer = _writer(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    rows = trajectories = gone = 0
    writer = open_writer(draft, what, channel)
    try:
        for uid in _uids(pool, channel):
            try:
                trajectory = pool.trajectory(uid, channel)
            except NotFound:
                gone += 1
                continue
            trajectories += 1
            for row in _rows(trajectory, what):
                writer.add(row)
                rows += 1
        writer.close()
        os.replace(draft, path)
    except BaseException:
        writer.abandon()
        with suppress(FileNotFoundError):
            draft.unlink()
        raise
    return Exported(path, rows, trajectories, gone, path.stat().st_size)


def read_steps(path: str | os.PathLike[str]) -> Iterator[Step]:
    """The steps of an export, as they were."""
    path = Path(path)
    for row in _read_parquet(path) if _is_parquet(path) else _read_jsonl(path):
        if "tokens" in row:
            raise ExportError(f"{path} holds sequences, not steps")
        yield _step(row)


def _uids(pool: Readable, channel: str) -> Iterator[str]:
    """Every trajectory that the channel lists; once each, though a pool that runs may list one twice."""
    seen: set[str] = set()
    cursor: int | None = 0
    while cursor is not None:
        page = pool.list_trajectories(channel, cursor=cursor, limit=TRAJECTORIES_A_PAGE)
        fresh = [row["trajectory_uid"] for row in page["items"] if row["trajectory_uid"] not in seen]
        seen.update(fresh)
        yield from fresh
        cursor = page["next"]


def _rows(trajectory: Trajectory, what: What) -> Iterator[Row]:
    if what == "steps":
        yield from map(_step_row, trajectory.steps)
    else:
        yield from map(_sequence_row, trajectory.sequences())


def _step_row(step: Step) -> Row:
    return {name: getattr(step, name) for name in STEP_FIELDS}


def _sequence_row(sequence: Sequence) -> Row:
    row = {name: getattr(sequence, name) for name in Sequence.__slots__}
    row["spans"] = [{name: getattr(span, name) for name in span.__slots__} for span in sequence.spans]
    return row


# -- rows to JSON and back ---------------------------------------------------------------------------------------------

#: The keys of what stands for a value that JSON has no form of. A dict of a producer's with the same keys is written as
#: its items, so that neither is taken for the other.
_FORMS = ({"$bytes"}, {"$array", "dtype", "shape"}, {"$items"})


def _jsonable(value: Any) -> Any:
    """Bytes, arrays and dicts with keys that are no text, inside a structured field, as JSON; all else as it is."""
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"$array": data, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not any(value.keys() == form for form in _FORMS):
            return {key: _jsonable(item) for key, item in value.items()}
        return {"$items": [[_jsonable(key), _jsonable(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value


def _unjson(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"$bytes"}:
            return base64.b64decode(value["$bytes"])
        if value.keys() == {"$array", "dtype", "shape"}:
            return np.frombuffer(base64.b64decode(value["$array"]), value["dtype"]).reshape(value["shape"])
        if value.keys() == {"$items"}:
            return {_key(_unjson(key)): _unjson(item) for key, item in value["$items"]}
        return {key: _unjson(item) for key, item in value.items()}
    return [_unjson(item) for item in value] if isinstance(value, list) else value


def _key(value: Any) -> Any:
    """A key of a dict: a list among them was a tuple."""
    return tuple(map(_key, value)) if isinstance(value, list) else value


def _text(value: Any) -> str | None:
    if value is None:
        return None
    try:
        return orjson.dumps(_jsonable(value), option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except TypeError as error:
        raise ExportError(f"{shown(value)} has no JSON form: {error}") from None


def _step(row: Row) -> Step:
    given = dict(row)
    for name in ("metadata", "sampling", "multi_modal_data"):
        given[name] = _unjson(given[name])
    given["tags"] = tuple(given["tags"] or ())
    if given["version_spans"] is not None:
        given["version_spans"] = tuple((first, version) for first, version in given["version_spans"])
    return step_from_dict(given)


# -- JSONL -------------------------------------------------------------------------------------------------------------


class _Jsonl:
    """One JSON object a line. A log-prob that was not recorded is null."""

    def __init__(self, path: Path, what: What, channel: str) -> None:
        self._file = path.open("wb")

    def add(self, row: Row) -> None:
        plain = {k: v.tolist() if isinstance(v, np.ndarray) else _jsonable(v) for k, v in row.items()}
        try:
            self._file.write(orjson.dumps(plain, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY))
        except TypeError as error:
            raise ExportError(f"a row of trajectory {row['trajectory_uid']!r} has no JSON form: {error}") from None

    def close(self) -> None:
        self._file.close()

    abandon = close


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise ExportError(f"{path}, line {number}: {error}") from None


# -- Parquet -----------------------------------------------------------------------------------------------------------


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise ExportError(f"Parquet needs pyarrow (or export to .jsonl): {install_command('export')}") from None
    return pyarrow


def _schema(pa: Any, what: What, channel: str) -> Any:
    text, whole, number, flag = pa.string(), pa.int64(), pa.float64(), pa.bool_()
    ids, probs = pa.list_(pa.int32()), pa.list_(pa.float32())
    if what == "steps":
        kinds: dict[str, Any] = {
            "prompt_ids": ids,
            "response_ids": ids,
            "trajectory_uid": text,
            "prompt_uid": text,
            "step_index": whole,
            "reward": number,
            "rollout_log_probs": probs,
            "policy_version": whole,
            "is_last": flag,
            "metadata": text,
            "finish_reason": text,
            "sampling": text,
            "multi_modal_data": text,
            "routed_experts": pa.struct([("data", pa.binary()), ("dtype", text), ("shape", pa.list_(whole))]),
            "created_at": number,
            "call_id": text,
            "version_spans": pa.list_(pa.list_(whole)),
            "quarantined": text,
            "trainable": flag,
            "quality": number,
            "tags": pa.list_(text),
            "note": text,
        }
    else:
        kinds = {
            "tokens": ids,
            "loss_mask": pa.list_(flag),
            "log_probs": probs,
            "versions": ids,
            "trajectory_uid": text,
            "prompt_uid": text,
            "reward": number,
            "spans": pa.list_(
                pa.struct(
                    [
                        ("step_index", whole),
                        ("start", whole),
                        ("end", whole),
                        ("reward", number),
                        ("trained", flag),
                        ("finish_reason", text),
                        ("sampling", text),
                    ]
                )
            ),
            "advantages": probs,
            "metadata": text,
        }
    about = {"headrace": orjson.dumps({"format": 1, "what": what, "channel": channel})}
    return pa.schema(list(kinds.items()), metadata=about)


class _Parquet:
    """Row groups of a few thousand rows, compressed. Structured fields are JSON text."""

    def __init__(self, path: Path, what: What, channel: str) -> None:
        self._pa = _arrow()
        self._schema = _schema(self._pa, what, channel)
        self._writer = self._pa.parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[Row] = []
        self._tokens = 0

    def add(self, row: Row) -> None:
        self._rows.append({name: _cell(name, value) for name, value in row.items()})
        self._tokens += sum(len(value) for value in row.values() if isinstance(value, np.ndarray))
        if len(self._rows) >= ROW_GROUP_ROWS or self._tokens >= ROW_GROUP_TOKENS:
            self._flush()

    def _flush(self) -> None:
        columns = [self._pa.array([row[field.name] for row in self._rows], type=field.type) for field in self._schema]
        self._writer.write_table(self._pa.Table.from_arrays(columns, schema=self._schema))
        self._rows, self._tokens = [], 0

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()

    def abandon(self) -> None:
        self._writer.close()


def _cell(name: str, value: Any) -> Any:
    """A row's value as Arrow takes it."""
    if name in ("metadata", "sampling", "multi_modal_data"):
        return _text(value)
    if name == "routed_experts" and value is not None:
        return {"data": value.tobytes(), "dtype": value.dtype.str, "shape": list(value.shape)}
    if name == "spans":
        return [{**span, "sampling": _text(span["sampling"])} for span in value]
    return value


def _read_parquet(path: Path) -> Iterator[Row]:
    pa = _arrow()
    with pa.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROW_GROUP_ROWS):
            names = batch.schema.names
            for at in range(batch.num_rows):
                yield {name: _uncell(name, batch.column(i)[at]) for i, name in enumerate(names)}


def _uncell(name: str, scalar: Any) -> Any:
    if name in ("prompt_ids", "response_ids", "rollout_log_probs"):
        return scalar.values.to_numpy() if scalar.is_valid else None
    value = scalar.as_py()
    if value is not None and name in ("metadata", "sampling", "multi_modal_data"):
        return orjson.loads(value)
    if value is not None and name == "routed_experts":
        return np.frombuffer(value["data"], value["dtype"]).reshape(value["shape"])
    return value


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _writer(path: Path) -> Callable[[Path, What, str], _Jsonl | _Parquet]:
    if _is_parquet(path):
        _arrow()
        return _Parquet
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return _Jsonl
    raise InvalidInput(f"{str(path)!r} names no format; end it with .parquet or .jsonl")
