"""`RewardFunction`: the base class of rewards. A reward takes completions and returns one number for each."""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

log = logging.getLogger("headrace.rewards")

ASSISTANT = "assistant"
#: The parameters by which a reward asks for what is right.
ASKING = frozenset({"solution", "ground_truth"})


class RewardFunction(ABC):
    """A reward. Calling it returns the rewards of `compute`, times `weight`.

    Where `compute` raises, each completion is computed alone. Those that raise again are logged, counted in `failed`
    and get NaN, which is no reward: an environment sends no group that holds one. The others get theirs.
    """

    #: Whether all completions of a call that raises get 0 instead, as under atroposlib's names.
    all_zero_on_error: bool = False
    #: Completions that could not be rewarded, over all calls.
    failed: int = 0

    def __init__(self, weight: float = 1.0, name: str | None = None, **kwargs: Any) -> None:
        self.weight = weight
        self._name = name
        self.config = kwargs
        self.wandb_logger: Any = None

    @property
    def name(self) -> str:
        return self._name or type(self).__name__.lower()

    @property
    def needs_truth(self) -> bool:
        """Whether `compute` asks for what is right, as `solution` or `ground_truth`."""
        return asks_for_truth(self.compute)

    @abstractmethod
    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """One reward for each completion, before `weight`. Further data, such as a solution, comes as keyword
        arguments."""

    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        try:
            rewards = self.compute(completions, **kwargs)
            weighed = [reward * self.weight for reward in rewards]
        except Exception:  # whatever an author's reward raises: a run goes on without it
            if self.all_zero_on_error:
                self.failed += len(completions)
                log.exception("the reward %s failed; %d completions get 0", self.name, len(completions))
                return [0.0] * len(completions)
            rewards = self.one_by_one(completions, **kwargs)
            weighed = [reward * self.weight for reward in rewards]
        if self.wandb_logger:
            try:
                self.log_metrics(rewards, weighed)
            except Exception:  # a logger's trouble costs no reward
                log.exception("the metrics of the reward %s could not be logged", self.name)
        return weighed

    def one_by_one(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """The rewards before `weight`, each computed alone; NaN for a completion whose reward raises."""
        rewards = []
        for at, completion in enumerate(completions):
            own = {name: _own(value, at, len(completions)) for name, value in kwargs.items()}
            try:
                (reward,) = self.compute([completion], **own)
                rewards.append(float(reward))
            except Exception:  # as above
                self.failed += 1
                log.exception("the reward %s failed at completion %d of %d", self.name, at + 1, len(completions))
                rewards.append(math.nan)
        return rewards

    def set_wandb_logger(self, logger: Any) -> None:
        """Sets the object whose `log(metrics)` gets this reward's metrics, such as a run of wandb."""
        self.wandb_logger = logger

    def log_metrics(self, raw_rewards: Sequence[float], weighted_rewards: Sequence[float]) -> None:
        """Logs mean, minimum and maximum of the rewards, and the number of failures, where there are any."""
        if not self.wandb_logger or not raw_rewards:
            return
        name = f"reward/{self.name}"
        metrics: dict[str, float] = {f"{name}/failed": self.failed} if self.failed else {}
        raw = [reward for reward in raw_rewards if not math.isnan(reward)]
        weighted = [reward for reward in weighted_rewards if not math.isnan(reward)]
        if raw:
            metrics |= {
                f"{name}/mean_raw": sum(raw) / len(raw),
                f"{name}/mean_weighted": sum(weighted) / len(weighted),
                f"{name}/min": min(raw),
                f"{name}/max": max(raw),
            }
        if metrics:
            self.wandb_logger.log(metrics)

    @staticmethod
    def get_content(completion: Any) -> Any:
        """The text of a completion: a string, an assistant's message, one inside `message`, or the first in a list.
        Empty where there is none."""
        found: Sequence[Any] = ()
        if isinstance(completion, str):
            return completion
        if isinstance(completion, dict):
            found = (completion, completion.get("message"))
        elif isinstance(completion, list):
            found = completion
        for message in found:
            if isinstance(message, dict) and message.get("role") == ASSISTANT and "content" in message:
                return message["content"]
        return ""


def asks_for_truth(function: Callable[..., Any]) -> bool:
    """Whether a function of completions has a parameter for what is right."""
    return not ASKING.isdisjoint(inspect.signature(function).parameters)


def _own(value: Any, at: int, count: int) -> Any:
    """A keyword argument for one of the completions: where it is a list with one value for each, that value in a
    list."""
    return [value[at]] if isinstance(value, list) and len(value) == count else value


def one_each(value: Any, completions: Sequence[Any]) -> list[Any]:
    """One value for each completion: those of a list, or the same for all."""
    return value if isinstance(value, list) else [value] * len(completions)
