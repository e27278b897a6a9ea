"""A model that takes images, as far as a gateway sees it, and a scripted server that unfolds them as it does."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests.gateway.kit import Json
from tests.gateway.rollout import Rollout, log_probs_of
from tests.gateway.wire import Writer, begin_stream, end_stream, event, respond, send
from tokenizers import AddedToken
from transformers import AutoTokenizer

from headrace.engine import tiny
from headrace.tokens.vocabulary import load_vocabulary

FAMILY = "qwen3-vl"
PAD = "<|image_pad|>"
MARKS = ("<tool_response>", "</tool_response>", "<think>", "</think>")
SPECIAL = ("<|vision_start|>", "<|vision_end|>", PAD, "<|video_pad|>")
#: Pixels of a token's side. Images of whole tokens, neither small nor large, are not resized.
SIDE = 32
PROCESSOR: Json = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": SIDE // 2,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": SIDE * SIDE, "longest_edge": 64 * SIDE * SIDE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_tokenizer(into: Path) -> Any:
    """`tiny`'s tokenizer with the family's tokens, and the configuration of an image processor."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL], special_tokens=True)
    tokenizer.save_pretrained(into)
    (into / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return tokenizer


def picture(wide: int, high: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """A file of so many tokens' width and height."""
    pixels = np.random.default_rng(seed).integers(0, 256, (high * SIDE, wide * SIDE, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_url(data: bytes) -> Json:
    """An image as a part of a chat message."""
    return {"type": "image_url", "image_url": {"url": url(data)}}


def text(content: str) -> Json:
    return {"type": "text", "text": content}


class Seeing(Rollout):
    """Takes images where vLLM does, and says what ids it made of them. `blind`: it answers without looking at them;
    `silent`: it does not say what it made of them."""

    blind = False
    silent = False

    async def _answer(self, path: str, asked: Any, writer: Writer) -> None:
        if path != "/inference/v1/generate":
            await super()._answer(path, asked, writer)
            return
        if "return_token_ids" not in asked:  # whether there is such a route
            await respond(writer, 200, {"request_id": "0", "choices": [_choice([5], "length")]})
            return
        told, runs = self.unfolded(asked)
        found = self.script.popleft() if self.script else self.reply(asked)
        assert isinstance(found, str)
        with self._changed:
            self.orders.append(asked)
            self._changed.notify_all()
        ids = [*self.vocabulary.encode(found), self.end]
        about: Json = {} if self.silent else {"prompt_token_ids": told, "mm_placeholders": runs}
        if not asked.get("stream"):
            await respond(writer, 200, {"request_id": "1", "choices": [_choice(ids, "stop")], **about})
            return
        await begin_stream(writer)
        for at, token in enumerate(ids):
            piece = {"choices": [_choice([token], "stop" if at == len(ids) - 1 else None, at)]}
            await send(writer, event({**piece, **about} if at == 0 else piece))
        await send(writer, b"data: [DONE]\n\n")
        await end_stream(writer)

    def unfolded(self, asked: Json) -> tuple[list[int], Json | None]:
        """The prompt with as many placeholders an image as it has tokens, and where they stand."""
        files = [base64.b64decode(part["url"].partition(",")[2]) for part in asked.get("content_parts") or ()]
        if self.blind or not files:
            return asked["token_ids"], None
        found: list[int] = []
        runs: list[Json] = []
        for token in asked["token_ids"]:
            times = 1
            if token == self.vocabulary.id_of(PAD) and len(runs) < len(files):
                width, height = Image.open(io.BytesIO(files[len(runs)])).size
                times = (width // SIDE) * (height // SIDE)
                runs.append({"offset": len(found), "length": times})
            found += [token] * times
        return found, {"image": runs}


def _choice(ids: list[int], finish: str | None, before: int = 0) -> Json:
    values = log_probs_of(range(before + len(ids)))[before:]
    entries = [{"token": f"token_id:{token}", "logprob": value} for token, value in zip(ids, values, strict=True)]
    return {"index": 0, "token_ids": ids, "logprobs": {"content": entries}, "finish_reason": finish}


@contextmanager
def seeing(folder: Path) -> Iterator[Seeing]:
    with Seeing(load_vocabulary(folder), "<|im_end|>") as rollout:
        yield rollout
