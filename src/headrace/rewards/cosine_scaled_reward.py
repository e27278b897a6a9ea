"""How similar a completion's embedding is to the solution's."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.data.errors import HeadraceError
from headrace.extras import install_command
from headrace.rewards.registry import registry
from headrace.rewards.reward_function import RewardFunction, log

MODEL = "sentence-transformers/all-MiniLM-L6-v2"


@registry.register
class CosineScaledReward(RewardFunction):
    """1 less `scale_factor` times the cosine distance of the two embeddings, between `min_reward` and `max_reward`;
    `default_reward` where there is no solution.
    """

    def __init__(
        self,
        model_name: str | None = None,
        scale_factor: float = 1.0,
        min_reward: float = -1.0,
        max_reward: float = 1.0,
        default_reward: float = 0.0,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.model_name = model_name or MODEL
        self.scale_factor = scale_factor
        self.min_reward = min_reward
        self.max_reward = max_reward
        self.default_reward = default_reward
        embedder(self.model_name)

    def compute(self, completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
        if not solution:
            log.warning("%s has no solution to compare with", self.name)
            return [self.default_reward] * len(completions)
        embed = embedder(self.model_name)
        wanted = embed(solution if isinstance(solution, str) else self.get_content(solution))
        found = []
        for completion in completions:
            given = embed(self.get_content(completion))
            cosine = float(wanted @ given / (np.linalg.norm(wanted) * np.linalg.norm(given)))
            found.append(min(self.max_reward, max(self.min_reward, 1.0 - (1.0 - cosine) * self.scale_factor)))
        return found


@cache
def embedder(model_name: str) -> Any:
    """A function from a text to the mean of a model's last hidden states over its tokens. Each model is loaded once."""
    try:
        import torch
        from transformers import AutoModel, AutoTokenizer
    except ModuleNotFoundError as error:
        raise HeadraceError(f"this reward needs {error.name}: {install_command('train')}") from error
    try:
        tokenizer, model = AutoTokenizer.from_pretrained(model_name), AutoModel.from_pretrained(model_name)
    except (OSError, ValueError) as error:
        raise HeadraceError(f"the embedding model {model_name!r} cannot be loaded: {error}") from error

    def embed(text: str) -> npt.NDArray[np.float32]:
        given = tokenizer(text, padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            states = model(**given)[0]
        mask = given["attention_mask"].unsqueeze(-1).float()
        mean: npt.NDArray[np.float32] = ((states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)).numpy()[0]
        return mean

    return embed


def cosine_scaled_reward(completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
    """`CosineScaledReward` with its defaults."""
    return CosineScaledReward().compute(completions, solution=solution, **kwargs)
