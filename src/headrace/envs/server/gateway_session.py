"""A managed conversation through the gateway, which needs no tokenizer here: the gateway renders and tells the ids.

A session begins one trajectory a rollout: every answer to a first prompt is one, and a call goes to the trajectory
whose conversation it continues.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from headrace.data.errors import InvalidInput
from headrace.envs.server.answers import ChatCompletion, Completion, Tokens, joined_chats, joined_completions, plain
from headrace.envs.server.baseline import APIServer
from headrace.envs.server.gateway_server import GatewayServer, Trajectory
from headrace.envs.server.managed import Session
from headrace.envs.server.router import Router, split_of
from headrace.envs.server.sequences import Sampled, SequenceNode
from headrace.envs.server.uids import group_uid
from headrace.tokens import History, Request, read_message, read_messages

#: What tells the gateway that a call was made before.
RETRY_HEADER = "x-stainless-retry-count"
NOTHING = np.zeros(0, np.int32)


class GatewaySession(Session):
    """Entered by `ServerManager.managed_server`; `close` completes its trajectories."""

    def __init__(
        self,
        server: GatewayServer,
        track_tree: bool = False,
        prompt_uid: str | None = None,
        trajectory_uid: str | None = None,
    ) -> None:
        super().__init__(track_tree)
        self.server = server
        self.prompt_uid = prompt_uid or group_uid()
        self.trajectories: dict[str, Trajectory] = {}
        self._first_uid = trajectory_uid
        self._router = Router([server])
        self._history = History()
        self._shown: list[tuple[str, str, SequenceNode]] = []

    def reset(self) -> None:
        super().reset()
        self._history = History()
        self._shown.clear()

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        given = {**kwargs, "messages": plain(kwargs.get("messages"))}
        options = {**(given.get("extra_body") or {}), **given}.get("chat_template_kwargs")
        request = Request(read_messages(given["messages"]), plain(given.get("tools")), options)
        match = self._history.match(request)
        known = self.trajectories.get(str(match.node.step)) if match.node is not None else None
        new = match.new if match.node is not None else request.messages
        written = "".join(f"{message.role}: {message.content}\n" for message in new)
        chats = []
        for trajectory, (chat, tokens) in await self._called(self.server.chat_in, given, known):
            self._keep(
                trajectory, tokens, [f"assistant: {choice.message.content}\n" for choice in chat.choices], written
            )
            for choice in chat.choices:
                record = self._history.record(request, read_message(plain(choice.message)), match.node)
                self._history.add(record, NOTHING, NOTHING, None, trajectory.uids.trajectory_uid)
            chats.append(chat)
        return joined_chats(chats)

    async def completion(self, **kwargs: Any) -> Completion:
        prompt = kwargs.get("prompt")
        if not prompt:
            raise InvalidInput("prompt is missing: say what is to be completed")
        written = prompt if isinstance(prompt, str) else ""
        fits = [shown for shown in self._shown if written.startswith(shown[0])]
        before = max(fits, key=lambda shown: len(shown[0]), default=None)
        if before is not None and self.server.tokenizing.known:
            # The gateway reads a text anew; ids stay what they were.
            new = self.server.tokenizing.vocabulary().encode(written[len(before[0]) :])
            kwargs = {**kwargs, "prompt": before[2].tokens + new}
        known = before and self.trajectories[before[1]]
        texts = []
        for trajectory, (text, tokens) in await self._called(self.server.text_in, kwargs, known):
            said = [choice.text for choice in text.choices]
            nodes = self._keep(trajectory, tokens, said, written[len(before[0]) if before else 0 :])
            uid = trajectory.uids.trajectory_uid
            self._shown += [(written + one, uid, node) for one, node in zip(said, nodes, strict=True) if written]
            texts.append(text)
        return joined_completions(texts)

    async def close(self) -> None:
        await asyncio.gather(*(self.server.complete(trajectory) for trajectory in self.trajectories.values()))

    async def _called(self, call: Any, kwargs: dict[str, Any], known: Trajectory | None) -> list[Any]:
        """Trajectories with what a call gave there: one that is continued, or a new one for every answer."""
        kwargs = {**self.server._inject_reasoning_kwargs(kwargs), "model": self.server.config.model_name}
        split = split_of(kwargs.pop("split", "train"))
        if known is not None:
            return [await self._call_in(known, call, kwargs, split)]
        n = kwargs.pop("n", None) or 1
        return await asyncio.gather(*(self._call_in(None, call, kwargs, split) for _ in range(n)))

    async def _call_in(self, trajectory: Trajectory | None, call: Any, kwargs: dict[str, Any], split: str) -> Any:
        async def send(_: APIServer, attempt: int) -> Any:
            nonlocal trajectory
            if trajectory is None:
                trajectory = await self._begin()
            # So that a call whose answer was lost does not become two steps.
            retry = {RETRY_HEADER: str(attempt - 1)} if attempt > 1 else {}
            headers = {**(kwargs.get("extra_headers") or {}), **retry}
            return trajectory, await call(trajectory, {**kwargs, "extra_headers": headers})

        return await self._router.run(split, send)

    async def _begin(self) -> Trajectory:
        uid, self._first_uid = self._first_uid, None
        made = await self.server.begin(self.prompt_uid, uid)
        self.trajectories[made.uids.trajectory_uid] = made
        return made

    def _keep(self, trajectory: Trajectory, tokens: Tokens, texts: list[str], new: str) -> list[SequenceNode]:
        consumed, ids, log_probs, reasons = tokens
        uids = {"trajectory_uid": trajectory.uids.trajectory_uid, "prompt_uid": trajectory.uids.prompt_uid}
        sampled = [
            Sampled(one, values, text, text, {"finish_reason": reason, **uids})
            for one, values, reason, text in zip(ids, log_probs, reasons, texts, strict=True)
        ]
        before = self.kept.continued_by(consumed)
        return self.kept.add(consumed, sampled, (before.written if before else "") + new)
