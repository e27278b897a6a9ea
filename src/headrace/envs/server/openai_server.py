"""Servers that speak OpenAI's routes. vLLM's additions to them tell which tokens were consumed and sampled."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from headrace.data.errors import InvalidInput
from headrace.envs.server.answers import ChatCompletion, Completion, Tokens
from headrace.envs.server.baseline import APIServer
from headrace.envs.server.config import APIServerConfig
from headrace.envs.server.errors import NoTokens, ServerError, Unavailable
from headrace.envs.server.http import Http
from headrace.envs.server.reasoning import ReasoningConfig

logger = logging.getLogger(__name__)

#: Other names that environments give to max_tokens.
LENGTH_NAMES = ("max_new_tokens", "max_completion_tokens")
#: Seconds that a server which is looked for may take to say how it is.
PROBE_TIMEOUT_S = 10.0


class OpenAIServer(APIServer):
    """Any OpenAI-compatible server. Exact tokens need one that takes ids and answers with them, as vLLM does."""

    health_path = "/health"

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        super().__init__(config, reasoning_config)
        self.http = Http(config)

    async def close(self) -> None:
        await super().close()
        await self.http.close()

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        while (why := await self.unwell(PROBE_TIMEOUT_S)) is not None:
            self.trouble = why
            await asyncio.sleep(self.config.probe_s)
        self.server_healthy = True

    async def unwell(self, within_s: float) -> str | None:
        return await self.http.trouble(f"{self.http.root}{self.health_path}", within_s)

    async def model_root(self) -> str | None:
        try:
            found = await self.http.get(f"{self.http.base}/models", PROBE_TIMEOUT_S)
        except ServerError:
            return None
        models = found.get("data") if isinstance(found, dict) else None
        named = [model for model in models or [] if isinstance(model, dict) and isinstance(model.get("root"), str)]
        ours = [model for model in named if model.get("id") == self.config.model_name]
        return (ours or named)[0]["root"] if ours or len(named) == 1 else None

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        return ChatCompletion.model_validate(await self._ask("chat/completions", kwargs, "messages"))

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        return Completion.model_validate(await self._ask("completions", kwargs, "prompt"))

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Tokens:
        kwargs["prompt"] = self._prompt(kwargs)
        found = await self._ask("completions", {**lengths(kwargs), "return_token_ids": True, "logprobs": 1}, "prompt")
        choices = found["choices"]
        consumed = choices[0].get("prompt_token_ids")
        if not isinstance(consumed, list):
            raise NoTokens(
                f"{self.http.base} does not say which tokens it consumed and sampled; use a vLLM (0.10 or newer) or "
                "SGLang server, or Headrace's gateway"
            )
        sent = kwargs["prompt"]
        if not isinstance(sent, str) and consumed != sent:
            raise Unavailable(f"{self.http.base} consumed other tokens than it was sent")
        return consumed, *self.sampled(
            (choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs"), choice.get("finish_reason"))
            for choice in choices
        )

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        """The log-probs of a prompt's tokens and, at each place, of the `top_k` likeliest."""
        most = likeliest(kwargs)
        kwargs["prompt"] = self._prompt(kwargs)
        fixed = {"prompt_logprobs": most, "return_token_ids": True, "n": 1, "temperature": 0.0, "top_p": 1.0}
        (choice,) = (await self._ask("completions", {"max_tokens": 1, **lengths(kwargs), **fixed}, "prompt"))["choices"]
        rows, consumed = choice.get("prompt_logprobs"), choice.get("prompt_token_ids")
        if not isinstance(rows, list) or not isinstance(consumed, list):
            raise NoTokens(f"{self.http.base} gives no log-probs of prompts; a vLLM server does")
        return by_token(consumed, rows)

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _prompt(self, kwargs: dict[str, Any]) -> str | list[int]:
        """The ids of a prompt; its text, for the server to read, where no tokenizer is at hand."""
        ids, text = kwargs.pop("input_ids", None), kwargs.pop("prompt", None)
        given = text if ids is None else ids
        if given is None or len(given) == 0:
            raise InvalidInput("a completion needs a prompt or input_ids")
        if not isinstance(given, str):
            return [int(token) for token in given]
        return self.tokenizing.prompt_ids(given) if self.tokenizing.known else given

    async def _ask(self, path: str, kwargs: dict[str, Any], needed: str) -> dict[str, Any]:
        """The answer with as many choices as were asked for, from a server that takes n or one that ignores it."""
        if not kwargs.get(needed):
            raise InvalidInput(f"{needed} is missing: say what is to be completed")
        body, options = request_of(kwargs)
        url = f"{self.http.base}/{path}"
        wanted = body.get("n") or 1
        alone = {name: value for name, value in body.items() if name != "n"}
        first = await self.http.post(url, alone if self.config.n_kwarg_is_ignored else body, **options)
        choices = first.get("choices") if isinstance(first, dict) else None
        if not isinstance(choices, list) or len(choices) not in (1, wanted):
            raise Unavailable(f"{url} answered without the {wanted} choices that were asked for")
        if len(choices) < wanted:
            if not self.config.n_kwarg_is_ignored:
                logger.warning("%s ignores n; it is asked %d times from now on", url, wanted)
                self.config.n_kwarg_is_ignored = True
            more = await asyncio.gather(*(self.http.post(url, alone, **options) for _ in range(wanted - 1)))
            choices += [choice for answer in more for choice in answer["choices"]]
            for at, choice in enumerate(choices):
                choice["index"] = at
        return dict(first)

    def sampled(self, answers: Any) -> tuple[list[list[int]], list[list[float]], list[str]]:
        """Ids, log-probs and ends of answers; one log-prob a token, or an error."""
        ids, log_probs, reasons = [], [], []
        for tokens, values, reason in answers:
            if not isinstance(tokens, list) or not isinstance(values, list):
                raise NoTokens(f"{self.http.base} does not say which tokens it sampled, with their log-probs")
            if len(tokens) != len(values) or any(value is None for value in values):
                raise Unavailable(
                    f"{self.http.base} gave {len(values)} log-probs for {len(tokens)} tokens, or empty ones"
                )
            ids.append(tokens)
            log_probs.append([float(value) for value in values])
            reasons.append(reason or "stop")
        return ids, log_probs, reasons


