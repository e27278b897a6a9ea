"""`OpenAIServer`: servers with the routes of OpenAI, and their HTTP client. Fields that vLLM adds report token ids."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import orjson

from headrace.data.errors import InvalidInput, shown
from headrace.data.keys import configured_key
from headrace.envs.server.api_server import APIServer
from headrace.envs.server.config import APIServerConfig, ReasoningConfig
from headrace.envs.server.responses import (
    ChatCompletion,
    NoTokens,
    RequestRefused,
    ServerError,
    TextCompletion,
    TokensAndLogprobs,
    Unavailable,
    plain_json,
)
from headrace.net.async_client import AsyncHttpClient
from headrace.net.http_answer import JSON_TYPE, HttpAnswer, NoAnswer

logger = logging.getLogger(__name__)

OFFICIAL_URL = "https://api.openai.com/v1"
#: Seconds to connect: enough for a busy server's backlog, far less than a call may take.
CONNECT_TIMEOUT_S = 30.0
#: Statuses of a proxy whose server is not there.
GATEWAY_STATUSES = (502, 503, 504)
OVERLOAD_STATUSES = (408, 429)
#: Other names that environments give to max_tokens.
LENGTH_NAMES = ("max_new_tokens", "max_completion_tokens")
#: Seconds that a health check may take: a server that is busy loading a model answers slowly.
PROBE_TIMEOUT_S = 10.0


class RolloutHttp:
    """One server's HTTP client: JSON in, JSON out, failures as `Unavailable` or `RequestRefused`."""

    def __init__(self, config: APIServerConfig) -> None:
        self.base = (config.base_url or os.environ.get("OPENAI_BASE_URL") or OFFICIAL_URL).rstrip("/")
        self.root = self.base.removesuffix("/v1")
        key = configured_key(config.api_key, *(() if config.base_url else ("OPENAI_API_KEY",)))
        self._client = AsyncHttpClient(
            total_s=float(config.timeout),
            connect_s=CONNECT_TIMEOUT_S,
            key=key,
            headers={"content-type": JSON_TYPE},
        )

    async def post(
        self, url: str, body: Any, *, headers: dict[str, str] | None = None, timeout: float | None = None
    ) -> Any:
        """The JSON of a 200 response."""
        data = orjson.dumps(plain_json(body), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
        return _read(url, await self._sent("POST", url, data, headers, timeout))

    async def get(self, url: str, timeout: float) -> Any:
        """The JSON of a 200 response."""
        return _read(url, await self._sent("GET", url, None, None, timeout))

    async def trouble(self, url: str, timeout: float) -> str | None:
        """Why a GET fails: no response within so many seconds, or a 5xx; None for any other response."""
        try:
            answer = await self._sent("GET", url, None, None, timeout)
        except Unavailable as error:
            return str(error)
        return str(_failure(url, answer)) if answer.status >= 500 else None

    async def _sent(
        self, method: str, url: str, data: bytes | None, headers: dict[str, str] | None, timeout: float | None
    ) -> HttpAnswer:
        try:
            return await self._client.request(method, url, data, headers=headers, total_s=timeout or None)
        except NoAnswer as error:
            raise Unavailable(str(error), "overloaded" if error.timed_out else "down") from error

    async def close(self) -> None:
        await self._client.close()


def _read(url: str, answer: HttpAnswer) -> Any:
    if answer.status != 200:
        raise _failure(url, answer)
    try:
        return answer.json()
    except ValueError as error:
        raise Unavailable(f"{url} answered what is no JSON: {shown(answer.body)}") from error


def _failure(url: str, answer: HttpAnswer) -> Unavailable | RequestRefused:
    status = answer.status
    said = f"{url} answered {status}: {shown(answer.error_text(), 500)}"
    if status in OVERLOAD_STATUSES:
        return Unavailable(said, "overloaded")
    if status >= 500:
        return Unavailable(said, "down" if status in GATEWAY_STATUSES else "failed")
    if status == 404:
        said += "; base_url is the address up to the version, such as http://host:port/v1"
    return RequestRefused(said, status)


class OpenAIServer(APIServer):
    """Any OpenAI-compatible server. Exact tokens need one that takes and returns token ids, as vLLM does."""

    health_path = "/health"

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        super().__init__(config, reasoning_config)
        self.http = RolloutHttp(config)

    async def close(self) -> None:
        await super().close()
        await self.http.close()

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        while (why := await self.health_error(PROBE_TIMEOUT_S)) is not None:
            self.trouble = why
            await asyncio.sleep(self.config.probe_s)
        self.server_healthy = True

    async def health_error(self, within_s: float) -> str | None:
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

    async def _completion_wrapper(self, **kwargs: Any) -> TextCompletion:
        return TextCompletion.model_validate(await self._ask("completions", kwargs, "prompt"))

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        kwargs["prompt"] = self._prompt(kwargs)
        found = await self._ask(
            "completions", {**with_max_tokens(kwargs), "return_token_ids": True, "logprobs": 1}, "prompt"
        )
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
        """The log-probs of a prompt's tokens and, at each position, of the `top_k` likeliest."""
        most = pop_top_k(kwargs)
        kwargs["prompt"] = self._prompt(kwargs)
        fixed = {"prompt_logprobs": most, "return_token_ids": True, "n": 1, "temperature": 0.0, "top_p": 1.0}
        (choice,) = (await self._ask("completions", {"max_tokens": 1, **with_max_tokens(kwargs), **fixed}, "prompt"))[
            "choices"
        ]
        rows, consumed = choice.get("prompt_logprobs"), choice.get("prompt_token_ids")
        if not isinstance(rows, list) or not isinstance(consumed, list):
            raise NoTokens(f"{self.http.base} gives no log-probs of prompts; a vLLM server does")
        return prompt_logprobs(consumed, rows)

    # The wire.

    def _prompt(self, kwargs: dict[str, Any]) -> str | list[int]:
        """A prompt's ids, or its text where no tokenizer is loaded. Raises `InvalidInput` where it is missing."""
        ids, text = kwargs.pop("input_ids", None), kwargs.pop("prompt", None)
        given = text if ids is None else ids
        if given is None or len(given) == 0:
            raise InvalidInput("a completion needs a prompt or input_ids")
        if not isinstance(given, str):
            return [int(token) for token in given]
        return self.tokenizing.prompt_ids(given) if self.tokenizing.known else given

    async def _ask(self, path: str, kwargs: dict[str, Any], needed: str) -> dict[str, Any]:
        """The response with all n choices, also from a server that ignores n, which is then asked n times."""
        if not kwargs.get(needed):
            raise InvalidInput(f"{needed} is missing: say what is to be completed")
        body, options = split_request(kwargs)
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
        """Ids, log-probs and finish reasons of answers. Raises where a token has no log-prob, or ids are missing."""
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


def split_request(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The request body of a call's arguments, and the options that OpenAI's client takes itself (headers, timeout)."""
    body = {name: value for name, value in kwargs.items() if value is not None}
    extra = body.pop("extra_body", None) or {}
    headers, timeout = body.pop("extra_headers", None), body.pop("timeout", None)
    return {**body, **extra}, {"headers": headers, "timeout": timeout}


def with_max_tokens(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the length limit as max_tokens, whichever name it was given by."""
    kwargs = dict(kwargs)
    for name in LENGTH_NAMES:
        if (value := kwargs.pop(name, None)) is not None:
            kwargs["max_tokens"] = value
    return kwargs


def pop_top_k(kwargs: dict[str, Any]) -> int:
    """How many of the likeliest tokens a call asks for per position; taken out of its arguments."""
    return max(1, int(kwargs.pop("top_k", kwargs.pop("top_logprobs", 1))))


def prompt_logprobs(prompt: list[int], rows: list[Any]) -> dict[str, Any]:
    """A prompt's ids and, at each position, the reported ids and log-probs in the server's order: the prompt's token,
    then the likeliest. A row is an object by id, or a list of such objects, and null at the first position."""
    entries = [_entries(row) for row in rows]
    return {
        "prompt_tokens": prompt,
        "prompt_topk_token_ids": [[token for token, _ in row] for row in entries],
        "prompt_topk_logprobs": [[value for _, value in row] for row in entries],
    }


def _entries(row: Any) -> list[tuple[int, float]]:
    parts = row if isinstance(row, list) else [row or {}]
    return [
        (int(token), float(value["logprob"] if isinstance(value, dict) else value))
        for part in parts
        for token, value in part.items()
    ]
