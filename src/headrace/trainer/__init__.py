"""The trainer: batches from the pool, gradients, weights back to the rollout servers.

`headrace train CONFIG.yaml` is `train(load(path))`; `Trainer` is the same for a program of your own. `LossBatch`,
`AdvantageBatch` and `FilterGroup` are what losses, advantages and filters of your own are given.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.trainer.advantages import AdvantageBatch
    from headrace.trainer.config import TrainerConfig, load
    from headrace.trainer.filters import FilterGroup
    from headrace.trainer.losses import LossBatch
    from headrace.trainer.trainer import Trainer, train

__all__ = ["AdvantageBatch", "FilterGroup", "LossBatch", "Trainer", "TrainerConfig", "load", "train"]

_HOME = {
    **{"Trainer": "trainer", "train": "trainer", "TrainerConfig": "config", "load": "config"},
    **{"AdvantageBatch": "advantages", "FilterGroup": "filters", "LossBatch": "losses"},
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used: reading a configuration does not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'headrace.trainer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"headrace.trainer.{_HOME[name]}"), name)
