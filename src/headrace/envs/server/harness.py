"""Stand-ins: `ServerHarness` returns preset responses to tests, `DummyManagedServer` records placeholder tokens."""

from __future__ import annotations

from typing import Any, ClassVar

from headrace.data.errors import InvalidInput, shown
from headrace.envs.server.api_server import APIServer
from headrace.envs.server.config import APIServerConfig
from headrace.envs.server.managed import ManagedSession
from headrace.envs.server.responses import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionMessage,
    CompletionChoice,
    TextCompletion,
    TokensAndLogprobs,
    plain_json,
)
from headrace.envs.server.sequences import MASKED, SequenceNode


def create_chat_completion(
    resp: str | list[str], n: int = 1, finish_reason: str | list[str] = "stop"
) -> ChatCompletion:
    """A response with n choices: one text for all of them, or one for each."""
    choices = [
        ChatChoice(index=at, message=ChatCompletionMessage(content=_at(resp, at)), finish_reason=_at(finish_reason, at))
        for at in range(n)
    ]
    return ChatCompletion(id="test_id", created=0, model="test_model", choices=choices)


def create_completion(resp: str | list[str], n: int = 1, finish_reason: str | list[str] = "stop") -> TextCompletion:
    """A text response with n choices: one text for all of them, or one for each."""
    choices = [CompletionChoice(index=at, text=_at(resp, at), finish_reason=_at(finish_reason, at)) for at in range(n)]
    return TextCompletion(id="test_id", created=0, model="test_model", choices=choices)


class ServerHarness(APIServer):
    """Returns the responses that a test preset, without slots or retries; `config` and `tokenizer` may be replaced."""

    def __init__(self) -> None:
        super().__init__(APIServerConfig(model_name="test_model", health_check=False))
        self.response_map: dict[str, ChatCompletion | TextCompletion] = {}
        self.tokens_and_logprobs_map: dict[str, TokensAndLogprobs] = {}

    def conv_to_dictkey(self, input_message: list[dict[str, Any]]) -> str:
        """The key of a conversation among the preset responses."""
        return "\n".join(
            f"role:{message['role']}\ncontent:{message['content']}" for message in plain_json(input_message)
        )

    def set_desired_response(self, input_message: list[dict[str, Any]], desired_response: ChatCompletion) -> None:
        """Presets the response to a conversation."""
        self.response_map[self.conv_to_dictkey(input_message)] = desired_response

    def set_desired_completion(self, input_message: str, completion: TextCompletion) -> None:
        """Presets the response to a text prompt."""
        self.response_map[input_message] = completion

    def set_tokens_and_logprobs_response(
        self,
        prompt: str,
        prompt_tokens: list[int],
        output_tokens_list: list[list[int]],
        output_logprobs_list: list[list[float]],
        finish_reasons: list[str],
    ) -> None:
        """Presets the tokens and log-probs of the answers to a text prompt."""
        self.tokens_and_logprobs_map[prompt] = (prompt_tokens, output_tokens_list, output_logprobs_list, finish_reasons)

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        self.server_healthy = True

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        return await self._chat_completion_wrapper(**kwargs)

    async def completion(self, **kwargs: Any) -> TextCompletion:
        return await self._completion_wrapper(**kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        return await self._tokens_and_logprobs_completion_wrapper(**kwargs)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        return await self._get_logprobs_wrapper(**kwargs)

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        found = _preset(self.response_map, self.conv_to_dictkey(kwargs["messages"]))
        assert isinstance(found, ChatCompletion)
        return found

    async def _completion_wrapper(self, **kwargs: Any) -> TextCompletion:
        found = _preset(self.response_map, kwargs["prompt"])
        assert isinstance(found, TextCompletion)
        return found

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        found: TokensAndLogprobs = _preset(self.tokens_and_logprobs_map, kwargs["prompt"])
        return found


def _at(given: str | list[str], at: int) -> str:
    return given if isinstance(given, str) else given[at]


def _preset(answers: dict[str, Any], key: str) -> Any:
    if key not in answers:
        raise InvalidInput(f"the harness was not told what to answer to {shown(key, 300)}")
    return answers[key].model_copy(deep=True) if hasattr(answers[key], "model_copy") else answers[key]


#: Environment variable that allows placeholders instead of an error: 1, true or yes.
ALLOW_DUMMY = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"


class DummyManagedServer(ManagedSession):
    """A session on a server that reports no tokens, for evaluation only: its sequences hold placeholders."""

    DUMMY_TOKENS: ClassVar[list[int]] = list(range(128))
    DUMMY_MASKED_TOKENS: ClassVar[list[int]] = [MASKED, *range(1, 128)]
    DUMMY_LOGPROBS: ClassVar[list[float]] = [-0.5] * 128

    def __init__(self, server: APIServer, tokenizer: Any = None, track_tree: bool = False) -> None:
        super().__init__(track_tree)
        self.server = server
        self.tokenizer = tokenizer

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        answer = await self.server.chat_completion(**kwargs)
        written = [
            f"{message['role']}:{message.get('content') or ''}" for message in plain_json(kwargs.get("messages") or [])
        ]
        for choice in answer.choices:
            self._record("\n\n".join([*written, f"assistant:{choice.message.content or ''}"]), choice.finish_reason)
        return answer

    async def completion(self, **kwargs: Any) -> TextCompletion:
        answer = await self.server.completion(**kwargs)
        for choice in answer.choices:
            self._record(f"{kwargs.get('prompt', '')}{choice.text}", choice.finish_reason)
        return answer

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("a session of placeholders has no log-probs; use a vLLM server")

    def _record(self, text: str, reason: str | None) -> None:
        self.recorded.nodes.append(
            SequenceNode(
                full_text=text,
                tokens=list(self.DUMMY_TOKENS),
                masked_tokens=list(self.DUMMY_MASKED_TOKENS),
                logprobs=list(self.DUMMY_LOGPROBS),
                metadata={"finish_reason": reason or "stop", "dummy_tokens": True},
            )
        )
