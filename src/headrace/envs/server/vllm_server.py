"""vLLM, by whichever of two wires it has.

`POST /generate` is what Atropos' clients ask for tokens, and all that its `vllm_api_server.py` serves: vLLM's own
sampling parameters beside a prompt, lists of ids and log-probs back. Plain vLLM has OpenAI's routes instead, with
additions that tell ids. Which of them a server has is found out by the first call that needs tokens, and kept.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from headrace.envs.server.answers import ChatCompletion, Completion, Tokens
from headrace.envs.server.config import APIServerConfig
from headrace.envs.server.errors import NoTokens, RequestRefused, Unavailable
from headrace.envs.server.openai_server import OpenAIServer, by_token, lengths, likeliest, request_of
from headrace.envs.server.reasoning import ReasoningConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Statuses of a route that a server does not have.
ABSENT = (404, 405)
TOLD_BY = "use `vllm serve` (0.10 or newer), atroposlib's vllm_api_server.py, or `headrace engine`"


class VLLMServer(OpenAIServer):
    """vLLM, our engine, and Atropos' server around vLLM."""

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        super().__init__(config, reasoning_config)
        #: Whether it has `/generate`; None until a call has shown it.
        self._generates: bool | None = None
        self._generate_url = f"{self.http.root}/generate"

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        return await self._by_text(super()._chat_completion_wrapper, kwargs)

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        return await self._by_text(super()._completion_wrapper, kwargs)

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Tokens:
        return await self._by_either(self._generated, super()._tokens_and_logprobs_completion_wrapper, kwargs)

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        return await self._by_either(self._prompt_logprobs, super()._get_logprobs_wrapper, kwargs)

    # -- which wire ----------------------------------------------------------------------------------------------------

    async def _by_either(
        self, generate: Callable[..., Awaitable[T]], completions: Callable[..., Awaitable[T]], kwargs: dict[str, Any]
    ) -> T:
        """What `generate` gave, or `completions` on a server that has no `/generate`.

        A server that has not shown which it has is asked for both in turn: whatever stands before it may refuse a path
        that it does not know with any status. Raises what `/generate` said where OpenAI's route is not there either.
        """
        if self._generates is False:
            return await completions(**kwargs)
        try:
            answer = await generate(**kwargs)
        except RequestRefused as error:
            if self._generates and error.status not in ABSENT:
                raise
            refused = error
        else:
            self._generates = True
            return answer
        try:
            answer = await completions(**kwargs)
        except RequestRefused as error:
            if error.status not in ABSENT:
                raise
            if refused.status not in ABSENT:
                raise refused from error
            raise RequestRefused(f"{error}; it has no POST {self._generate_url} either", error.status) from refused
        self._generates = False
        logger.info("%s is not there; tokens are taken from %s/completions", self._generate_url, self.http.base)
        return answer

    async def _by_text(self, call: Callable[..., Awaitable[T]], kwargs: dict[str, Any]) -> T:
        """What a route of OpenAI's gave. Where it is missing, the error tells what Atropos' server has in its place."""
        try:
            return await call(**kwargs)
        except RequestRefused as error:
            if error.status not in ABSENT or self._generates is False:
                raise
            raise RequestRefused(
                f"{error}. A server that has POST /generate alone, such as Atropos' vllm_api_server.py, gives tokens: "
                "call managed_server() or tokens_and_logprobs_completion(), or start vLLM's own server (`vllm serve`)",
                error.status,
            ) from error

    # -- /generate -----------------------------------------------------------------------------------------------------

    async def _generated(self, **kwargs: Any) -> Tokens:
        sent, found = await self._ask_generate(kwargs, {"logprobs": 0})
        reasons, rows = found.get("finish_reasons"), found.get("logprobs")
        if not isinstance(rows, list) or not isinstance(reasons, list):
            raise NoTokens(f"{self._generate_url} answered without logprobs and finish_reasons; {TOLD_BY}")
        wanted = kwargs.get("n") or 1
        if not len(rows) == len(reasons) == wanted:
            raise Unavailable(f"{self._generate_url} gave {len(rows)} answers where {wanted} were asked for")
        ids = found.get("token_ids") or [None] * wanted
        answers = (_read(*one) for one in zip(ids, rows, reasons, strict=True))
        return self._consumed(sent, found), *self.sampled(answers)

    async def _prompt_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        most = likeliest(kwargs)
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
        return by_token(self._consumed(sent, found), rows)

    async def _ask_generate(
        self, kwargs: dict[str, Any], fixed: dict[str, Any]
    ) -> tuple[str | list[int], dict[str, Any]]:
        """The prompt as it was sent, and the answer. The server takes vLLM's sampling parameters and nothing else."""
        given, options = request_of(lengths(kwargs))
        given.pop("model", None)
        prompt = self._prompt(given)
        sent = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        found = await self.http.post(self._generate_url, {"prompt": sent, **given, **fixed}, **options)
        if not isinstance(found, dict):
            raise NoTokens(f"{self._generate_url} answered with no object; {TOLD_BY}")
        return prompt, found

    def _consumed(self, sent: str | list[int], found: dict[str, Any]) -> list[int]:
        """The ids of the prompt; a server that tells them must have consumed those that it was sent."""
        consumed = found.get("prompt_token_ids")
        if isinstance(sent, str):
            if not isinstance(consumed, list):
                raise NoTokens(f"{self._generate_url} does not say how it read a text; name a tokenizer_name")
            return consumed
        if consumed is not None and consumed != sent:
            raise Unavailable(f"{self._generate_url} consumed other tokens than it was sent")
        return sent


def _read(ids: Any, rows: Any, reason: Any) -> tuple[Any, Any, Any]:
    """The ids, log-probs and end of one answer, whose rows are `[{id: log-prob, …}]`, the sampled id first."""
    try:
        if ids is None:
            ids = [int(next(iter(row[0]))) for row in rows]
        return ids, [row[0].get(str(token)) for token, row in zip(ids, rows, strict=True)], reason
    except (TypeError, ValueError, LookupError, AttributeError, StopIteration):
        return None, None, reason
