"""Where metrics go: JSON lines, TensorBoard, wandb. A row is one step's; writers take rows and are closed."""

from __future__ import annotations

from headrace.metrics.lines import Lines
from headrace.metrics.row import Row, Writer, flat
from headrace.metrics.table import Table
from headrace.metrics.tensorboard import TensorBoard
from headrace.metrics.wandb import Wandb

__all__ = ["Lines", "Row", "Table", "TensorBoard", "Wandb", "Writer", "flat"]
