"""Inference engines that report token ids and log-probs: vLLM, SGLang, and TRL's server around vLLM.

vLLM has two wires. `POST /generate` is what Atropos' clients call for tokens, and all that its `vllm_api_server.py`
serves: vLLM's sampling parameters beside a prompt, lists of ids and log-probs back. Plain vLLM has OpenAI's routes
instead, with fields that report ids. The first call that needs tokens finds out which of them a server has.

SGLang serves text by OpenAI's routes and tokens by its own `/generate`. TRL has one route, `/generate/`, which takes
text and returns ids.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from headrace.envs.server.config import APIServerConfig, ReasoningConfig
from headrace.envs.server.openai_server import (
    LENGTH_NAMES,
    OpenAIServer,
    pop_top_k,
    prompt_logprobs,
    split_request,
    with_max_tokens,
)
from headrace.envs.server.responses import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionMessage,
    CompletionChoice,
    NoTokens,
    RequestRefused,
    TextCompletion,
    TokensAndLogprobs,
    Unavailable,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Statuses of a route that a server does not have.
ROUTE_MISSING = (404, 405)
USE_INSTEAD = "use `vllm serve` (0.10 or newer), atroposlib's vllm_api_server.py, or `headrace engine`"


class VLLMServer(OpenAIServer):
    """vLLM, Headrace's engine, and Atropos' server around vLLM."""

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        super().__init__(config, reasoning_config)
        #: Whether it has `/generate`; None until a call has found out.
        self._generates: bool | None = None
        self._generate_url = f"{self.http.root}/generate"

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        return await self._by_text(super()._chat_completion_wrapper, kwargs)

    async def _completion_wrapper(self, **kwargs: Any) -> TextCompletion:
        return await self._by_text(super()._completion_wrapper, kwargs)

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        return await self._by_either(self._generated, super()._tokens_and_logprobs_completion_wrapper, kwargs)

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        return await self._by_either(self._prompt_logprobs, super()._get_logprobs_wrapper, kwargs)

    # Which wire.

    async def _by_either(
        self, generate: Callable[..., Awaitable[T]], completions: Callable[..., Awaitable[T]], kwargs: dict[str, Any]
    ) -> T:
        """The result of `generate`, or of `completions` on a server that has no `/generate`.

        Until it is known which it has, both are tried in turn: a proxy may refuse an unknown path with any status.
        Raises the refusal of `/generate` where OpenAI's route is missing too.
        """
        if self._generates is False:
            return await completions(**kwargs)
        try:
            answer = await generate(**kwargs)
        except RequestRefused as error:
            if self._generates and error.status not in ROUTE_MISSING:
                raise
            refused = error
        else:
            self._generates = True
            return answer
        try:
            answer = await completions(**kwargs)
        except RequestRefused as error:
            if error.status not in ROUTE_MISSING:
                raise
            if refused.status not in ROUTE_MISSING:
                raise refused from error
            raise RequestRefused(f"{error}; it has no POST {self._generate_url} either", error.status) from refused
        self._generates = False
        logger.info("%s is not there; tokens are taken from %s/completions", self._generate_url, self.http.base)
        return answer

    async def _by_text(self, call: Callable[..., Awaitable[T]], kwargs: dict[str, Any]) -> T:
        """The result of one of OpenAI's routes; where it is missing, an error says what Atropos' server has instead."""
        try:
            return await call(**kwargs)
        except RequestRefused as error:
            if error.status not in ROUTE_MISSING or self._generates is False:
                raise
            raise RequestRefused(
                f"{error}. A server that has POST /generate alone, such as Atropos' vllm_api_server.py, gives tokens: "
                "call managed_server() or tokens_and_logprobs_completion(), or start vLLM's own server (`vllm serve`)",
                error.status,
            ) from error

    # /generate.

    async def _generated(self, **kwargs: Any) -> TokensAndLogprobs:
        sent, found = await self._ask_generate(kwargs, {"logprobs": 0})
        reasons, rows = found.get("finish_reasons"), found.get("logprobs")
        if not isinstance(rows, list) or not isinstance(reasons, list):
            raise NoTokens(f"{self._generate_url} answered without logprobs and finish_reasons; {USE_INSTEAD}")
        wanted = kwargs.get("n") or 1
        if not len(rows) == len(reasons) == wanted:
            raise Unavailable(f"{self._generate_url} gave {len(rows)} answers where {wanted} were asked for")
        ids = found.get("token_ids") or [None] * wanted
        answers = (_read_vllm(*one) for one in zip(ids, rows, reasons, strict=True))
        return self._consumed(sent, found), *self.sampled(answers)

    async def _prompt_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        most = pop_top_k(kwargs)
        fixed = {"prompt_logprobs": most, "n": 1, "temperature": 0.0, "top_p": 1.0}
        if not self.tokenizing.known:
            fixed["logprobs"] = 0  # only then are the ids told of a prompt that the server reads
        sent, found = await self._ask_generate({"max_tokens": 1, **kwargs}, fixed)
        rows = found.get("prompt_logprobs")
        if not isinstance(rows, list):
            raise NoTokens(
                f"{self._generate_url} answered without prompt_logprobs, which atroposlib 0.4.0's vllm_api_server.py "
                "does not tell; use `vllm serve` or `headrace engine`"
            )
        if rows and isinstance(rows[0], list):  # one list a sequence
            rows = rows[0]
        return prompt_logprobs(self._consumed(sent, found), rows)

    async def _ask_generate(
        self, kwargs: dict[str, Any], fixed: dict[str, Any]
    ) -> tuple[str | list[int], dict[str, Any]]:
        """The prompt as it was sent, and the response. The route takes vLLM's sampling parameters and nothing else."""
        given, options = split_request(with_max_tokens(kwargs))
        given.pop("model", None)
        prompt = self._prompt(given)
        sent = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        found = await self.http.post(self._generate_url, {"prompt": sent, **given, **fixed}, **options)
        if not isinstance(found, dict):
            raise NoTokens(f"{self._generate_url} answered with no object; {USE_INSTEAD}")
        return prompt, found

    def _consumed(self, sent: str | list[int], found: dict[str, Any]) -> list[int]:
        """The prompt's ids, checked against those that the server reports, where it does."""
        consumed = found.get("prompt_token_ids")
        if isinstance(sent, str):
            if not isinstance(consumed, list):
                raise NoTokens(f"{self._generate_url} does not say how it read a text; name a tokenizer_name")
            return consumed
        if consumed is not None and consumed != sent:
            raise Unavailable(f"{self._generate_url} consumed other tokens than it was sent")
        return sent


