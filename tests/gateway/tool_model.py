"""A model that calls tools: a copy of `tiny`, taught a few conversations by heart in some seconds.

At temperature 0 it says each assistant turn of `CONVERSATIONS` word for word, with any of `PREAMBLES` (no tools, or
one of two ways to write them) in front. To anything else it says something.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headrace.engine import tiny

Json = dict[str, Any]

RATE = 6e-3

#: As LangChain writes a Python function; and with the word that the `openai` SDK's helpers insist on.
ADD: Json = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "type": "object",
        },
    },
}
STRICT: Json = {"type": "function", "function": {**ADD["function"], "strict": True}}
PREAMBLES: list[list[Json] | None] = [None, [ADD], [STRICT]]


def call(a: int, b: int) -> Json:
    return {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}


def user(content: str) -> Json:
    return {"role": "user", "content": content}


def said(content: str) -> Json:
    return {"role": "assistant", "content": content}


def called(*calls: Json) -> Json:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def result(content: str) -> Json:
    return {"role": "tool", "content": content}


ONE, TWO, MORE, HELLO = "What is 2 + 3?", "Add 1 + 2, and 3 + 4.", "Now 4 + 4.", "Hello"
FIVE, BOTH, EIGHT, HI = "It is 5.", "They are 3 and 7.", "It is 8.", "Hello to you."

CONVERSATIONS: list[list[Json]] = [
    [user(ONE), called(call(2, 3)), result("5"), said(FIVE), user(MORE), called(call(4, 4)), result("8"), said(EIGHT)],
    [user(TWO), called(call(1, 2), call(3, 4)), result("3"), result("7"), said(BOTH)],
    [user(HELLO), said(HI), user(ONE), called(call(2, 3)), result("5"), said(FIVE)],
]


def train(into: Path, *, seed: int = 0, most: int = 300, sure: float = 0.9) -> int:
    """Writes the checkpoint into an empty folder; how many steps it took until it was sure of every answer's token.

    First the bare conversations, which are short, until it half knows them; then with every preamble at once.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    tiny.build(into, seed)
    tokenizer = AutoTokenizer.from_pretrained(into)
    bare, *others = [[_lesson(tokenizer, each, tools) for each in CONVERSATIONS] for tools in PREAMBLES]
    batch, enough = _batch(bare), 0.5
    model = LlamaForCausalLM.from_pretrained(into, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, betas=(0.9, 0.95))
    for step in range(most):
        found = _log_probs(model, *batch)
        if found.min().exp() > enough:
            if enough == sure:
                model.save_pretrained(into)
                return step
            batch, enough = _batch([lesson for lessons in (bare, *others) for lesson in lessons]), sure
            continue
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20)
        optimizer.zero_grad()
        (-found.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise AssertionError(f"after {most} steps it is not sure of every answer's token")


def _log_probs(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of every token that is to be said, after all those before it."""
    hidden = model.model(ids).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    answers = wanted >= 0
    table = model.lm_head(hidden[answers]).log_softmax(-1)
    found: torch.Tensor = table.gather(-1, wanted[answers][:, None])[:, 0]
    return found


Lesson = list[tuple[int, bool]]


def _lesson(tokenizer: Any, messages: list[Json], tools: list[Json] | None) -> Lesson:
    """A conversation's ids, and which of them the model is to say; what is sampled is never merged with what is not."""

    def text(upto: int, *, ask: bool) -> str:
        found: str = tokenizer.apply_chat_template(
            messages[:upto], tools=tools, tokenize=False, add_generation_prompt=ask
        )
        return found

    lesson: Lesson = []
    written = ""
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, whole = text(at, ask=True), text(at + 1, ask=False)
        answer = whole[len(prompt) :].removesuffix("\n")
        for part, learned in ((prompt[len(written) :], False), (answer, True)):
            ids = tokenizer(part, add_special_tokens=False)["input_ids"]
            lesson += [(token, learned) for token in ids]
        written = prompt + answer
    return lesson


def _batch(lessons: list[Lesson]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, filled up on the right; -1 is not learned."""
    longest = max(map(len, lessons))
    ids = torch.zeros(len(lessons), longest, dtype=torch.long)
    labels = torch.full_like(ids, -1)
    for row, lesson in enumerate(lessons):
        for at, (token, learned) in enumerate(lesson):
            ids[row, at] = token
            if learned:
                labels[row, at] = token
    return ids, labels
