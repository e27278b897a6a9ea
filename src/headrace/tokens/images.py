"""`Image`: a picture in a message, as the file that it was sent as. Nothing is ever fetched.

What cannot be taken is refused with the reason: an address in place of the file, a file of another format, one that is
too large or no picture at all.
"""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from headrace.data.errors import InvalidInput, shown

#: Files that are taken, by Pillow's name.
FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
#: Pillow's name for a JPEG with more pictures behind its first, as many phones write them. Readers of JPEGs see the
#: first; so do rollout servers, which read with Pillow.
JPEG_OF_SEVERAL = "MPO"
MAX_IMAGE_BYTES = 20 * 2**20
#: A small file may unfold into gigabytes.
MAX_IMAGE_PIXELS = 2**25
#: Models' processors refuse what is longer than this many times its width.
MAX_ASPECT_RATIO = 200
IMAGE_DIGEST_BYTES = 16


class Image(msgspec.Struct, frozen=True, omit_defaults=True):
    """One picture: its file, type and size. Its pixels are read by the rollout server only."""

    digest: str
    type: str
    width: int
    height: int
    data: bytes = b""

    @property
    def url(self) -> str:
        """The file as a `data:` URL."""
        return f"data:{self.type};base64,{base64.b64encode(self.data).decode()}"


class PlacedImage(msgspec.Struct, frozen=True):
    """An image and the run of a prompt's ids that stands for it."""

    image: Image
    offset: int
    length: int


def read_url(url: Any, at: str) -> Image:
    """The image of a `data:` URL; raises `InvalidInput` for any other."""
    if not isinstance(url, str):
        raise InvalidInput(f"{at} must be a data: URL, not {shown(url)}")
    head, comma, payload = url.partition(",")
    if head[:5].lower() != "data:":
        raise InvalidInput(f"{at} is {shown(url)}; nothing is fetched here: send the image itself as a data: URL")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidInput(f"{at} must be a data: URL in base64 (data:image/png;base64,...), not {shown(url)}")
    return read_base64(payload, at)


def read_base64(text: Any, at: str) -> Image:
    """The image of a file in base64; raises `InvalidInput`, naming the place `at`, for anything else."""
    if not isinstance(text, str):
        raise InvalidInput(f"{at} must be a file in base64, not {shown(text)}")
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise InvalidInput(f"{at} is an image of more than the {MAX_IMAGE_BYTES} bytes that are taken")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(f"{at} is no base64: {error}") from None
    return read_file(data, at)


def read_file(data: bytes, at: str) -> Image:
    """The image in a file, whose head says its type; raises `InvalidInput` for what is too large or no image."""
    with _opened(data, at) as found:
        width, height = found.size
        kind = FORMATS["JPEG" if found.format == JPEG_OF_SEVERAL else found.format]
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidInput(f"{at} is an image of {len(data)} bytes; at most {MAX_IMAGE_BYTES} are taken")
    if width * height > MAX_IMAGE_PIXELS:
        raise InvalidInput(f"{at} is an image of {width}x{height} pixels; at most {MAX_IMAGE_PIXELS} are taken")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidInput(
            f"{at} is an image of {width}x{height} pixels; one side is over {MAX_ASPECT_RATIO} times the other"
        )
    return Image(blake2b(data, digest_size=IMAGE_DIGEST_BYTES).hexdigest(), kind, width, height, data)


def check_pixels(image: Image, at: str) -> None:
    """Decodes the whole file, which takes a while; raises `InvalidInput` where it is cut off or damaged."""
    with _opened(image.data, at) as found:
        try:
            found.load()
        except Exception as error:  # each format's decoder fails in its own way
            raise InvalidInput(f"{at} is a broken {image.type} file: {error}") from None


def _opened(data: bytes, at: str) -> Any:
    from PIL import Image as Pillow

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)  # how large it may be is said above
            return Pillow.open(io.BytesIO(data), formats=tuple(FORMATS))
    except Pillow.DecompressionBombError:
        raise InvalidInput(f"{at} is an image of more than the {MAX_IMAGE_PIXELS} pixels that are taken") from None
    except Exception as error:  # each format's reader fails in its own way
        names = ", ".join(FORMATS)
        raise InvalidInput(f"{at} is no image that can be read ({names} are): {type(error).__name__}") from None


#: The key of images in a step's `multi_modal_data`.
IMAGES_FIELD = "images"


def to_step(placed: tuple[PlacedImage, ...]) -> dict[str, Any]:
    """A step's `multi_modal_data`: each image's file, and where in the prompt it stands."""
    return {
        IMAGES_FIELD: [
            {**msgspec.structs.asdict(each.image), "offset": each.offset, "length": each.length} for each in placed
        ]
    }


def image_files(media: Mapping[str, Any] | None) -> dict[str, bytes]:
    """The files of a step's images by their digests; a flow's own media are passed over."""
    given = media.get(IMAGES_FIELD) if media else None
    found = {}
    for each in given if isinstance(given, list) else ():
        if isinstance(each, Mapping) and isinstance(each.get("data"), bytes) and isinstance(each.get("digest"), str):
            found[each["digest"]] = each["data"]
    return found