def _read_vllm(ids: Any, rows: Any, reason: Any) -> tuple[Any, Any, Any]:
    """Ids, log-probs and finish reason of one answer, whose rows are `[{id: log-prob, …}]`, the sampled id first."""
    try:
        if ids is None:
            ids = [int(next(iter(row[0]))) for row in rows]
        return ids, [row[0].get(str(token)) for token, row in zip(ids, rows, strict=True)], reason
    except (TypeError, ValueError, LookupError, AttributeError, StopIteration):
        return None, None, reason


class SGLangServer(OpenAIServer):
    """SGLang. Its `/generate` reports sampled tokens but not the prompt's, so a text needs a tokenizer here."""

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        kwargs, options = split_request(kwargs)
        kwargs.pop("model", None)
        prompt = self._prompt(kwargs)
        if isinstance(prompt, str):
            prompt = self.tokenizing.prompt_ids(prompt)
        for name in (*LENGTH_NAMES, "max_tokens"):
            if (value := kwargs.pop(name, None)) is not None:
                kwargs["max_new_tokens"] = value
        body = {"input_ids": prompt, "sampling_params": kwargs, "return_logprob": True}
        found = await self.http.post(f"{self.http.root}/generate", body, **options)
        answers = found if isinstance(found, list) else [found]
        if len(answers) != (kwargs.get("n") or 1):
            raise Unavailable(
                f"{self.http.root}/generate gave {len(answers)} answers where {kwargs.get('n', 1)} were asked"
            )
        return prompt, *self.sampled(_read_sglang(answer.get("meta_info") or {}) for answer in answers)


def _read_sglang(meta: dict[str, Any]) -> tuple[Any, Any, str]:
    """Ids, log-probs and finish reason of one answer's `meta_info`."""
    rows = meta.get("output_token_logprobs")
    reason = meta.get("finish_reason")
    ended = str(reason.get("type") or "stop") if isinstance(reason, dict) else str(reason or "stop")
    if not isinstance(rows, list):
        return None, None, ended
    return [row[1] for row in rows], [row[0] for row in rows], ended


#: Sampling parameters that TRL's route takes, with the defaults that are sent.
TRL_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "max_tokens": 1024,
}


class TrlVllmServer(OpenAIServer):
    """TRL's `trl vllm-serve`. Exact tokens need a version whose response has log-probs."""

    health_path = "/health/"

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        text = self.tokenizer.apply_chat_template(kwargs["messages"], tokenize=False, add_generation_prompt=True)
        texts, ends = await self._texts(text, kwargs)
        choices = [
            ChatChoice(index=at, message=ChatCompletionMessage(content=said), finish_reason=end)
            for at, (said, end) in enumerate(zip(texts, ends, strict=True))
        ]
        return ChatCompletion(model=self.config.model_name, choices=choices)

    async def _completion_wrapper(self, **kwargs: Any) -> TextCompletion:
        texts, ends = await self._texts(kwargs["prompt"], kwargs)
        choices = [
            CompletionChoice(index=at, text=said, finish_reason=end)
            for at, (said, end) in enumerate(zip(texts, ends, strict=True))
        ]
        return TextCompletion(model=self.config.model_name, choices=choices)

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
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

    async def _texts(self, text: str, kwargs: dict[str, Any]) -> tuple[list[str], list[str]]:
        """The texts and finish reasons of the answers."""
        ids = (await self._generate(text, kwargs))["completion_ids"]
        texts = [self.tokenizer.decode(one, skip_special_tokens=True) for one in ids]
        return texts, [self._end(one) for one in ids]

    async def _generate(self, text: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in with_max_tokens(kwargs).items() if value is not None}
        sampling = {name: given.get(name, default) for name, default in TRL_DEFAULTS.items()}
        found: dict[str, Any] = await self.http.post(f"{self.http.base}/generate/", {"prompts": [text], **sampling})
        return found

    def _end(self, ids: list[int]) -> str:
        return "stop" if self.tokenizer.eos_token_id in ids else "length"
