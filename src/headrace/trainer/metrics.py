"""What a run tells of each step: JSON lines in its folder, and TensorBoard or wandb where they are asked for.

A resumed run cuts what came after its checkpoint, so that the file tells every step once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import orjson

from headrace.data.errors import HeadraceError
from headrace.trainer.config import LogConfig

Row = dict[str, Any]


class Writer(Protocol):
    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Every writer of a run, as one."""

    def __init__(self, run: Path, config: LogConfig, settings: Row) -> None:
        self._writers: list[Writer] = [Lines(run / "metrics.jsonl")]
        if config.tensorboard:
            self._writers.append(TensorBoard(run / "tensorboard"))
        if config.wandb is not None:
            self._writers.append(Wandb(config.wandb, run, settings))

    def write(self, row: Row) -> None:
        for writer in self._writers:
            writer.write(row)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class Lines:
    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def write(self, row: Row) -> None:
        self._file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise HeadraceError("log.tensorboard needs it: pip install tensorboard") from error
        self._writer = SummaryWriter(str(folder))

    def write(self, row: Row) -> None:
        for name, value in flat(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    def __init__(self, project: str, run: Path, settings: Row) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise HeadraceError("log.wandb needs it: pip install 'headrace[wandb]'") from error
        self._run = wandb.init(project=project, dir=run, name=run.name, config=settings, resume="allow")

    def write(self, row: Row) -> None:
        self._run.log(flat(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


def flat(row: Row, prefix: str = "") -> dict[str, float]:
    """The numbers of a row, those of its parts by names such as `times/wait`."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[prefix + name] = value
    return found


def cut(run: Path, step: int) -> None:
    """Drops the lines after a step, and one that was not written to its end."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if line.endswith(b"\n") and orjson.loads(line)["step"] <= step:
                kept.append(line)
        except (orjson.JSONDecodeError, KeyError, TypeError):
            continue
    draft = path.with_suffix(".part")
    draft.write_bytes(b"".join(kept))
    draft.rename(path)  # at once: somebody may be reading
