"""How an agent of each dialect writes its history down, and reads what it is answered, as its SDK would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]

SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer: what the history keeps of it, its text, and how many tokens its prompt had."""

    kept: list[Json]
    text: str
    prompt_tokens: int


class Wire(Protocol):
    """One dialect: its route, its request for a history, and its answer."""

    path: str

    def request(self, history: list[Json], most: int) -> Json: ...

    def heard(self, answer: Json) -> Heard: ...


class Chat:
    path = "/chat/completions"

    def request(self, history: list[Json], most: int) -> Json:
        messages = [{"role": "system", "content": SYSTEM}, *history]
        return {"model": "default", "messages": messages, "temperature": 1.0, "max_tokens": most}

    def heard(self, answer: Json) -> Heard:
        text = answer["choices"][0]["message"]["content"]
        return Heard([{"role": "assistant", "content": text}], text, answer["usage"]["prompt_tokens"])


class Responses:
    path = "/responses"

    def request(self, history: list[Json], most: int) -> Json:
        asked = {"model": "default", "instructions": SYSTEM, "input": history}
        return {**asked, "temperature": 1.0, "max_output_tokens": most}

    def heard(self, answer: Json) -> Heard:
        text = answer["output"][0]["content"][0]["text"]
        return Heard(answer["output"], text, answer["usage"]["input_tokens"])


class Messages:
    path = "/messages"

    def request(self, history: list[Json], most: int) -> Json:
        return {"model": "default", "system": SYSTEM, "messages": history, "temperature": 1.0, "max_tokens": most}

    def heard(self, answer: Json) -> Heard:
        kept = {"role": "assistant", "content": answer["content"]}
        return Heard([kept], answer["content"][0]["text"], answer["usage"]["input_tokens"])
