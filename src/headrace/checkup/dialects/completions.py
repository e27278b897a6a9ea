"""OpenAI's completions. A history is one text: there are no turns to go on from."""

from __future__ import annotations

from headrace.checkup.answer import Answer, Ask, Call, Json, Malformed, Stream
from headrace.checkup.dialects import openai


class Completions:
    name = "completions"
    path = "/v1/completions"
    turns = False
    log_probs = several = True

    def question(self, text: str) -> list[Json]:
        return [{"prompt": text}]

    def result(self, call: Call, text: str) -> list[Json]:
        raise Malformed("completions know no tools")

    def body(self, ask: Ask, model: str) -> Json:
        found = {**openai.sampling(ask, model), "prompt": ask.history[0]["prompt"]}
        return found if ask.tops is None else {**found, "logprobs": ask.tops}

    def read(self, body: Json) -> list[Answer]:
        return [_answer(body, choice) for choice in openai.choices_of(body)]

    def join(self, events: list[bytes]) -> Stream:
        return openai.join(events, _add, lambda: {"text": "", "logprobs": None})


def _answer(body: Json, choice: Json) -> Answer:
    answer = Answer(text=choice.get("text") or "")
    openai.account(answer, body, choice)
    told = choice.get("logprobs")
    if told is not None:
        answer.tokens, answer.log_probs = told["tokens"], openai.values(told["token_logprobs"])
        answer.tops = [list((top or {}).items()) for top in told.get("top_logprobs") or ()]
    return answer


def _add(kept: Json, choice: Json, found: Stream) -> None:
    kept["text"] += choice.get("text") or ""
    told = choice.get("logprobs")
    if told:
        had = kept["logprobs"] or {}
        kept["logprobs"] = {
            name: [*(had.get(name) or []), *(told.get(name) or [])]
            for name in ("tokens", "token_logprobs", "top_logprobs")
        }
