"""Metrics for TensorBoard: its event files, which need neither torch nor tensorflow to be written."""

from __future__ import annotations

import time
from pathlib import Path

from headrace.data.errors import HeadraceError
from headrace.extras import install_command
from headrace.metrics.row import Row, flat


class TensorBoard:
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
