"""The learner of several ranks: rank 0's tells the others what to do next, and all do it.

    rank 0     SharedLearner.learn(sequences, ...)  ->  sends ("learn", sequences, ...)  ->  Learner.learn
    others     follow(...)                          ->  receive                          ->  Learner.learn

So the trainer on rank 0 is the one that there is without other ranks, and a follower knows neither pool nor servers.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.data.sequence import Sequence
from headrace.trainer.checkpoint import Checkpoints, Progress
from headrace.trainer.config import TrainerConfig
from headrace.trainer.learner import Learner
from headrace.trainer.ranks import Ranks


def learner_of(config: TrainerConfig, device: str, ranks: Ranks) -> Learner:
    """Rank 0's learner; with others, one that they follow. Raises `InvalidInput` where there is no such device."""
    return Learner(config, ranks.placed(device)) if ranks.alone else SharedLearner(config, device, ranks)


class SharedLearner(Learner):
    """Rank 0's. Each method is done by all ranks; raises `RankLost` where one of them is gone."""

    def __init__(self, config: TrainerConfig, device: str, ranks: Ranks) -> None:
        ranks.together(lambda: super(SharedLearner, self).__init__(config, ranks.placed(device), ranks))
        self.agree_on_limits()
        ranks.settled = True

    def learn(self, sequences: list[Sequence], step: int, version: int) -> dict[str, float]:
        with self._everywhere("learn", sequences, step, version):
            return super().learn(sequences, step, version)

    def weights(self) -> dict[str, Tensor]:
        with self._everywhere("weights"):
            return super().weights()

    def served_weights(self) -> dict[str, Tensor]:
        with self._everywhere("served_weights"):
            return super().served_weights()

    def raw_log_probs(self, ids: list[int]) -> list[float]:
        with self._everywhere("raw_log_probs", ids):
            return super().raw_log_probs(ids)

    def write_state(self, folder: Path) -> None:
        with self._everywhere("write_state", folder):
            self.ranks.together(lambda: super(SharedLearner, self).write_state(folder))

    def resume(self, checkpoints: Checkpoints, place: Path) -> Progress:
        with self._everywhere("resume", place):
            return self.ranks.together(lambda: super(SharedLearner, self).resume(checkpoints, place))

    @contextmanager
    def _everywhere(self, command: str, *given: Any) -> Iterator[None]:
        """Has the other ranks do what this one does in the context. Where it fails here, they are in the middle of it,
        and end when this process does."""
        self.ranks.busy = True
        self.ranks.send((command, *given))
        yield
        self.ranks.busy = False


class Follower:
    """What another rank than 0 does: the methods are rank 0's commands."""

    def __init__(self, config: TrainerConfig, device: str, ranks: Ranks) -> None:
        self._checkpoints = Checkpoints(config.run, config.model, config.checkpoint.keep)
        self._ranks = ranks
        self._learner = ranks.together(lambda: Learner(config, ranks.placed(device), ranks))
        self._learner.agree_on_limits()

    def learn(self, sequences: list[Sequence], step: int, version: int) -> None:
        self._learner.learn(sequences, step, version)

    def weights(self) -> None:
        self._learner.weights()

    def served_weights(self) -> None:
        self._learner.served_weights()

    def raw_log_probs(self, ids: list[int]) -> None:
        self._learner.raw_log_probs(ids)

    def write_state(self, folder: Path) -> None:
        self._ranks.together(lambda: self._learner.write_state(folder))

    def resume(self, place: Path) -> None:
        self._ranks.together(lambda: self._learner.resume(self._checkpoints, place))


def follow(config: TrainerConfig, device: str, ranks: Ranks) -> None:
    """Does what rank 0 says until it ends the run. Raises `RankLost` where another rank is gone, and `SystemExit` where
    one failed and rank 0 has said why. Ctrl-C and SIGTERM are rank 0's to answer."""
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()  # what it says of a model, rank 0's says too
    with _signals_ignored():
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        follower = Follower(config, device, ranks)
        while (command := ranks.receive()) is not None:
            name, *given = command
            getattr(follower, name)(*given)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Leaves SIGINT and SIGTERM to rank 0 while the context lasts. Only a main thread has signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
