"""A chat's stream: the role first, then text as it comes, tool calls whole once they are whole."""

from __future__ import annotations

from typing import Any

from headrace.engine import answers, chat
from headrace.engine.requests import ChatRequest
from headrace.engine.sequence import Sequence
from headrace.engine.vocabulary import Vocabulary
from headrace.engine.worker import Delta

Chunk = dict[str, Any]


class ChatChunks:
    """Turns what is new of each choice into a chunk."""

    def __init__(self, head: Chunk, asked: ChatRequest, words: Vocabulary) -> None:
        self._head, self._asked, self._words = head, asked, words
        self._parse = bool(asked.tools) and asked.tool_choice != "none"
        #: Of each choice, the text so far and how much of it was sent.
        self._texts: dict[int, str] = {}
        self._sent: dict[int, int] = {}

    def opening(self, sequences: list[Sequence]) -> list[Chunk]:
        found: list[Chunk] = []
        for sequence in sequences:
            delta = {"role": self._asked.role, "content": ""}
            choice = {"index": sequence.index, "delta": delta, "logprobs": None, "finish_reason": None}
            ids = sequence.prompt if self._asked.return_token_ids else None
            found.append({**self._head, "choices": [choice], "prompt_token_ids": ids, "prompt_text": None})
        return found

    def __call__(self, delta: Delta) -> Chunk:
        sequence, reason = delta.sequence, delta.finish_reason
        new, called = self._new(delta)
        choice: Chunk = {
            "index": sequence.index,
            "delta": new,
            "logprobs": answers.chat_logprobs(sequence, delta.first, delta.last, self._asked, self._words),
            "finish_reason": "tool_calls" if called and reason == "stop" else reason,
        }
        if reason is not None:
            choice["stop_reason"] = sequence.stop_reason
        choice["token_ids"] = sequence.output[delta.first : delta.last] if self._asked.return_token_ids else None
        return {**self._head, "choices": [choice]}

    def _new(self, delta: Delta) -> tuple[Chunk, bool]:
        if not self._parse:
            return _said(delta.text), False
        at = delta.sequence.index
        text = self._texts[at] = self._texts.get(at, "") + delta.text
        sent = self._sent.get(at, 0)
        if delta.finish_reason is None:
            self._sent[at] = max(sent, chat.plain(text))
            return _said(text[sent : self._sent[at]]), False
        content, calls = chat.tool_calls(text)
        if not calls:
            return _said(text[sent:]), False
        new: Chunk = {"tool_calls": [{**call, "index": place} for place, call in enumerate(calls)]}
        return _said((content or "")[sent:]) | new, True


def _said(text: str) -> Chunk:
    """A delta of text: nothing at all where there is none."""
    return {"content": text} if text else {}
