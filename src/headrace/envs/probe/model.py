"""The policies in the place of a model."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.envs.probe.script import Call, Said, Script
from headrace.envs.server.responses import plain_json
from headrace.envs.testing.model import Model

#: How a model server writes the model's turn behind a conversation.
TURN = "\nassistant: "
USER, END = "<|im_start|>user\n", "<|im_end|>"


class ScriptedModel(Model):
    def __init__(self, script: Script, tokenizer: Any) -> None:
        super().__init__(lambda asked, chance: "", tokenizer)
        self.script = script
        self._root: asyncio.Task[Any] | None = None

    def begin(self) -> None:
        """Called by the task that collects a group: rollouts that run in it cannot be told apart by it."""
        self._root = asyncio.current_task()

    def answer(self, asked: str, kwargs: dict[str, Any]) -> tuple[list[int], str, str]:
        task = asyncio.current_task()
        several = (kwargs.get("n") or 1) > 1
        messages = plain_json(kwargs.get("messages"))
        call = Call(
            asked=asked,
            last=_last_of(messages) if messages else _last_turn(asked),
            joint=TURN if messages else "",
            several=several,
            task=None if several or task is None or task is self._root else id(task),
        )
        policy, text = self.script.answer(call)
        spoken = self.spoken(text, kwargs)
        if policy is not None:
            self.script.said.append(Said(policy, call, spoken[1]))
        return spoken


def _last_of(messages: list[dict[str, Any]]) -> str:
    """The text of the last message that is not the model's."""
    for message in reversed(messages):
        content = message.get("content")
        if message.get("role") != "assistant" and content:
            parts = content if isinstance(content, list) else [{"text": content}]
            return "\n".join(part["text"] for part in parts if isinstance(part, dict) and part.get("text"))
    return ""


def _last_turn(prompt: str) -> str:
    """The user's last turn in a rendered prompt; all of it where that cannot be told."""
    _, found, turn = prompt.rpartition(USER)
    return turn.partition(END)[0] if found else prompt
