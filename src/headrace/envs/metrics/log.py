"""Where an environment's metrics go: JSON lines always, TensorBoard and wandb where they are asked for.

Metrics are told beside the work: a disk that is full or a library that fails costs a row and a warning, never the work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.data.errors import HeadraceError
from headrace.metrics import Lines, Row, TensorBoard, Wandb, Writer

log = logging.getLogger("headrace.envs")


class MetricsLog:
    """The writers of one run. The lines begin with the first row, so that an environment which tells nothing leaves no
    file; TensorBoard, which has to be asked for, is there or an error from the start; wandb is opened by its name, once
    the trainer has said it. `last` is what the environment told last.
    """

    def __init__(self, lines: str | None, tensorboard: str | None = None) -> None:
        self._lines = Path(lines) if lines is not None else None
        self.last: Mapping[str, Any] = {}
        self._writers: list[Writer] = []
        if tensorboard is not None:
            self._writers.append(TensorBoard(Path(tensorboard)))
        self._wandb: Writer | None = None
        self._begun = False
        self._warned: set[str] = set()

    def open_wandb(self, project: str | None, *, group: str | None, name: str | None, config: Row) -> None:
        """Logs to wandb too, where it is installed: it is on by default, and the lines tell the same."""
        folder = self._lines.parent if self._lines is not None else Path()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._wandb = Wandb(project, folder, name=name, group=group, config=config)
        except (HeadraceError, OSError) as error:
            log.warning("%s; metrics go to %s (use_wandb: false does without)", error, self._lines or "no file either")

    def write(self, step: int, own: Mapping[str, Any], shared: Mapping[str, Any], prefix: str | None) -> None:
        """One row. `prefix` is who we are among environments that share a file; in wandb, own metrics begin with it."""
        self.last = own
        self._write(step, own, shared, prefix)

    def _write(self, step: int, own: Mapping[str, Any], shared: Mapping[str, Any], prefix: str | None) -> None:
        row = {"step": step, "time": time.time(), "env": prefix, **own, **shared}
        self._begin()
        for writer in self._writers:
            self._try(writer, row)
        if self._wandb is not None:
            named = {f"{prefix}_{name}": value for name, value in own.items()} if prefix else dict(own)
            self._try(self._wandb, {"step": step, **named, **shared})

    def event(self, step: int, name: str, times: int, about: Mapping[str, float], prefix: str | None) -> None:
        """A row of its own for what happened just now: `event/NAME` is how many times it has, its numbers are below."""
        told = {f"event/{name}": times, **{f"event/{name}/{what}": value for what, value in about.items()}}
        self._write(step, told, {}, prefix)

    def close(self) -> None:
        for writer in (*self._writers, *((self._wandb,) if self._wandb is not None else ())):
            try:
                writer.close()
            except Exception as error:
                log.warning("%s was not closed: %s", type(writer).__name__, error)
        self._writers, self._wandb, self._begun = [], None, False

    def _begin(self) -> None:
        if self._begun or self._lines is None:
            return
        self._begun = True
        try:
            self._lines.parent.mkdir(parents=True, exist_ok=True)
            self._writers.append(Lines(self._lines))
        except OSError as error:
            log.warning("metrics are not kept: %s", error)

    def _try(self, writer: Writer, row: Row) -> None:
        try:
            writer.write(row)
        except Exception as error:
            said = f"{type(writer).__name__}: {error}"
            if said not in self._warned:
                self._warned.add(said)
                log.warning("a row of metrics was not written by %s", said)
