"""What OpenAI's routes share: fields that are refused, formats, errors, log-probs and events.

A path that no dialect has is answered in OpenAI's shape too, which most SDKs read (`NoDialect`).
"""

from __future__ import annotations

from typing import Any, NoReturn

import orjson

from headrace.data.errors import shown
from headrace.gateway.errors import Refusal
from headrace.gateway.request import BadField
from headrace.gateway.turn import Choice, Turn

DONE = b"data: [DONE]\n\n"

#: Fields that would change what is consumed or sampled, or how it is shown, in ways that are not built.
NOT_OFFERED = {
    "audio": "audio answers",
    "best_of": "best_of",
    "use_beam_search": "beam search",
    "echo": "echoing the prompt",
    "suffix": "filling in before a suffix",
    "prompt_embeds": "embeddings as a prompt",
    "prompt_logprobs": "log-probs of the prompt",
    "truncate_prompt_tokens": "cutting the prompt",
    "chat_template": "another chat template",
    "documents": "documents for the template",
    "continue_final_message": "continuing the last message",
    "functions": "functions (use tools)",
    "function_call": "function_call (use tool_choice)",
    "web_search_options": "web search",
    "return_tokens_as_token_ids": "token ids in place of texts (ask for return_token_ids)",
}
MAX_TOPS = 20


def refuse_unbuilt(fields: dict[str, Any]) -> None:
    """Raises `Bad` for a field that should change the answer and cannot; drops those whose value changes nothing."""
    for name in NOT_OFFERED.keys() & fields.keys():
        if fields[name] and not (name == "best_of" and fields[name] == 1):
            raise BadField(f"{name}: {NOT_OFFERED[name]} is not offered here; leave it out", name)
        del fields[name]
    modalities = fields.get("modalities")
    if modalities is not None and modalities != ["text"]:
        raise BadField(f"modalities is {shown(modalities)}; only text is offered", "modalities")
    if fields.pop("add_generation_prompt", True) is False:
        raise BadField("add_generation_prompt is false; an answer is always begun anew here", "add_generation_prompt")
    if fields.pop("skip_special_tokens", True) is False:
        raise BadField("skip_special_tokens is false; ask for return_token_ids to see them", "skip_special_tokens")


def take_stream(fields: dict[str, Any]) -> tuple[bool, bool]:
    """Takes `stream` and `stream_options`: whether to stream, and whether to tell the usage at its end."""
    stream = fields.pop("stream", None)
    if stream is not None and type(stream) is not bool:
        raise BadField(f"stream must be true or false, not {shown(stream)}", "stream")
    options = fields.pop("stream_options", None)
    if options is None:
        return bool(stream), False
    if not isinstance(options, dict):
        raise BadField(f"stream_options must be an object, not {shown(options)}", "stream_options")
    if not stream:
        raise BadField("stream_options is only for streams; set stream to true", "stream_options")
    return True, bool(options.get("include_usage"))


def user_of(fields: dict[str, Any]) -> str | None:
    """Whom an agent says it works for; the server is told so too."""
    user = fields.get("user")
    return user if isinstance(user, str) else None


def take_format(fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    """`response_format` as what vLLM's completions honour; there it would be ignored under its own name."""
    given = fields.pop("response_format", None)
    holder = given.get("json_schema") if isinstance(given, dict) else None
    set_format(sampling, given, holder, "response_format")


def set_format(sampling: dict[str, Any], given: Any, holder: Any, param: str) -> None:
    """A format that was given under the name `param`; `holder` is the object that a schema would be in."""
    if given is None:
        return
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return
    if kind == "json_object":
        sampling["structured_outputs"] = {"json_object": True}
        return
    schema = holder.get("schema") if kind == "json_schema" and isinstance(holder, dict) else None
    if isinstance(schema, dict):
        sampling["structured_outputs"] = {"json": schema}
        return
    raise BadField(
        f"{param} is {shown(given)}; its type must be text, json_object, or json_schema with a schema in it", param
    )


class OpenAIDialect:
    """What the dialects of OpenAI's routes have in common."""

    vendor = "OpenAI"

    def headers(self, call_id: str) -> dict[str, str]:
        return {"x-request-id": call_id}

    def error(self, refusal: Refusal) -> Any:
        return error_body(refusal)


def error_body(refusal: Refusal) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {
        "error": {
            "message": str(refusal),
            "type": refusal.kind,
            "param": refusal.param,
            "code": refusal.reason,
        }
    }


def event(value: Any) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def error_event(refusal: Refusal) -> bytes:
    """The events of an error in a stream that has begun, which it ends."""
    return event(error_body(refusal)) + DONE


def token_entries(choice: Choice, since: int, tops: int) -> list[dict[str, Any]]:
    """The log-probs of an answer from token `since` on, as chat completions write them."""
    values = choice.log_probs or []
    return [
        {**_token(text, value), "top_logprobs": [_token(*pair) for pair in _best(choice.top, at, tops)]}
        for at, (text, value) in enumerate(zip(choice.tokens[since:], values[since:], strict=False), start=since)
    ]


def _token(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "surrogatepass"))}


def _best(top: list[dict[str, float]], at: int, tops: int) -> list[tuple[str, float]]:
    found = top[at] if at < len(top) and top[at] else {}
    return sorted(found.items(), key=lambda pair: -pair[1])[:tops]


class NoDialect:
    """Answers a path that no dialect has: 404 in OpenAI's shape."""

    vendor = "A provider"

    def read(self, body: bytes) -> NoReturn:
        raise Refusal("there is no such route for a model that is recorded; see /docs", 404, code="no_route")

    def headers(self, call_id: str) -> dict[str, str]:
        return {}

    def whole(self, turns: list[Turn]) -> NoReturn:
        raise NotImplementedError

    def events(self, turns: list[Turn]) -> NoReturn:
        raise NotImplementedError

    def error(self, refusal: Refusal) -> Any:
        return error_body(refusal)
