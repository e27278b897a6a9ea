"""A scripted model that both sides can ask: OpenAI's routes, vLLM's tokens in the completions, and its /generate.

What it answers depends on the sum and on how often it was asked: the k-th answer to a prompt is always the same.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request

SUM = re.compile(r"What is (\d+) \+ (\d+)\?|what is (\d+) \+ (\d+)\?")
LOG_PROB = -0.25


def model(tokenizer_folder: Path) -> FastAPI:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    app, asked = FastAPI(), Counter[str]()

    def texts(prompt: str, count: int) -> list[str]:
        numbers = [int(number) for number in SUM.findall(prompt)[-1] if number]
        right = sum(numbers)
        said = [str(right), f"<think>{numbers[0]} and more</think> {right}", "no", f"{right + 1} or so. It is so."]
        begun = asked[prompt]
        asked[prompt] += count
        return [said[(begun + at) % len(said)] for at in range(count)]

    def sampled(ids: list[int], count: int) -> list[list[int]]:
        end = tokenizer.eos_token_id
        return [
            [*tokenizer.encode(text, add_special_tokens=False), end] for text in texts(tokenizer.decode(ids), count)
        ]

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        said = texts(orjson.dumps(body["messages"]).decode(), body.get("n") or 1)
        choices = [
            {"index": at, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            for at, text in enumerate(said)
        ]
        return {"id": "x", "object": "chat.completion", "created": 0, "model": "scripted", "choices": choices}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        body = await request.json()
        choices = [
            {
                "index": at,
                "text": tokenizer.decode(ids),
                "token_ids": ids,
                "prompt_token_ids": body["prompt"],
                "logprobs": {"token_logprobs": [LOG_PROB] * len(ids)},
                "finish_reason": "stop",
            }
            for at, ids in enumerate(sampled(body["prompt"], body.get("n") or 1))
        ]
        return {"id": "x", "object": "text_completion", "created": 0, "model": "scripted", "choices": choices}

    @app.post("/generate")
    async def generate(request: Request) -> Any:
        body = await request.json()
        made = sampled(body["prompt"]["prompt_token_ids"], body.get("n") or 1)
        log_probs = [[[{str(token): LOG_PROB}] for token in ids] for ids in made]
        return {"logprobs": log_probs, "finish_reasons": ["stop"] * len(made)}

    @app.get("/health")
    async def health() -> Any:
        return {}

    return app
