"""A model in the place of one: what it says depends on a seed, on what it was asked, and on how often."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from headrace.envs.server.api_server import APIServer
from headrace.envs.server.config import APIServerConfig, ReasoningConfig
from headrace.envs.server.responses import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionMessage,
    CompletionChoice,
    CompletionUsage,
    TextCompletion,
    TokensAndLogprobs,
    plain_json,
)

#: What is said: the text of all that was asked so far, and chance to choose by.
Say = Callable[[str, random.Random], str]


class Model:
    """Answers are cut at `max_tokens`; an answer that is not ends with the token that ends a turn."""

    def __init__(self, say: Say, tokenizer: Any, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.said: list[str] = []
        self._say, self._seed = say, seed
        self._asked: Counter[str] = Counter()

    def answer(self, asked: str, kwargs: dict[str, Any]) -> tuple[list[int], str, str]:
        """Ids, their text, and how it ended."""
        self._asked[asked] += 1
        chance = random.Random(f"{self._seed}/{self._asked[asked]}/{asked}")
        return self.spoken(self._say(asked, chance), kwargs)

    def spoken(self, text: str, kwargs: dict[str, Any]) -> tuple[list[int], str, str]:
        """A text as an answer to a call."""
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        most = next((kwargs[name] for name in LENGTHS if kwargs.get(name)), None)
        ended = "stop"
        if most is not None and len(ids) > most:
            ids, ended = ids[:most], "length"
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        self.said.append(text)
        return ids, text, ended


LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens")


class ModelServer(APIServer):
    """A rollout server without a server: the model answers in this process."""

    def __init__(self, model: Model, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        super().__init__(config, reasoning_config)
        self.model = model
        self.tokenizing.use(model.tokenizer)

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        self.server_healthy = True

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        messages = plain_json(kwargs["messages"])
        asked = "\n".join(f"{message['role']}: {message.get('content')}" for message in messages)
        answers = [self.model.answer(asked, kwargs) for _ in range(kwargs.get("n") or 1)]
        choices = [
            ChatChoice(index=at, message=ChatCompletionMessage(content=text), finish_reason=ended)
            for at, (_, text, ended) in enumerate(answers)
        ]
        sampled = sum(len(ids) for ids, _, _ in answers)
        usage = CompletionUsage(prompt_tokens=len(asked), completion_tokens=sampled, total_tokens=len(asked) + sampled)
        return ChatCompletion(model=self.config.model_name, choices=choices, usage=usage)

    async def _completion_wrapper(self, **kwargs: Any) -> TextCompletion:
        answers = [self.model.answer(str(kwargs["prompt"]), kwargs) for _ in range(kwargs.get("n") or 1)]
        choices = [
            CompletionChoice(index=at, text=text, finish_reason=ended) for at, (_, text, ended) in enumerate(answers)
        ]
        return TextCompletion(model=self.config.model_name, choices=choices)

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        ids = kwargs.get("input_ids")
        prompt = self.tokenizing.prompt_ids(kwargs["prompt"]) if ids is None else [int(token) for token in ids]
        asked = str(self.model.tokenizer.decode(prompt))
        answers = [self.model.answer(asked, kwargs) for _ in range(kwargs.get("n") or 1)]
        log_probs = [[-(at % 7 + 1) / 8 for at in range(len(sampled))] for sampled, _, _ in answers]
        return prompt, [sampled for sampled, _, _ in answers], log_probs, [ended for _, _, ended in answers]
