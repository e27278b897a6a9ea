"""OpenAI's Responses."""

from __future__ import annotations

import orjson

from headrace.checkup.answer import PARAMETERS, TOOL, TOOL_SAYS, Answer, Ask, Call, Json, Malformed, Stream
from headrace.checkup.dialects.chat import arguments
from headrace.checkup.http import DONE

ENDS = ("response.completed", "response.incomplete", "response.failed")
#: The events that fill an item, and the fields in which their `done` and the item itself hold the whole.
GROWING = {
    "response.output_text": "text",
    "response.reasoning_text": "text",
    "response.function_call_arguments": "arguments",
}


class Responses:
    name = "responses"
    path = "/v1/responses"
    turns = True
    log_probs = several = False

    def question(self, text: str) -> list[Json]:
        return [{"role": "user", "content": text}]

    def result(self, call: Call, text: str) -> list[Json]:
        return [{"type": "function_call_output", "call_id": call.id, "output": text}]

    def body(self, ask: Ask, model: str) -> Json:
        found: Json = {"model": model, "input": ask.history, "max_output_tokens": ask.max_tokens}
        found |= {"temperature": ask.temperature, "top_p": 1.0, "store": False}
        if ask.ids:
            found["return_token_ids"] = True
        if ask.stream:
            found["stream"] = True
        if ask.tool:
            tool = {"type": "function", "name": TOOL, "description": TOOL_SAYS, "parameters": PARAMETERS}
            found["tools"] = [tool]
        return found

    def read(self, body: Json) -> list[Answer]:
        if not isinstance(body.get("output"), list):
            raise Malformed("the response has no list of output")
        answer = Answer(items=body["output"], finish="length" if body.get("status") == "incomplete" else "stop")
        for item in body["output"]:
            match item["type"]:
                case "message":
                    answer.text += "".join(part["text"] for part in item["content"] if part["type"] == "output_text")
                case "reasoning":
                    answer.reasoning += "".join(part["text"] for part in item.get("content") or ())
                case "function_call":
                    answer.calls.append(Call(item["call_id"], item["name"], arguments(item["arguments"])))
        answer.told_ids, answer.told_prompt_ids = body.get("token_ids"), body.get("prompt_token_ids")
        usage = body.get("usage") or {}
        answer.consumed, answer.sampled = usage.get("input_tokens"), usage.get("output_tokens")
        return [answer]

    def join(self, events: list[bytes]) -> Stream:
        found = Stream({})
        pieces: dict[tuple[str, str], str] = {}
        order: list[str] = []
        numbers: list[int] = []
        for data in events:
            if data == DONE:
                continue
            event = orjson.loads(data)
            kind: str = event["type"]
            order.append(kind)
            numbers.append(event.get("sequence_number", len(numbers)))
            stem, _, last = kind.rpartition(".")
            if stem in GROWING and last == "delta":
                key = stem, event["item_id"]
                pieces[key] = pieces.get(key, "") + event["delta"]
            elif (
                stem in GROWING and last == "done" and event[GROWING[stem]] != pieces.get((stem, event["item_id"]), "")
            ):
                found.trouble("deltas_differ", f"the deltas of {stem} do not join to what its end says")
            elif kind in ENDS:
                found.body = event["response"]
        _check_order(found, order, numbers)
        joined = "".join(text for (stem, _), text in pieces.items() if stem == "response.output_text")
        if found.body and joined != self.read(found.body)[0].text:
            found.trouble("deltas_differ", "the deltas of the text do not join to the response at the end")
        return found


def _check_order(found: Stream, order: list[str], numbers: list[int]) -> None:
    if not order or order[0] != "response.created":
        found.trouble("event_order", "the first event is not response.created")
    if not order or order[-1] not in ENDS:
        found.trouble("no_end", "the last event is none of " + ", ".join(ENDS))
    if numbers != list(range(numbers[0] if numbers else 0, len(numbers) + (numbers[0] if numbers else 0))):
        found.trouble("event_order", "sequence numbers do not count up one by one")
