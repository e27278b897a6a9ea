"""Answers as OpenAI's client gives them: `.choices[0].message.content`. Fields that are not named here are kept."""

from __future__ import annotations

import time
import uuid
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """A part of an answer; by attribute or, where code took it for a dict, by key."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class Function(Answer):
    name: str
    arguments: str = "{}"


class ToolCall(Answer):
    id: str = ""
    type: str = "function"
    function: Function


class ChatCompletionMessage(Answer):
    role: str = "assistant"
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class TokenLogprob(Answer):
    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list[Any] = Field(default_factory=list)


class ChoiceLogprobs(Answer):
    content: list[TokenLogprob] | None = None


class Choice(Answer):
    index: int = 0
    message: ChatCompletionMessage
    finish_reason: str | None = None
    logprobs: ChoiceLogprobs | None = None


class CompletionLogprobs(Answer):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[Any] | None = None
    text_offset: list[int] | None = None


class CompletionChoice(Answer):
    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None


class CompletionUsage(Answer):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


def _new_id() -> str:
    return uuid.uuid4().hex


def _now() -> int:
    return int(time.time())


class _Head(Answer):
    id: str = Field(default_factory=_new_id)
    created: int = Field(default_factory=_now)
    model: str = ""
    usage: CompletionUsage | None = None


class ChatCompletion(_Head):
    object: str = "chat.completion"
    choices: list[Choice]


class Completion(_Head):
    object: str = "text_completion"
    choices: list[CompletionChoice]


#: (prompt, one list of ids an answer, one list of log-probs an answer, one finish reason an answer)
Tokens = tuple[list[int], list[list[int]], list[list[float]], list[str]]


def joined_chats(parts: list[ChatCompletion]) -> ChatCompletion:
    """One answer with the choices of several."""
    choices = [choice for part in parts for choice in part.choices]
    parts[0].choices = [choice.model_copy(update={"index": at}) for at, choice in enumerate(choices)]
    return parts[0]


def joined_completions(parts: list[Completion]) -> Completion:
    choices = [choice for part in parts for choice in part.choices]
    parts[0].choices = [choice.model_copy(update={"index": at}) for at, choice in enumerate(choices)]
    return parts[0]


def joined_tokens(parts: list[Tokens]) -> Tokens:
    prompt = parts[0][0]
    ids = [one for part in parts for one in part[1]]
    log_probs = [one for part in parts for one in part[2]]
    return prompt, ids, log_probs, [one for part in parts for one in part[3]]


def plain(value: Any) -> Any:
    """JSON out of what environments put into messages, such as the parts of an earlier answer."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
