"""A server that speaks OpenAI's chat and completions, right in everything but the faults that it is given.

A token is a character, so everything it tells can be followed by eye. It thinks, it calls `add` when it is offered
tools, and the probability of a token depends on all ids before it.
"""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Json = dict[str, Any]

TURN, THINK, THOUGHT, END = "\x02", "\x03", "\x04", "\x01"
OPEN, CLOSE = "<call>", "</call>"
#: A token that stands for two characters, which encoding the same text again never gives.
PAIR, PAIRED = 0x200000, "sa"
OTHERS = "abcdefghijklmnopqrst"


def encode(text: str) -> list[int]:
    return [ord(char) for char in text]


def decode(ids: list[int]) -> str:
    return "".join(PAIRED if token == PAIR else chr(token) for token in ids)


class Speaker:
    """`faults` name what is wrong with it."""

    def __init__(self, *faults: str) -> None:
        self.faults = set(faults)
        self.calls = 0

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
            ]
        )

    # -- routes --------------------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "speaker"}]})

    async def _detokenize(self, request: Request) -> Response:
        if "mute" in self.faults:
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse({"prompt": decode((await request.json())["tokens"])})

    async def _chat(self, request: Request) -> Response:
        asked = await request.json()
        self.calls += 1
        prompt = encode(self._rendered(asked))
        answers = [self._sampled(asked, self._spoken(asked, at), prompt) for at in range(self._count(asked))]
        choices = [{**choice, "message": _message(choice.pop("raw"))} for choice in answers]
        for choice in choices:
            if choice["message"].get("tool_calls"):
                choice["finish_reason"] = "tool_calls"
        return self._answered(asked, prompt, choices)

    async def _completions(self, request: Request) -> Response:
        asked = await request.json()
        prompt = asked["prompt"] if isinstance(asked["prompt"], list) else encode(asked["prompt"])
        choices = [self._sampled(asked, f"{chr(65 + at)} mill.", prompt) for at in range(self._count(asked))]
        for choice in choices:
            choice["text"] = choice.pop("raw")
            told = (choice["logprobs"] or {}).get("content")
            choice["logprobs"] = told and {
                "tokens": [entry["token"] for entry in told],
                "token_logprobs": [entry["logprob"] for entry in told],
                "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in told],
            }
        return self._answered(asked, prompt, choices)

    # -- what it consumes and samples ----------------------------------------------------------------------------------

    def _rendered(self, asked: Json) -> str:
        text = f"Call {self.calls}.\n" if "dates" in self.faults else ""
        if asked.get("tools"):
            text += json.dumps(asked["tools"])
        for message in asked["messages"]:
            text += f"{TURN}{message['role']}\n{self._written(message)}{END}"
        return f"{text}{TURN}assistant\n"

    def _written(self, message: Json) -> str:
        content = message.get("content") or ""
        if message["role"] != "assistant":
            return str(content)
        if "squeezes" in self.faults:
            content = " ".join(content.split())
        thought = message.get("reasoning_content")
        if thought and "strips_reasoning" not in self.faults:
            content = f"{THINK}{thought}{THOUGHT}{content}"
        for call in message.get("tool_calls") or ():
            content += _written_call(json.loads(call["function"]["arguments"]), compact="compacts" in self.faults)
        return content

    def _spoken(self, asked: Json, at: int) -> str:
        if asked["messages"][-1]["role"] == "tool":
            return "It is 5."
        if asked.get("tools"):
            return _written_call({"a": 2, "b": 3}, compact=False)
        return f"{THINK}hm{THOUGHT}{chr(65 + at)}  sea, it said."

    def _count(self, asked: Json) -> int:
        if "swallows_stopped" in self.faults and asked.get("stop"):
            return 0
        if "doubles" in self.faults:
            return 2
        return 1 if "ignores_n" in self.faults else int(asked.get("n", 1))

    def _sampled(self, asked: Json, text: str, prompt: list[int]) -> Json:
        """A choice; `raw` is its whole text, as it was sampled."""
        ids, finish = encode(text + END), "stop"
        if "retokenizes" in self.faults and PAIRED in text:
            at = text.index(PAIRED)
            ids[at : at + 2] = [PAIR]
        if asked.get("stop") and "ignores_stop" not in self.faults:
            text = text.partition(asked["stop"][0])[0]
            ids = encode(text + asked["stop"][0])
        if len(ids) > asked["max_tokens"]:
            ids, finish = ids[: asked["max_tokens"]], "length"
            text = decode(ids)
        told = [self._entry(asked, prompt + ids[:at], token) for at, token in enumerate(ids)]
        if "shifts_log_probs" in self.faults:
            values = [entry["logprob"] for entry in told]
            told = [{**entry, "logprob": value} for entry, value in zip(told, [*values[1:], -0.1], strict=True)]
        show = asked.get("logprobs") not in (None, False)
        return {"raw": text, "token_ids": ids, "finish_reason": finish, "logprobs": {"content": told} if show else None}

    def _entry(self, asked: Json, before: list[int], token: int) -> Json:
        heat = asked["temperature"] or 1.0
        divisor = heat if "processes" in self.faults else heat**2 if "cools" in self.faults else 1.0
        logits = {decode([token]): 1 + sum(before) % 7 / 4, **{f"{other}'": -i / 32 for i, other in enumerate(OTHERS)}}
        scaled = {text: logit / divisor for text, logit in logits.items()}
        total = math.log(sum(math.exp(logit) for logit in scaled.values()))
        tops = [{"token": text, "logprob": logit - total} for text, logit in scaled.items()]
        return {**tops[0], "top_logprobs": tops}

    # -- what it tells -------------------------------------------------------------------------------------------------

    def _answered(self, asked: Json, prompt: list[int], choices: list[Json]) -> Response:
        for at, choice in enumerate(choices):
            choice["index"] = at
            if "copies_n" in self.faults and at:
                choices[at] = {**choices[0], "index": at}
        sampled = sum(len(choice["token_ids"]) for choice in choices)
        usage = {"prompt_tokens": len(prompt) + ("miscounts" in self.faults), "completion_tokens": sampled}
        body: Json = {"choices": choices, "usage": usage}
        if asked.get("return_token_ids") and "no_ids" not in self.faults:
            if "stringifies" in self.faults:
                choices[0]["token_ids"] = str(choices[0]["token_ids"])
            body["prompt_token_ids"] = [5, *prompt[1:]] if "misquotes" in self.faults else prompt
        else:
            for choice in choices:
                choice["token_ids"] = None
        return self._streamed(body) if asked.get("stream") else JSONResponse(body)

    def _streamed(self, body: Json) -> Response:
        chunks: list[Json] = []
        for choice in body["choices"]:
            head = {"index": choice["index"], "finish_reason": None}
            pieces = [{**head, **piece} for piece in _pieces(choice)]
            if "drops_delta" in self.faults:
                del pieces[-1]
            if "stutters" in self.faults:
                pieces = pieces[:1] + pieces
            chunks += [{"choices": [piece]} for piece in pieces]
            ending = {**head, "finish_reason": choice["finish_reason"], "delta": {}}
            chunks += [{"choices": [{**ending, "token_ids": choice["token_ids"]}]}]
            chunks += [{"choices": [ending]}] if "ends_twice" in self.faults else []
        told = {"prompt_token_ids": body.get("prompt_token_ids"), "usage": body["usage"], "choices": []}
        datas = [json.dumps(chunk) for chunk in [*chunks, told]] + ([] if "breaks_off" in self.faults else ["[DONE]"])
        text = "".join(f"data: {data}\n\n" for data in datas)
        promised = {"content-length": str(len(text) + 1)} if "hangs_up" in self.faults else None
        return Response(text, headers=promised, media_type="text/event-stream")


