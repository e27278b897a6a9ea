"""Images of a conversation as a page may show them. Pure: nothing is fetched, and no file is believed.

An image is shown where its bytes are in the recording, they begin as a PNG, JPEG, GIF or WebP file does, and they are
small enough; it is then a `data:` URL of the type that the file itself says. Anything else is text that says why not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.dashboard.records import ShownImage
from headrace.data.errors import InvalidInput, shown
from headrace.tokens.images import Image, read_base64, read_file, read_url

#: Bytes of one image's file, and of all that one conversation shows: writing more into one answer would hold a
#: gateway's event loop for longer than a call takes.
MAX_IMAGE, MAX_IMAGES = 2 * 2**20, 4 * 2**20
#: Characters that are shown of an address or of a part that is not understood.
MAX_WORDS = 200


class Pictures:
    """Takes the images of one conversation, in their order, and numbers them."""

    def __init__(self, room: int = MAX_IMAGES) -> None:
        self._room = room
        self._count = 0

    def of_file(self, data: bytes) -> ShownImage:
        """An image whose file was recorded."""
        return self._shown(lambda: read_file(data, "the image"))

    def of_part(self, part: dict[str, Any]) -> ShownImage | None:
        """The image of a part of a message's content, in the form of OpenAI's chat (`image_url`) or Responses
        (`input_image`) or of Anthropic's Messages (`image`); None for a part that is no image."""
        kind, source = part.get("type"), part.get("source")
        if kind in ("image_url", "input_image"):
            url = part.get("image_url")
            return self.of_url(url.get("url") if isinstance(url, dict) else url)
        if kind != "image":
            return None
        if isinstance(part.get("file"), bytes):
            return self.of_file(part["file"])
        if isinstance(source, dict) and source.get("type") == "base64":
            return self._shown(lambda: read_base64(source.get("data"), "the image"))
        return self.of_url(source.get("url") if isinstance(source, dict) else None)

    def of_url(self, url: Any) -> ShownImage:
        """An image by its address, of which only `data:` ones are read."""
        if isinstance(url, str) and url[:5].lower() != "data:":
            self._count += 1
            return ShownImage(self._count, None, f"elsewhere, and not fetched: {url[:MAX_WORDS]}")
        return self._shown(lambda: read_url(url, "the image"))

    def _shown(self, read: Callable[[], Image]) -> ShownImage:
        self._count += 1
        try:
            image = read()
        except InvalidInput as error:
            return ShownImage(self._count, None, f"not shown: {error}"[:MAX_WORDS])
        except ImportError:
            return ShownImage(self._count, None, "not shown: Pillow, which reads images, is not installed here")
        size = len(image.data)
        about = f"{image.type}, {image.width} × {image.height}, {_bytes(size)}"
        if size > MAX_IMAGE:
            return ShownImage(self._count, None, f"{about}: larger than the {_bytes(MAX_IMAGE)} that are shown")
        if size > self._room:
            return ShownImage(self._count, None, f"{about}: not shown, after {_bytes(MAX_IMAGES)} of others")
        self._room -= size
        return ShownImage(self._count, image.url, about)


def content_text(content: Any, pictures: Pictures) -> tuple[str, list[ShownImage]]:
    """The text of a message's content, in any dialect, with "[image N]" where an image stands; and its images."""
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        return "" if content is None else shown(content), []
    texts: list[str] = []
    images: list[ShownImage] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            texts.append(shown(part))
            continue
        if (image := pictures.of_part(part)) is not None:
            images.append(image)
            texts.append(f"[image {image.number}]")
        elif isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif part.get("type") == "tool_result":
            inner, more = content_text(part.get("content"), pictures)
            texts.append(inner)
            images += more
        elif part.get("type") not in ("tool_use", "thinking"):
            texts.append(shown(part))
    return "\n".join(texts), images


def _bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MB" if count >= 2**20 else f"{count / 1024:.1f} kB"
