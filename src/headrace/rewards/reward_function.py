"""`RewardFunction`: completions in, one number each out."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

log = logging.getLogger("headrace.rewards")

ASSISTANT = "assistant"


class RewardFunction(ABC):
    """A call gives what `compute` does, times `weight`; where that raises it is logged, and every reward is 0."""

    def __init__(self, weight: float = 1.0, name: str | None = None, **kwargs: Any) -> None:
        self.weight = weight
        self._name = name
        self.config = kwargs
        self.wandb_logger: Any = None

    @property
    def name(self) -> str:
        return self._name or type(self).__name__.lower()

    @abstractmethod
    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """The rewards before weighing. What else there is to know (a solution, ...) comes by name."""

    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        try:
            rewards = self.compute(completions, **kwargs)
            weighed = [reward * self.weight for reward in rewards]
            if self.wandb_logger:
                self.log_metrics(rewards, weighed)
        except Exception:  # whatever an author's reward raises: a run goes on without it
            log.exception("the reward %s failed; %d completions get 0", self.name, len(completions))
            return [0.0] * len(completions)
        return weighed

    def set_wandb_logger(self, logger: Any) -> None:
        """Something with a `log(metrics)`, such as a run of wandb."""
        self.wandb_logger = logger

    def log_metrics(self, raw_rewards: Sequence[float], weighted_rewards: Sequence[float]) -> None:
        if not self.wandb_logger or not raw_rewards:
            return
        name = f"reward/{self.name}"
        self.wandb_logger.log(
            {
                f"{name}/mean_raw": sum(raw_rewards) / len(raw_rewards),
                f"{name}/mean_weighted": sum(weighted_rewards) / len(weighted_rewards),
                f"{name}/min": min(raw_rewards),
                f"{name}/max": max(raw_rewards),
            }
        )

    @staticmethod
    def get_content(completion: Any) -> Any:
        """The text of a completion: a string, an assistant's message, one inside `message`, or the first of several.

        Empty where there is none.
        """
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


def one_each(value: Any, completions: Sequence[Any]) -> list[Any]:
    """A solution for each completion, of a list of them or of one for all."""
    return value if isinstance(value, list) else [value] * len(completions)
