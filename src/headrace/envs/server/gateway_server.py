"""Headrace's gateway as a rollout server: it renders, samples and records; what comes back are the recorded tokens.

Every rollout is a trajectory of the gateway, in a channel that no trainer reads, since the scored group goes its own
way to it. Answers of one call (n > 1) are trajectories of one group.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from headrace.envs.server.answers import (
    ChatCompletion,
    Completion,
    Tokens,
    joined_chats,
    joined_completions,
    joined_tokens,
    plain,
)
from headrace.envs.server.config import APIServerConfig
from headrace.envs.server.errors import NoTokens, ServerError
from headrace.envs.server.openai_server import OpenAIServer, lengths, request_of
from headrace.envs.server.reasoning import ReasoningConfig
from headrace.envs.server.uids import Names, Uids, group_uid

logger = logging.getLogger(__name__)


class Trajectory(msgspec.Struct, frozen=True):
    """One that the gateway has begun."""

    base_url: str
    uids: Uids


class GatewayServer(OpenAIServer):
    health_path = "/ready"

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        super().__init__(config, reasoning_config)
        self.names = Names()

    async def begin(self, prompt_uid: str | None = None, trajectory_uid: str | None = None) -> Trajectory:
        asked = {
            "prompt_uid": prompt_uid or group_uid(),
            "trajectory_uid": trajectory_uid,
            "channel": self.config.channel,
        }
        body = {name: value for name, value in asked.items() if value is not None}
        made = await self.http.post(f"{self.http.root}/init_trajectory", body)
        return Trajectory(made["base_url"], Uids(made["trajectory_uid"], made["prompt_uid"]))

    async def complete(self, trajectory: Trajectory) -> None:
        """Says that nothing more will come. What was sampled is good without it, so that a failure is only said."""
        try:
            await self.http.post(f"{trajectory.base_url}/v1/complete_trajectory", {})
        except ServerError as error:
            logger.warning("trajectory %s was not completed: %s", trajectory.uids.trajectory_uid, error)

    async def chat_in(self, trajectory: Trajectory, kwargs: dict[str, Any]) -> tuple[ChatCompletion, Tokens]:
        """One chat call in a trajectory: the answer, and its tokens."""
        found = await self._post(trajectory, "chat/completions", {**kwargs, "logprobs": True})
        consumed = found.get("prompt_token_ids")
        rows = [
            (
                choice.get("token_ids"),
                [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []],
            )
            for choice in found["choices"]
        ]
        for choice in found["choices"]:
            _fold(choice["message"])
        return ChatCompletion.model_validate(found), self._tokens(trajectory, found, consumed, rows)

    async def text_in(self, trajectory: Trajectory, kwargs: dict[str, Any]) -> tuple[Completion, Tokens]:
        found = await self._post(trajectory, "completions", {**lengths(kwargs), "logprobs": 1})
        consumed = found["choices"][0].get("prompt_token_ids")
        rows = [
            (choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs"))
            for choice in found["choices"]
        ]
        return Completion.model_validate(found), self._tokens(trajectory, found, consumed, rows)

    # -- calls without a session: each answer is a rollout of its own --------------------------------------------------

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        kwargs["messages"] = plain(kwargs.get("messages"))
        return joined_chats([chat for chat, _ in await self._apart(self.chat_in, kwargs)])

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        return joined_completions([text for text, _ in await self._apart(self.text_in, kwargs)])

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Tokens:
        kwargs["prompt"] = self._prompt(kwargs)
        return joined_tokens([tokens for _, tokens in await self._apart(self.text_in, kwargs)])

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("a gateway gives no log-probs of prompts; ask a vLLM server")

    async def _apart(self, call: Any, kwargs: dict[str, Any]) -> list[Any]:
        prompt_uid = group_uid()
        n = kwargs.pop("n", None) or 1

        async def one() -> Any:
            trajectory = await self.begin(prompt_uid)
            try:
                return await call(trajectory, kwargs)
            finally:
                await self.complete(trajectory)

        return await asyncio.gather(*(one() for _ in range(n)))

    # -- the wire ------------------------------------------------------------------------------------------------------

    async def _post(self, trajectory: Trajectory, path: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        body, options = request_of(kwargs)
        found: dict[str, Any] = await self.http.post(
            f"{trajectory.base_url}/v1/{path}", {**body, "return_token_ids": True}, **options
        )
        return found

    def _tokens(self, trajectory: Trajectory, found: dict[str, Any], consumed: Any, rows: list[Any]) -> Tokens:
        if not isinstance(consumed, list):
            raise NoTokens(f"{self.http.root} is no gateway of Headrace's: it does not say which tokens it consumed")
        ends = [choice.get("finish_reason") for choice in found["choices"]]
        ids, log_probs, reasons = self.sampled((*row, end) for row, end in zip(rows, ends, strict=True))
        for one in ids:
            self.names.note([*consumed, *one], trajectory.uids)
        return consumed, ids, log_probs, reasons


def _fold(message: dict[str, Any]) -> None:
    """Reasoning back into the content, where environments look for it; the gateway knows an answer by either form."""
    reasoning = message.get("reasoning_content")
    if reasoning:
        message["content"] = f"<think>\n{reasoning}\n</think>\n\n{message.get('content') or ''}"
