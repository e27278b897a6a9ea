"""`ServerHarness`: a server without a server. It answers what it was told to answer, for tests of environments."""

from __future__ import annotations

from typing import Any

from headrace.data.errors import InvalidInput, shown
from headrace.envs.server.answers import (
    ChatCompletion,
    ChatCompletionMessage,
    Choice,
    Completion,
    CompletionChoice,
    Tokens,
    plain,
)
from headrace.envs.server.baseline import APIServer
from headrace.envs.server.config import APIServerConfig


def create_chat_completion(
    resp: str | list[str], n: int = 1, finish_reason: str | list[str] = "stop"
) -> ChatCompletion:
    """An answer with n choices: one text for all of them, or one each."""
    choices = [
        Choice(index=at, message=ChatCompletionMessage(content=_at(resp, at)), finish_reason=_at(finish_reason, at))
        for at in range(n)
    ]
    return ChatCompletion(id="test_id", created=0, model="test_model", choices=choices)


def create_completion(resp: str | list[str], n: int = 1, finish_reason: str | list[str] = "stop") -> Completion:
    choices = [CompletionChoice(index=at, text=_at(resp, at), finish_reason=_at(finish_reason, at)) for at in range(n)]
    return Completion(id="test_id", created=0, model="test_model", choices=choices)


class ServerHarness(APIServer):
    """Answers at once, by itself: a test may put what it likes in the place of `config` and `tokenizer`."""

    def __init__(self) -> None:
        super().__init__(APIServerConfig(model_name="test_model", health_check=False))
        self.response_map: dict[str, ChatCompletion | Completion] = {}
        self.tokens_and_logprobs_map: dict[str, Tokens] = {}

    def conv_to_dictkey(self, input_message: list[dict[str, Any]]) -> str:
        return "\n".join(f"role:{message['role']}\ncontent:{message['content']}" for message in plain(input_message))

    def set_desired_response(self, input_message: list[dict[str, Any]], desired_response: ChatCompletion) -> None:
        self.response_map[self.conv_to_dictkey(input_message)] = desired_response

    def set_desired_completion(self, input_message: str, completion: Completion) -> None:
        self.response_map[input_message] = completion

    def set_tokens_and_logprobs_response(
        self,
        prompt: str,
        prompt_tokens: list[int],
        output_tokens_list: list[list[int]],
        output_logprobs_list: list[list[float]],
        finish_reasons: list[str],
    ) -> None:
        self.tokens_and_logprobs_map[prompt] = (prompt_tokens, output_tokens_list, output_logprobs_list, finish_reasons)

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        self.server_healthy = True

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        return await self._chat_completion_wrapper(**kwargs)

    async def completion(self, **kwargs: Any) -> Completion:
        return await self._completion_wrapper(**kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Tokens:
        return await self._tokens_and_logprobs_completion_wrapper(**kwargs)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        return await self._get_logprobs_wrapper(**kwargs)

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        found = _told(self.response_map, self.conv_to_dictkey(kwargs["messages"]))
        assert isinstance(found, ChatCompletion)
        return found

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        found = _told(self.response_map, kwargs["prompt"])
        assert isinstance(found, Completion)
        return found

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Tokens:
        found: Tokens = _told(self.tokens_and_logprobs_map, kwargs["prompt"])
        return found


def _at(given: str | list[str], at: int) -> str:
    return given if isinstance(given, str) else given[at]


def _told(answers: dict[str, Any], key: str) -> Any:
    if key not in answers:
        raise InvalidInput(f"the harness was not told what to answer to {shown(key, 300)}")
    return answers[key].model_copy(deep=True) if hasattr(answers[key], "model_copy") else answers[key]