def _written_call(arguments: Json, *, compact: bool) -> str:
    call = {"name": "add", "arguments": arguments}
    return OPEN + (json.dumps(call, separators=(",", ":")) if compact else json.dumps(call)) + CLOSE


def _message(raw: str) -> Json:
    content = raw
    found: Json = {}
    if THOUGHT in raw:
        thought, _, content = raw.removeprefix(THINK).partition(THOUGHT)
        found["reasoning_content"] = thought
    content, called, call = content.partition(OPEN)
    if called:
        read = json.loads(call.removesuffix(CLOSE))
        function = {"name": read["name"], "arguments": json.dumps(read["arguments"])}
        found["tool_calls"] = [{"id": "call-1", "type": "function", "function": function}]
    return {"role": "assistant", "content": content or None, **found}


def _pieces(choice: Json) -> list[Json]:
    """What a stream says of a choice before its end, a character at a time."""
    if "text" in choice:
        return [{"text": char} for char in choice["text"]]
    message = choice["message"]
    found = [{"delta": {"reasoning_content": char}} for char in message.get("reasoning_content") or ""]
    found += [{"delta": {"content": char}} for char in message["content"] or ""]
    calls = message.get("tool_calls") or ()
    return found + [{"delta": {"tool_calls": [{**call, "index": at}]}} for at, call in enumerate(calls)]
