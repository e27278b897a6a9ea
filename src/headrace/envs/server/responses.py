"""Responses of rollout servers as OpenAI's client has them (`.choices[0].message.content`), and the errors they end in.

Fields that are not declared here are kept.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from headrace.data.errors import HeadraceError

Response = TypeVar("Response", "ChatCompletion", "TextCompletion")


class ResponsePart(BaseModel):
    """Base of all parts of a response: fields are read by attribute or, as from a dict, by key."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or the default where there is none of that name."""
        return getattr(self, name, default)


class Function(ResponsePart):
    """A tool call's function, with its arguments as JSON text."""

    name: str
    arguments: str = "{}"


class ChatToolCall(ResponsePart):
    """A call of a tool that the model asked for."""

    id: str = ""
    type: str = "function"
    function: Function


class ChatCompletionMessage(ResponsePart):
    """The message of one answer."""

    role: str = "assistant"
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ChatToolCall] | None = None


class TokenLogprob(ResponsePart):
    """One sampled token of a chat answer, with its log-prob."""

    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list[Any] = Field(default_factory=list)


class ChoiceLogprobs(ResponsePart):
    """The log-probs of a chat answer, where they were asked for."""

    content: list[TokenLogprob] | None = None


class ChatChoice(ResponsePart):
    """One answer of a chat completion."""

    index: int = 0
    message: ChatCompletionMessage
    finish_reason: str | None = None
    logprobs: ChoiceLogprobs | None = None


class CompletionLogprobs(ResponsePart):
    """The log-probs of a text answer, where they were asked for: lists with an entry for each token."""

    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[Any] | None = None
    text_offset: list[int] | None = None


class CompletionChoice(ResponsePart):
    """One answer of a text completion."""

    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None


class CompletionUsage(ResponsePart):
    """How many tokens a request took."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


def _new_id() -> str:
    return uuid.uuid4().hex


def _now() -> int:
    return int(time.time())


class _Head(ResponsePart):
    id: str = Field(default_factory=_new_id)
    created: int = Field(default_factory=_now)
    model: str = ""
    usage: CompletionUsage | None = None


class ChatCompletion(_Head):
    """The response to a chat request."""

    object: str = "chat.completion"
    choices: list[ChatChoice]


class TextCompletion(_Head):
    """The response to a text request."""

    object: str = "text_completion"
    choices: list[CompletionChoice]


#: (prompt ids, ids of each answer, log-probs of each answer, finish reason of each answer)
TokensAndLogprobs = tuple[list[int], list[list[int]], list[list[float]], list[str]]


def merge_choices(responses: list[Response]) -> Response:
    """The first response, with the choices of all of them, numbered anew."""
    choices: list[Any] = [choice for response in responses for choice in response.choices]
    responses[0].choices = [choice.model_copy(update={"index": at}) for at, choice in enumerate(choices)]
    return responses[0]


def merge_tokens(parts: list[TokensAndLogprobs]) -> TokensAndLogprobs:
    """The answers of several calls with the same prompt as one result."""
    prompt = parts[0][0]
    ids = [one for part in parts for one in part[1]]
    log_probs = [one for part in parts for one in part[2]]
    return prompt, ids, log_probs, [one for part in parts for one in part[3]]


def plain_json(value: Any) -> Any:
    """A JSON value of what environments put into messages, such as models of an earlier response."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        return {name: plain_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return value


#: `down`: it cannot be reached; `overloaded`: it refused or timed out; `failed`: this one call went wrong.
Trouble = Literal["down", "overloaded", "failed"]


class ServerError(HeadraceError):
    """Base of errors of rollout servers."""

    code = "rollout_server_error"


class Unavailable(ServerError):
    """The server's fault: the same call may succeed on another server, or later."""

    code = "rollout_server_unavailable"

    def __init__(self, message: str, trouble: Trouble = "failed") -> None:
        super().__init__(message)
        self.trouble = trouble


class RequestRefused(ServerError):
    """The server answered 4xx: the call is at fault, and every server would refuse it."""

    code = "rollout_server_refused"

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class NoTokens(ServerError, NotImplementedError):
    """The server does not report which tokens it consumed and sampled."""

    code = "rollout_server_no_tokens"


class NoTokenizer(HeadraceError):
    """The configured tokenizer cannot be loaded."""

    code = "no_tokenizer"


class NoServerAvailable(ServerError):
    """No server was healthy within the allowed time, or none is configured."""

    code = "rollout_server_none"
