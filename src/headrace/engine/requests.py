"""The bodies of requests: vLLM's fields, checked by pydantic, and the parameters they amount to.

Unknown fields are ignored, as vLLM does. Fields that vLLM knows and this engine does not implement are refused when
they are set: an answer that silently lacks what was asked for would be worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headrace.engine.http import (
    EngineRequestError,
    not_offered,
    outside_vocabulary,
    prompt_too_long,
    too_many_tokens,
)
from headrace.engine.sequence import SamplingParams

#: Tokens of an answer whose length was not said, where vLLM's sampling parameters decide; chats may go on to the end of
#: the context.
COMPLETION_TOKENS = 16
#: What vLLM offers and this engine does not, and how it is called in a sentence.
NOT_OFFERED = {
    "structured_outputs": "structured outputs",
    "guided_json": "structured outputs",
    "guided_regex": "structured outputs",
    "guided_choice": "structured outputs",
    "guided_grammar": "structured outputs",
    "prompt_embeds": "prompt embeddings",
    "use_beam_search": "beam search",
    "echo": "echo",
    "suffix": "suffix",
    "bad_words": "bad_words",
    "truncate_prompt_tokens": "truncation of prompts",
    "logprob_token_ids": "logprob_token_ids",
    "vllm_xargs": "vllm_xargs",
    "kv_transfer_params": "KV transfer",
    "features": "multi-modal input",
    "content_parts": "multi-modal input",
}


class StreamOptions(BaseModel):
    """Whether a stream reports usage."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingFields(BaseModel):
    """The sampling fields that all routes share."""

    model_config = ConfigDict(extra="allow")

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    response_format: dict[str, Any] | None = None

    def sampling(self, defaults: Mapping[str, Any], *, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """The sampling parameters: the request's fields, else the model's defaults, else vLLM's."""
        for name, what in NOT_OFFERED.items():
            if (self.model_extra or {}).get(name):
                raise not_offered(what, name)
        if self.response_format and self.response_format.get("type") not in (None, "text"):
            raise not_offered("structured outputs", "response_format")
        given = {**defaults, **{name: getattr(self, name) for name in _DIRECT if getattr(self, name) is not None}}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        allowed = self.allowed_token_ids
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=tuple(stop),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            allowed_token_ids=None if allowed is None else tuple(allowed),
            **given,
        )


_DIRECT = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)


class OpenAIRequest(SamplingFields):
    """The fields that both of OpenAI's routes share."""

    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def check(self) -> None:
        """Raises `EngineRequestError` for combinations of fields that vLLM refuses."""
        if self.stream_options is not None and not self.stream:
            raise EngineRequestError(
                "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
                param="stream_options",
            )


class CompletionRequest(OpenAIRequest):
    """The body of `/v1/completions`."""

    n: int = 1
    prompt: Any = None
    logprobs: int | None = None
    add_special_tokens: bool = True


class ChatRequest(OpenAIRequest):
    """The body of `/v1/chat/completions`."""

    messages: list[Any]
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def role(self) -> str:
        """The role of the answer: the assistant's, or that of the message which it continues."""
        return "assistant" if self.add_generation_prompt else str(self.messages[-1]["role"])

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise EngineRequestError(
                "when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)",
                param="top_logprobs",
            )


class GenerateSampling(SamplingFields):
    """`sampling_params` of `/inference/v1/generate`: only optional ones may be null, and the model's defaults are not
    applied."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None


class GenerateRequest(BaseModel):
    """The body of `/inference/v1/generate`."""

    model_config = ConfigDict(extra="allow")

    token_ids: list[int] = Field(min_length=1)
    sampling_params: GenerateSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    output_mode: str = Field("tokens", pattern="^(tokens|text)$")


class PromptIds(BaseModel):
    """A tokenised prompt, as vLLM's engine takes it."""

    prompt_token_ids: list[int]


class AtroposRequest(GenerateSampling):
    """What Atropos' vLLM server takes at `/generate`: a prompt, and beside it vLLM's own sampling parameters.

    A `max_tokens` of null is as long as the context has room for, as in vLLM's parameters; without it, 16.
    """

    prompt: str | PromptIds
    max_tokens: int | None = COMPLETION_TOKENS
    stream: bool = False


class TokenizeRequest(BaseModel):
    """The body of `/tokenize`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(BaseModel):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


def read_prompts(given: Any) -> list[str | list[int]]:
    """The prompts of a completion: one text, one list of ids, or a list of either."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if type(given[0]) is int:
            return [_ids(given)]
        if all(isinstance(part, str) for part in given):
            return list(given)
        if all(isinstance(part, list) and part for part in given):
            return [_ids(part) for part in given]
    raise EngineRequestError(
        "prompt must be a string, a list of token ids, or a non-empty list of either, "
        f"got {given!r:.200}. (parameter=prompt)",
        param="prompt",
    )


def _ids(given: list[Any]) -> list[int]:
    for token in given:
        if type(token) is not int:
            raise EngineRequestError(
                f"prompt must hold token ids, got {token!r:.200}. (parameter=prompt)", param="prompt"
            )
    return given


def check_prompt(ids: list[int], vocabulary: int, context: int) -> list[int]:
    """The prompt. Raises `EngineRequestError` where it is empty, too long, or holds ids outside of the vocabulary."""
    if not ids:
        raise EngineRequestError("The prompt is empty: it has no tokens.", param="prompt")
    if len(ids) >= context:
        raise prompt_too_long(len(ids), context)
    if max(ids) >= vocabulary or min(ids) < 0:
        raise outside_vocabulary(next(token for token in ids if not 0 <= token < vocabulary))
    return ids


def answer_limit(asked: int | None, default: int | None, length: int, context: int) -> int:
    """The most tokens that an answer may have: as asked where that fits, else what the context has room for."""
    most = default if asked is None else asked
    return context - length if most is None else min(most, context - length)


def check_max_tokens(asked: int | None, context: int) -> int | None:
    """Raises `EngineRequestError` for a `max_tokens` larger than the whole context, as OpenAI's routes do."""
    if asked is not None and asked > context:
        raise too_many_tokens(asked, context)
    return asked
