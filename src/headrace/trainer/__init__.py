"""The trainer: batches from the pool, gradients, weights back to the rollout servers.

`headrace train CONFIG.yaml` is `train(load(path))`; `Trainer` is the same for a program of your own.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.trainer.config import TrainerConfig, load
    from headrace.trainer.trainer import Trainer, train

__all__ = ["Trainer", "TrainerConfig", "load", "train"]

_HOME = {"Trainer": "trainer", "train": "trainer", "TrainerConfig": "config", "load": "config"}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used: reading a configuration does not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'headrace.trainer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"headrace.trainer.{_HOME[name]}"), name)
