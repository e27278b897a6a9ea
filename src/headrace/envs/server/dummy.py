"""A session on a server that tells no tokens, for evaluation only: its sequences hold placeholders."""

from __future__ import annotations

from typing import Any, ClassVar

from headrace.envs.server.answers import ChatCompletion, Completion, plain
from headrace.envs.server.baseline import APIServer
from headrace.envs.server.managed import Session
from headrace.envs.server.sequences import MASKED, SequenceNode

#: Set to 1, true or yes by who wants placeholders rather than an error.
ALLOWED = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"


class DummyManagedServer(Session):
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
            f"{message['role']}:{message.get('content') or ''}" for message in plain(kwargs.get("messages") or [])
        ]
        for choice in answer.choices:
            self._keep("\n\n".join([*written, f"assistant:{choice.message.content or ''}"]), choice.finish_reason)
        return answer

    async def completion(self, **kwargs: Any) -> Completion:
        answer = await self.server.completion(**kwargs)
        for choice in answer.choices:
            self._keep(f"{kwargs.get('prompt', '')}{choice.text}", choice.finish_reason)
        return answer

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("a session of placeholders has no log-probs; use a vLLM server")

    def _keep(self, text: str, reason: str | None) -> None:
        self.kept.nodes.append(
            SequenceNode(
                full_text=text,
                tokens=list(self.DUMMY_TOKENS),
                masked_tokens=list(self.DUMMY_MASKED_TOKENS),
                logprobs=list(self.DUMMY_LOGPROBS),
                metadata={"finish_reason": reason or "stop", "dummy_tokens": True},
            )
        )
