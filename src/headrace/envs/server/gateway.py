"""Headrace's gateway as a rollout server: it renders, samples and records, and its responses carry the recorded tokens.

Every rollout is one trajectory of the gateway, in a channel that no trainer reads: the trainer gets the scored group
instead. The n answers of one call are trajectories of one group. `GatewaySession` is a managed conversation that needs
no tokenizer in this process: every answer to a first prompt begins a trajectory, and a later call goes to the
trajectory whose conversation it continues.

With `record: false` the gateway samples, holds calls while weights are exchanged, and keeps nothing: the scored group
is all that is kept. All calls name one trajectory then, which stays empty. The gateway remembers no conversation, so a
managed one is a `ManagedServer`, which renders here.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

import msgspec
import numpy as np

from headrace.data.errors import InvalidInput
from headrace.data.keys import configured_key
from headrace.envs.api_client import KEY_VARIABLES
from headrace.envs.server.api_server import APIServer, Router, check_split
from headrace.envs.server.config import APIServerConfig, ReasoningConfig
from headrace.envs.server.managed import ManagedSession
from headrace.envs.server.openai_server import OpenAIServer, split_request, with_max_tokens
from headrace.envs.server.responses import (
    ChatCompletion,
    NoTokens,
    RequestRefused,
    ServerError,
    TextCompletion,
    TokensAndLogprobs,
    merge_choices,
    merge_tokens,
    plain_json,
)
from headrace.envs.server.sequences import SequenceNode, SessionAnswer, Uids, UidsBySequence, current_group_uid
from headrace.tokens import (
    Conversation,
    History,
    read_message,
    read_messages,
)

logger = logging.getLogger(__name__)

#: Tells the gateway that a call makes no step.
UNRECORDED = {"x-headrace-record": "off"}
#: Statuses of a call to a trajectory that the gateway does not know, or that is over.
TRAJECTORY_GONE = (404, 409)


class GatewayTrajectory(msgspec.Struct, frozen=True):
    """A trajectory that the gateway has begun, and the address of its calls."""

    base_url: str
    uids: Uids


class GatewayServer(OpenAIServer):
    """A gateway. Calls outside of a session make each answer a trajectory of its own."""

    health_path = "/ready"

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        key = configured_key(config.api_key, *KEY_VARIABLES) or ""
        super().__init__(config.model_copy(update={"api_key": key}), reasoning_config)
        self.uids = UidsBySequence()
        self._unrecorded: GatewayTrajectory | None = None
        self._beginning = asyncio.Lock()

    async def close(self) -> None:
        if self._unrecorded is not None:
            await self.complete(self._unrecorded)
        await super().close()

    async def begin(self, prompt_uid: str | None = None, trajectory_uid: str | None = None) -> GatewayTrajectory:
        """Begins a trajectory, of the current group where no `prompt_uid` is given."""
        asked = {
            "prompt_uid": prompt_uid or current_group_uid(),
            "trajectory_uid": trajectory_uid,
            "channel": self.config.channel,
        }
        body = {name: value for name, value in asked.items() if value is not None}
        made = await self.http.post(f"{self.http.root}/init_trajectory", body)
        return GatewayTrajectory(made["base_url"], Uids(made["trajectory_uid"], made["prompt_uid"]))

    async def complete(self, trajectory: GatewayTrajectory) -> None:
        """Completes a trajectory. What was sampled is valid without it, so a failure is only logged."""
        try:
            await self.http.post(f"{trajectory.base_url}/v1/complete_trajectory", {})
        except ServerError as error:
            logger.warning("trajectory %s was not completed: %s", trajectory.uids.trajectory_uid, error)

    async def chat_in(
        self, trajectory: GatewayTrajectory, kwargs: dict[str, Any]
    ) -> tuple[ChatCompletion, TokensAndLogprobs]:
        """One chat call in a trajectory: the response, and its tokens."""
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

    async def text_in(
        self, trajectory: GatewayTrajectory, kwargs: dict[str, Any]
    ) -> tuple[TextCompletion, TokensAndLogprobs]:
        """One text call in a trajectory: the response, and its tokens."""
        found = await self._post(trajectory, "completions", {**with_max_tokens(kwargs), "logprobs": 1})
        consumed = found["choices"][0].get("prompt_token_ids")
        rows = [
            (choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs"))
            for choice in found["choices"]
        ]
        return TextCompletion.model_validate(found), self._tokens(trajectory, found, consumed, rows)

    # Calls without a session.

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        kwargs["messages"] = plain_json(kwargs.get("messages"))
        chats: list[ChatCompletion] = [chat for chat, _ in await self._each_begun(self.chat_in, kwargs)]
        return merge_choices(chats)

    async def _completion_wrapper(self, **kwargs: Any) -> TextCompletion:
        texts: list[TextCompletion] = [text for text, _ in await self._each_begun(self.text_in, kwargs)]
        return merge_choices(texts)

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        kwargs["prompt"] = self._prompt(kwargs)
        return merge_tokens([tokens for _, tokens in await self._each_begun(self.text_in, kwargs)])

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("a gateway gives no log-probs of prompts; ask a vLLM server")

    async def _each_begun(self, call: Any, kwargs: dict[str, Any]) -> list[Any]:
        """The results of n calls for one answer, each in a trajectory of its own, all of one group. What is not
        recorded is one call."""
        if not self.config.record:
            return [await self._call_unrecorded(call, kwargs)]
        prompt_uid = current_group_uid()
        n = kwargs.pop("n", None) or 1

        async def one() -> Any:
            trajectory = await self.begin(prompt_uid)
            try:
                return await call(trajectory, kwargs)
            finally:
                await self.complete(trajectory)

        return await asyncio.gather(*(one() for _ in range(n)))

    async def _call_unrecorded(self, call: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a call in the trajectory that stays empty; one that is gone is begun anew, once."""
        named = await self._empty_trajectory(None)
        try:
            return await call(named, kwargs)
        except RequestRefused as error:
            if error.status not in TRAJECTORY_GONE:
                raise
        return await call(await self._empty_trajectory(named), kwargs)

    async def _empty_trajectory(self, gone: GatewayTrajectory | None) -> GatewayTrajectory:
        """The trajectory that unrecorded calls name; another where it is the one that is gone."""
        async with self._beginning:
            if self._unrecorded is None or self._unrecorded is gone:
                self._unrecorded = await self.begin(uuid.uuid4().hex)
            return self._unrecorded

    # The wire.

    async def _post(self, trajectory: GatewayTrajectory, path: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        body, options = split_request(kwargs)
        if not self.config.record:
            options["headers"] = {**(options["headers"] or {}), **UNRECORDED}
        found: dict[str, Any] = await self.http.post(
            f"{trajectory.base_url}/v1/{path}", {**body, "return_token_ids": True}, **options
        )
        return found

    def _tokens(
        self, trajectory: GatewayTrajectory, found: dict[str, Any], consumed: Any, rows: list[Any]
    ) -> TokensAndLogprobs:
        if not isinstance(consumed, list):
            raise NoTokens(f"{self.http.root} is no gateway of Headrace's: it does not say which tokens it consumed")
        ends = [choice.get("finish_reason") for choice in found["choices"]]
        ids, log_probs, reasons = self.sampled((*row, end) for row, end in zip(rows, ends, strict=True))
        for one in ids if self.config.record else ():
            self.uids.add([*consumed, *one], trajectory.uids)
        return consumed, ids, log_probs, reasons


def _fold(message: dict[str, Any]) -> None:
    """Puts reasoning back into the content, where environments expect it; the gateway matches either form later."""
    reasoning = message.get("reasoning_content")
    if reasoning:
        message["content"] = f"<think>\n{reasoning}\n</think>\n\n{message.get('content') or ''}"


#: Tells the gateway that a call is a retry, so that one whose response was lost does not become two steps.
RETRY_HEADER = "x-stainless-retry-count"
#: The history here only finds the continued trajectory: the gateway has the ids.
NO_IDS = np.zeros(0, np.int32)


class GatewaySession(ManagedSession):
    """Made by `ServerManager.managed_server`; `close` completes its trajectories."""

    def __init__(
        self,
        server: GatewayServer,
        track_tree: bool = False,
        prompt_uid: str | None = None,
        trajectory_uid: str | None = None,
    ) -> None:
        super().__init__(track_tree)
        self.server = server
        self.prompt_uid = prompt_uid or current_group_uid()
        self.trajectories: dict[str, GatewayTrajectory] = {}
        self._first_uid = trajectory_uid
        self._router = Router([server])
        self._history = History()
        self._shown: list[tuple[str, str, SequenceNode]] = []

    def reset(self) -> None:
        """Forgets what was sampled; the gateway's trajectories stay open."""
        super().reset()
        self._history = History()
        self._shown.clear()

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """The gateway's chat completion. What continues an earlier answer goes into its trajectory; anything else opens
        new ones, one for each answer.
        """
        given = {**kwargs, "messages": plain_json(kwargs.get("messages"))}
        options = {**(given.get("extra_body") or {}), **given}.get("chat_template_kwargs")
        request = Conversation(read_messages(given["messages"]), plain_json(given.get("tools")), options)
        match = self._history.match(request)
        known = self.trajectories.get(str(match.node.step)) if match.node is not None else None
        new = match.new if match.node is not None else request.messages
        written = "".join(f"{message.role}: {message.content}\n" for message in new)
        chats: list[ChatCompletion] = []
        for trajectory, (chat, tokens) in await self._called(self.server.chat_in, given, known):
            self._keep(
                trajectory, tokens, [f"assistant: {choice.message.content}\n" for choice in chat.choices], written
            )
            for choice in chat.choices:
                record = self._history.record(request, read_message(plain_json(choice.message)), match.node)
                self._history.add(record, NO_IDS, NO_IDS, None, trajectory.uids.trajectory_uid)
            chats.append(chat)
        return merge_choices(chats)

    async def completion(self, **kwargs: Any) -> TextCompletion:
        """The gateway's text completion; a prompt that begins with an earlier one and its answer continues that
        trajectory. Raises `InvalidInput` without a prompt.
        """
        prompt = kwargs.get("prompt")
        if not prompt:
            raise InvalidInput("prompt is missing: say what is to be completed")
        written = prompt if isinstance(prompt, str) else ""
        fits = [shown for shown in self._shown if written.startswith(shown[0])]
        before = max(fits, key=lambda shown: len(shown[0]), default=None)
        if before is not None and self.server.tokenizing.known:
            # The gateway would tokenise the whole text anew; the known ids are sent as they are.
            new = self.server.tokenizing.vocabulary().encode(written[len(before[0]) :])
            kwargs = {**kwargs, "prompt": before[2].tokens + new}
        known = before and self.trajectories[before[1]]
        texts: list[TextCompletion] = []
        for trajectory, (text, tokens) in await self._called(self.server.text_in, kwargs, known):
            said = [choice.text for choice in text.choices]
            nodes = self._keep(trajectory, tokens, said, written[len(before[0]) if before else 0 :])
            uid = trajectory.uids.trajectory_uid
            self._shown += [(written + one, uid, node) for one, node in zip(said, nodes, strict=True) if written]
            texts.append(text)
        return merge_choices(texts)

    async def close(self) -> None:
        """Completes every trajectory of this session."""
        await asyncio.gather(*(self.server.complete(trajectory) for trajectory in self.trajectories.values()))

    async def _called(self, call: Any, kwargs: dict[str, Any], known: GatewayTrajectory | None) -> list[Any]:
        """(trajectory, result) of a call: one for a continued trajectory, or one per answer in new ones."""
        kwargs = {**self.server._inject_reasoning_kwargs(kwargs), "model": self.server.config.model_name}
        split = check_split(kwargs.pop("split", "train"))
        if known is not None:
            return [await self._call_in(known, call, kwargs, split)]
        n = kwargs.pop("n", None) or 1
        return await asyncio.gather(*(self._call_in(None, call, kwargs, split) for _ in range(n)))

    async def _call_in(
        self, trajectory: GatewayTrajectory | None, call: Any, kwargs: dict[str, Any], split: str
    ) -> Any:
        async def send(_: APIServer, attempt: int) -> Any:
            nonlocal trajectory
            if trajectory is None:
                trajectory = await self._begin()
            retry = {RETRY_HEADER: str(attempt - 1)} if attempt > 1 else {}
            headers = {**(kwargs.get("extra_headers") or {}), **retry}
            return trajectory, await call(trajectory, {**kwargs, "extra_headers": headers})

        return await self._router.run(split, send)

    async def _begin(self) -> GatewayTrajectory:
        uid, self._first_uid = self._first_uid, None
        made = await self.server.begin(self.prompt_uid, uid)
        self.trajectories[made.uids.trajectory_uid] = made
        return made

    def _keep(
        self, trajectory: GatewayTrajectory, tokens: TokensAndLogprobs, texts: list[str], new: str
    ) -> list[SequenceNode]:
        consumed, ids, log_probs, reasons = tokens
        uids = {"trajectory_uid": trajectory.uids.trajectory_uid, "prompt_uid": trajectory.uids.prompt_uid}
        sampled = [
            SessionAnswer(one, values, text, text, {"finish_reason": reason, **uids})
            for one, values, reason, text in zip(ids, log_probs, reasons, texts, strict=True)
        ]
        before = self.recorded.continued_by(consumed)
        return self.recorded.add(consumed, sampled, (before.written if before else "") + new)
