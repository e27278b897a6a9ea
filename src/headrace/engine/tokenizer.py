"""The model's tokenizer: the text of tokens, messages to ids by the model's chat template, and tool calls parsed out of
text (in Hermes' format)."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any

from headrace.engine.http import EngineRequestError
from headrace.tokens.decoding import space_marker, token_text


class EngineTokenizer:
    """transformers' tokenizer as `hf_tokenizer`, and as `inner` the Rust one behind it, which decodes faster, where
    there is one."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.hf_tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.inner: Any = getattr(self.hf_tokenizer, "backend_tokenizer", self.hf_tokenizer)
        self._space_marker = space_marker(self.inner)
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """The text of one token, special ones included, with the space that it has in a text."""
        found = self._texts.get(token)
        if found is None:
            found = self._texts[token] = token_text(self.inner, self._space_marker, token)
        return found

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text; with `special`, what the tokenizer adds to a text (such as a BOS) is added."""
        found: list[int] = self.hf_tokenizer.encode(text, add_special_tokens=special)
        return found

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, special ones included."""
        return str(self.inner.decode(tokens, skip_special_tokens=False))

    def pieces(self, tokens: list[int]) -> list[str]:
        """The tokens as the vocabulary spells them."""
        found: list[str] = self.hf_tokenizer.convert_ids_to_tokens(tokens)
        return found


OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPEN}\s*(.*?)\s*(?:{CLOSE}|\Z)", re.DOTALL)


def render_chat(tokenizer: Any, messages: list[Any], tools: list[Any] | None, **options: Any) -> list[int]:
    """The token ids of a conversation by the model's chat template. Raises `EngineRequestError` where there is no
    template, or it fails."""
    if not getattr(tokenizer, "chat_template", None):
        raise EngineRequestError("This model's tokenizer has no chat template; use /v1/completions.", param="messages")
    if not messages:
        raise EngineRequestError("messages must not be empty.", param="messages")
    try:
        text = tokenizer.apply_chat_template(
            [_message(message, at) for at, message in enumerate(messages)], tools=tools, tokenize=False, **options
        )
    except EngineRequestError:
        raise
    except Exception as error:  # whatever the template's author raised: the request is what does not fit it
        raise EngineRequestError(f"The chat template refuses these messages: {error}", param="messages") from error
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found


def _message(message: Any, at: int) -> dict[str, Any]:
    """One message as templates expect it: content as a string, arguments as an object."""
    where = f"messages.{at}"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise EngineRequestError(f"{where} must be an object with a role, got {message!r:.200}.", param=where)
    found = dict(message)
    content = found.get("content")
    if isinstance(content, list):
        found["content"] = "\n".join(_part(part, where) for part in content)
    elif content is not None and not isinstance(content, str):
        raise EngineRequestError(f"{where}.content must be a string or a list of parts.", param=f"{where}.content")
    calls = found.get("tool_calls")
    if calls is None:
        found.pop("tool_calls", None)
        return found
    if not isinstance(calls, list):
        raise EngineRequestError(f"{where}.tool_calls must be a list.", param=f"{where}.tool_calls")
    found["tool_calls"] = [_called(call, f"{where}.tool_calls") for call in calls]
    return found


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text"):
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise EngineRequestError(
        f"{where}.content has a part of type {kind!r}; this engine takes text only.", param=f"{where}.content"
    )


def _called(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise EngineRequestError(f"{where} must hold objects with function.name.", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError as error:
            raise EngineRequestError(f"{where}.function.arguments is not JSON: {error}.", param=where) from error
    return {**call, "function": {**function, "arguments": arguments if arguments is not None else {}}}


def parse_tool_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """The text before the first tool call, and the calls; where anything is no valid call, the whole text and no
    call."""
    if OPEN not in text:
        return text, []
    calls = []
    for found in _CALL.findall(text):
        try:
            call = json.loads(found)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, KeyError, TypeError):
            return text, []
        if not isinstance(name, str):
            return text, []
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}", "type": "function", "function": function})
    return text[: text.index(OPEN)] or None, calls


def length_before_tool_call(text: str) -> int:
    """How many characters of a growing text are certainly before any tool call: up to a mark, or to what may become
    one."""
    at = text.find(OPEN)
    if at >= 0:
        return at
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:size]):
            return len(text) - size
    return len(text)
