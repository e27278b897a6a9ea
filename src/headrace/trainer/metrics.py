"""What a run tells of each step: JSON lines in its folder, and TensorBoard or wandb where they are asked for.

A resumed run cuts what came after its checkpoint, so that the file tells every step once.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from headrace.metrics import (
    JsonLines,
    Row,
    TensorBoard,
    Wandb,
    Writer,
)
from headrace.trainer.config import LogConfig


class Metrics:
    """Every writer of a run, as one."""

    def __init__(self, run: Path, config: LogConfig, settings: Row) -> None:
        self._writers: list[Writer] = [JsonLines(run / "metrics.jsonl")]
        if config.tensorboard:
            self._writers.append(TensorBoard(run / "tensorboard"))
        if config.wandb is not None:
            self._writers.append(Wandb(config.wandb, run, name=run.name, config=settings))

    def write(self, row: Row) -> None:
        for writer in self._writers:
            writer.write(row)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


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
    path.write_bytes(b"".join(kept))
