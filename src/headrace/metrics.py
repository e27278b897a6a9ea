"""Writers of metrics: JSON lines, TensorBoard, wandb. A row has the metrics of one step.

TensorBoard's event files are written without torch or tensorflow. Without a login wandb's run is kept offline, to be
synced later; it never asks for a key.
"""

from __future__ import annotations

import logging
import netrc
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from headrace.data.errors import HeadraceError
from headrace.data.json import to_json
from headrace.extras import install_command
from headrace.files import append

log = logging.getLogger("headrace.metrics")

#: Names and values of one step's metrics; `step` is among them.
Row = dict[str, Any]


class Writer(Protocol):
    """Takes rows of metrics until it is closed."""

    def write(self, row: Row) -> None:
        """Writes one row, which has a `step`."""

    def close(self) -> None:
        """Flushes and closes; nothing may be written afterwards."""


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row; those of nested mappings under names such as `times/wait`."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[prefix + name] = value
        elif getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of numpy's or of torch's
            found[prefix + name] = value.item()
    return found


@dataclass(slots=True)
class Table:
    """A table as a metric: shown as a table in wandb, and written whole to JSON lines."""

    columns: Sequence[str]
    data: list[tuple[Any, ...]] = field(default_factory=list)

    def add_data(self, *row: Any) -> None:
        """Adds a row; raises `ValueError` where it has not one value for each column."""
        if len(row) != len(self.columns):
            raise ValueError(f"a row of {len(row)} values in a table of {len(self.columns)}: {', '.join(self.columns)}")
        self.data.append(row)


class JsonLines:
    """Appends one line for each row to a file that others may read meanwhile. It holds whole lines only: a partial one
    is removed when its write fails, and when the file of a killed writer is opened again."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._cut()

    def write(self, row: Row) -> None:
        append(self._fd, _encoded(row) + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _cut(self) -> None:
        end = os.fstat(self._fd).st_size
        while end and os.pread(self._fd, 1, end - 1) != b"\n":
            end -= 1
        os.ftruncate(self._fd, end)


def _encoded(row: Row) -> bytes:
    try:
        return to_json(row)
    except (TypeError, ValueError):
        return to_json({str(name): _plain(value) for name, value in row.items()})


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: foreign tables as columns and data, what cannot be encoded as its text."""
    if hasattr(value, "columns") and hasattr(value, "data"):
        return {"columns": list(value.columns), "data": [list(row) for row in value.data]}
    try:
        to_json(value)
    except (TypeError, ValueError):
        return str(value)
    return value


class TensorBoard:
    """Writes TensorBoard's event files into a folder. Raises `HeadraceError` where it is not installed."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as error:
            raise HeadraceError(f"metrics for TensorBoard need it: {install_command('tensorboard')}") from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))

    def write(self, row: Row) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in flat(row).items()]
        event = self._event(wall_time=time.time(), step=int(row["step"]), summary=self._summary(value=values))
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()


#: Environment variables that configure how wandb is reached, or that it is not.
WANDB_VARIABLES = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
#: Seconds that wandb's servers may take to answer before the run goes on offline.
WANDB_INIT_TIMEOUT_S = 30.0


class Wandb:
    """Writes to one run of wandb, which becomes `wandb.run` of this process. Raises `HeadraceError` where wandb is not
    installed."""

    def __init__(
        self, project: str | None, folder: Path, *, name: str | None = None, group: str | None = None, config: Row
    ) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise HeadraceError(f"metrics in wandb need it: {install_command('wandb')}") from error
        self._table = wandb.Table
        given: dict[str, Any] = {"project": project, "name": name, "group": group, "config": config, "resume": "allow"}
        given |= {"dir": folder, "settings": wandb.Settings(init_timeout=WANDB_INIT_TIMEOUT_S)}
        if not logged_in():
            log.warning("wandb has no login here: the run is kept offline under %s (wandb sync sends it)", folder)
            self._run = wandb.init(**given, mode="offline")
            return
        try:
            self._run = wandb.init(**given)
        except wandb.errors.Error as error:
            log.warning("wandb does not answer (%s): the run is kept offline under %s", error, folder)
            self._run = wandb.init(**given, mode="offline")

    def write(self, row: Row) -> None:
        shown = {name: self._shown(value) for name, value in row.items() if not isinstance(value, str)}
        self._run.log({**flat(row), **{name: value for name, value in shown.items() if value is not None}}, row["step"])

    def close(self) -> None:
        self._run.finish()

    def _shown(self, value: Any) -> Any:
        """wandb's object for a table, and wandb's own values as they are; None for anything else."""
        if isinstance(value, Table):
            return self._table(columns=list(value.columns), data=[list(row) for row in value.data])
        return value if type(value).__module__.startswith("wandb") else None


def logged_in() -> bool:
    """Whether wandb has credentials or a mode configured, by a variable or in `~/.netrc`."""
    if any(os.environ.get(name) for name in WANDB_VARIABLES):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            if path and netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
