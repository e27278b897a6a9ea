"""Files that may stand in a conversation: pictures, and what only pretends to be one."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from headrace import DataPool, Step
from headrace.tokens import Message, Renderer

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" onload="document.body.dataset.owned=1"><script>alert(1)</script></svg>'


def picture(kind: str = "PNG", size: tuple[int, int] = (48, 32), color: str = "teal") -> bytes:
    """A picture's file."""
    found = io.BytesIO()
    Image.new("RGB", size, color).save(found, kind)
    return found.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def in_every_dialect(data: bytes) -> list[dict[str, Any]]:
    """A message with the same image for each dialect."""
    encoded = base64.b64encode(data).decode()
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(data)}},
        {"type": "input_image", "image_url": data_url(data)},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}},
    ]
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]} for part in parts]


def submit_messages(pool: DataPool, uid: str, messages: list[dict[str, Any]]) -> None:
    """A trajectory of a scored group, as an environment sends it with its conversation."""
    metadata = {"scored_group": True, "messages": messages}
    pool.submit_steps(
        [
            Step(
                prompt_ids=[1, 2],
                response_ids=[3],
                trajectory_uid=uid,
                step_index=0,
                is_last=True,
                reward=1.0,
                metadata=metadata,
            )
        ]
    )


def submit_placed(pool: DataPool, renderer: Renderer, uid: str, files: list[bytes]) -> None:
    """A trajectory whose images stand in its prompt as the gateway records them: as runs of a placeholder."""
    vocabulary = renderer.vocabulary
    header = len(vocabulary.encode("<|im_start|>user\n"))
    (placeholder,) = vocabulary.encode("<|endoftext|>")
    prompt = renderer.render([Message("user", "What are these?")])
    images: list[dict[str, Any]] = []
    placed: list[int] = []
    for at, data in enumerate(files):
        length = 3 + at
        images.append({"data": data, "offset": header + len(placed), "length": length})
        placed += [placeholder] * length
    pool.submit_steps(
        [
            Step(
                prompt_ids=[*prompt[:header], *placed, *prompt[header:]],
                response_ids=vocabulary.encode("colours<|im_end|>"),
                trajectory_uid=uid,
                step_index=0,
                is_last=True,
                multi_modal_data={"images": images},
            )
        ]
    )
