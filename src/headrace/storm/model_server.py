"""The storm's rollout server: vLLM's wire, answers that are told apart, and a log of every one of them.

    python -m headrace.storm.model_server TOKENIZER_FOLDER LOG_FOLDER NAME SEED

Each answer begins with a word that no other answer of any server has, and is in the log, ids, log-probs and the prompt
that was consumed, before its first token is sent. Questions carry a word of their agent's (`question_in`), so that the
log says which question an answer belongs to.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from headrace.net.stub_http import EVENT_STREAM, event_chunk, last_chunks, requests_of, whole_answer
from headrace.storm.log import EventLog

MODEL = "storm"
CONTEXT = 8192
#: The longest answer in words after the one that names it, and the longest wait before a token in seconds.
MOST_WORDS = 24
MOST_WAIT_S = 0.02
#: Words that answers are made of: ASCII, so that a token's text is whole by itself.
WORDS = ("river", "stone", "wheel", "water", "gate", "mill", "race", "head", "flow", "turn", "level", "pond")

_QUESTION = re.compile(r"\bq[0-9a-z]+z\b")
_ANSWER = re.compile(r"\ba[0-9a-z]+z\b")


def question_in(text: str) -> str | None:
    """The last word of a question in a text: what is asked now stands behind what was asked before."""
    found = _QUESTION.findall(text)
    return found[-1] if found else None


def answer_in(text: str) -> str | None:
    """The word that names an answer, in its text."""
    found = _ANSWER.search(text)
    return found[0] if found else None


def build_tokenizer(into: Path) -> None:
    """Writes a tokenizer with a chat template into a folder, learned on the spot: no network is needed."""
    from tokenizers import pre_tokenizers

    from headrace.engine.tiny import bpe_tokenizer

    corpus = [f" {word} {word}" for word in (*WORDS, "user", "assistant", "system", "question", "answer")]
    bpe_tokenizer(corpus, 512, pre_tokenizers.ByteLevel(add_prefix_space=False)).save_pretrained(into)


class AnswerMaker:
    """Makes answers: ids of a text that begins with a word of its own, the id that ends a turn, and log-probs that
    float32 holds exactly."""

    def __init__(self, folder: Path, name: str, seed: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        end = self._tokenizer.token_to_id("<|im_end|>")
        assert end is not None, "a tokenizer of `build_tokenizer` has it"
        self._end = end
        self._random = random.Random(seed)
        self._born = f"{name}{_base36(time.monotonic_ns())}"
        self._made = 0

    def sample(self, prompt: list[int], most: int) -> tuple[list[int], list[str], list[float], str]:
        """Ids, the text of each, log-probs, and why it ended."""
        self._made += 1
        words = [f"a{self._born}n{_base36(self._made)}z"]
        words += self._random.choices(WORDS, k=self._random.randrange(1, MOST_WORDS))
        ids: list[int] = [*self._tokenizer.encode(" ".join(words), add_special_tokens=False).ids, self._end]
        reason = "stop"
        if len(ids) > most:
            ids, reason = ids[:most], "length"
        texts = [
            self._tokenizer.decode([token], skip_special_tokens=False) if token != self._end else "" for token in ids
        ]
        return ids, texts, [-self._random.randrange(1, 256) / 64 for _ in ids], reason

    def text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def wait_s(self) -> float:
        """Seconds before the next token: most come at once."""
        return self._random.random() * MOST_WAIT_S if self._random.random() < 0.3 else 0.0


class ModelServer:
    """Serves one sampler over HTTP, and logs what it samples."""

    def __init__(self, sampler: AnswerMaker, log: EventLog) -> None:
        self._sampler, self._log = sampler, log

    async def run(self) -> None:
        """Serves on a port of the system's, which it prints, for ever."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24, backlog=1024)
        print(f"model server ready on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async for path, body in requests_of(reader):
                await self._answer(path, body, writer)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        match path.partition("?")[0]:
            case "/health":
                writer.write(whole_answer(200, {}))
            case "/v1/models":
                card = {"id": MODEL, "object": "model", "max_model_len": CONTEXT}
                writer.write(whole_answer(200, {"object": "list", "data": [card]}))
            case "/v1/completions":
                await self._complete(orjson.loads(body), writer)
            case _:
                writer.write(whole_answer(404, {"error": {"message": f"no route {path}", "code": 404}}))

    async def _complete(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompt: list[int] = asked["prompt"]
        ids, texts, log_probs, reason = self._sampler.sample(prompt, int(asked.get("max_tokens", 16)))
        question = question_in(self._sampler.text(prompt))
        if question is not None:  # otherwise it is a gateway's probe
            named = answer_in("".join(texts))
            self._log.write(
                "sampled", answer=named, question=question, prompt=prompt, response=ids, log_probs=log_probs
            )
        head = {"id": f"cmpl-{os.getpid()}", "object": "text_completion", "created": 1, "model": MODEL}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        if not asked.get("stream"):
            await asyncio.sleep(sum(self._sampler.wait_s() for _ in ids))
            choice = {**_choice(ids, texts, log_probs, reason), "prompt_token_ids": prompt}
            writer.write(whole_answer(200, {**head, "choices": [choice], "usage": usage}))
            return
        writer.write(EVENT_STREAM)
        for at, token in enumerate(ids):
            if wait_s := self._sampler.wait_s():
                await asyncio.sleep(wait_s)
            last = at + 1 == len(ids)
            choice = _choice([token], [texts[at]], [log_probs[at]], reason if last else None)
            choice["prompt_token_ids"] = prompt if at == 0 else None
            writer.write(event_chunk({**head, "choices": [choice]}))
            await writer.drain()
        writer.write(last_chunks({**head, "choices": [], "usage": usage}))


def _choice(ids: list[int], texts: list[str], log_probs: list[float], reason: str | None) -> dict[str, Any]:
    return {
        "index": 0,
        "text": "".join(texts),
        "logprobs": {
            "text_offset": [0] * len(ids),
            "token_logprobs": log_probs,
            "tokens": texts,
            "top_logprobs": [{text: log_prob} for text, log_prob in zip(texts, log_probs, strict=True)],
        },
        "finish_reason": reason,
        "stop_reason": None,
        "token_ids": ids,
    }


def _base36(number: int) -> str:
    digits = ""
    while number or not digits:
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return digits


def main(tokenizer: str, logs: str, name: str, seed: str) -> None:
    sampler = AnswerMaker(Path(tokenizer), name, seed)
    asyncio.run(ModelServer(sampler, EventLog(Path(logs), f"server-{name}-{os.getpid()}")).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