def request_of(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The body of a call to OpenAI's client, and what the client itself would have taken of it."""
    body = {name: value for name, value in kwargs.items() if value is not None}
    extra = body.pop("extra_body", None) or {}
    headers, timeout = body.pop("extra_headers", None), body.pop("timeout", None)
    return {**body, **extra}, {"headers": headers, "timeout": timeout}


def lengths(kwargs: dict[str, Any]) -> dict[str, Any]:
    """max_tokens by whatever name it was given."""
    kwargs = dict(kwargs)
    for name in LENGTH_NAMES:
        if (value := kwargs.pop(name, None)) is not None:
            kwargs["max_tokens"] = value
    return kwargs


def likeliest(kwargs: dict[str, Any]) -> int:
    """How many of the likeliest tokens are asked for at each place of a prompt, taken out of a call's arguments."""
    return max(1, int(kwargs.pop("top_k", kwargs.pop("top_logprobs", 1))))


def by_token(prompt: list[int], rows: list[Any]) -> dict[str, Any]:
    """A prompt's ids and, at each of them, the ids and log-probs that the server tells, in its order: the prompt's own
    token, then the likeliest. A row is an object by id, or a list of such, and is null where nothing comes before."""
    entries = [_entries(row) for row in rows]
    return {
        "prompt_tokens": prompt,
        "prompt_topk_token_ids": [[token for token, _ in row] for row in entries],
        "prompt_topk_logprobs": [[value for _, value in row] for row in entries],
    }


def _entries(row: Any) -> list[tuple[int, float]]:
    parts = row if isinstance(row, list) else [row or {}]
    return [
        (int(token), float(told["logprob"] if isinstance(told, dict) else told))
        for part in parts
        for token, told in part.items()
    ]
