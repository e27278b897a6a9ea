"""The vLLM server of TRL: one route, `/generate/`, that takes text and answers with ids."""

from __future__ import annotations

from typing import Any

from headrace.envs.server.answers import (
    ChatCompletion,
    ChatCompletionMessage,
    Choice,
    Completion,
    CompletionChoice,
    Tokens,
)
from headrace.envs.server.errors import NoTokens
from headrace.envs.server.openai_server import LENGTH_NAMES, OpenAIServer

#: What the route takes beside prompts, and its defaults where an environment says nothing.
DEFAULTS: dict[str, Any] = {
    "n": 1,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "max_tokens": 1024,
}


class TrlVllmServer(OpenAIServer):
    health_path = "/health/"

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        text = self.tokenizer.apply_chat_template(kwargs["messages"], tokenize=False, add_generation_prompt=True)
        _, texts, ends = await self._texts(text, kwargs)
        choices = [
            Choice(index=at, message=ChatCompletionMessage(content=said), finish_reason=end)
            for at, (said, end) in enumerate(zip(texts, ends, strict=True))
        ]
        return ChatCompletion(model=self.config.model_name, choices=choices)

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        _, texts, ends = await self._texts(kwargs["prompt"], kwargs)
        choices = [
            CompletionChoice(index=at, text=said, finish_reason=end)
            for at, (said, end) in enumerate(zip(texts, ends, strict=True))
        ]
        return Completion(model=self.config.model_name, choices=choices)

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Tokens:
        prompt = self._prompt(kwargs)
        text = prompt if isinstance(prompt, str) else self.tokenizing.vocabulary().decode(prompt)
        found = await self._generate(text, kwargs)
        consumed, ids, log_probs = found.get("prompt_ids"), found.get("completion_ids"), found.get("logprobs")
        if not consumed or not ids or not log_probs:
            raise NoTokens(f"{self.http.base}/generate/ gives no log-probs; use a newer TRL, or vLLM's own server")
        if not isinstance(prompt, str) and consumed[0] != prompt:
            raise NoTokens(f"{self.http.base}/generate/ takes text and read it as other tokens; use vLLM's own server")
        ends = [self._end(one) for one in ids]
        return consumed[0], *self.sampled(zip(ids, log_probs, ends, strict=True))

    async def _texts(self, text: str, kwargs: dict[str, Any]) -> tuple[Any, list[str], list[str]]:
        found = await self._generate(text, kwargs)
        ids = found["completion_ids"]
        texts = [self.tokenizer.decode(one, skip_special_tokens=True) for one in ids]
        return ids, texts, [self._end(one) for one in ids]

    async def _generate(self, text: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        given = dict(kwargs)
        for name in LENGTH_NAMES:
            if (value := given.pop(name, None)) is not None:
                given["max_tokens"] = value
        sampling = {name: given.get(name) if given.get(name) is not None else value for name, value in DEFAULTS.items()}
        found: dict[str, Any] = await self.http.post(f"{self.http.base}/generate/", {"prompts": [text], **sampling})
        return found

    def _end(self, ids: list[int]) -> str:
        return "stop" if self.tokenizer.eos_token_id in ids else "length"
