"""How images stand in a prompt: a placeholder each where messages are written, and a run of them in what a model reads.

The rollout server gets the prompt with one placeholder an image, and unfolds it as the model's image processor says.
The same is done here, so that a prompt's ids and length are known before it is sent, and what the server then says that
it consumed is held against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.step import IntArray
from headrace.tokens.images import Image, PlacedImage
from headrace.tokens.messages import Unrenderable

#: The file beside its tokenizer that a model with images has.
PROCESSOR_CONFIG = "preprocessor_config.json"


class Vision:
    """How one model reads images: its placeholder's id, and how many of them stand for an image."""

    def __init__(self, placeholder: int, processor: Any) -> None:
        """`processor` is the model's image processor, as transformers loads it."""
        self.placeholder = placeholder
        self._processor = processor
        self._merged = int(processor.merge_size) ** 2

    @classmethod
    def of(cls, folder: str | Path, placeholder: int) -> Vision | str:
        """The vision of the model in a folder, or why it has none."""
        if not (Path(folder) / PROCESSOR_CONFIG).is_file():
            return f"there is no {PROCESSOR_CONFIG} beside its tokenizer"
        from transformers import AutoImageProcessor

        try:
            processor = AutoImageProcessor.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            return f"its image processor cannot be loaded: {error}"
        if not hasattr(processor, "get_number_of_image_patches") or not hasattr(processor, "merge_size"):
            return f"its image processor, {type(processor).__name__}, does not say how many tokens an image has"
        return cls(placeholder, processor)

    def tokens(self, image: Image) -> int:
        """How many placeholders stand for an image."""
        patches = self._processor.get_number_of_image_patches(image.height, image.width, {})
        return int(patches) // self._merged

    def unfolded(self, ids: Sequence[int], images: Sequence[Image]) -> IntArray:
        """The ids with each image's placeholder repeated as often as the model reads it; raises `Unrenderable` where
        there are more or fewer placeholders than images."""
        found = np.asarray(ids, np.int32)
        at = np.flatnonzero(found == self.placeholder)
        if len(at) != len(images):
            raise Unrenderable(
                f"the messages hold {len(images)} images and are written with {len(at)} placeholders: a text spells "
                f"one, or the model's chat format has no place for an image there"
            )
        if not images:
            return found
        times = np.ones(len(found), np.int64)
        times[at] = [self.tokens(image) for image in images]
        return np.repeat(found, times)

    def placed(self, ids: IntArray, images: Sequence[Image]) -> tuple[PlacedImage, ...]:
        """Where each of a whole prompt's images stands; raises `Unrenderable` where placeholders and images do not
        match one to one."""
        at = np.flatnonzero(ids == self.placeholder)
        lengths = [self.tokens(image) for image in images]
        if len(at) != sum(lengths):
            raise Unrenderable(
                f"the prompt holds {len(at)} image placeholders where its {len(images)} images take {sum(lengths)}: a "
                "text or an answer spells one"
            )
        found, taken = [], 0
        for image, length in zip(images, lengths, strict=True):
            first, last = int(at[taken]), int(at[taken + length - 1])
            if last - first != length - 1:
                raise Unrenderable("an image's placeholders do not stand together: a text or an answer spells one")
            found.append(PlacedImage(image, first, length))
            taken += length
        return tuple(found)


def fold_images(ids: IntArray, placed: Sequence[PlacedImage]) -> IntArray:
    """A prompt with one placeholder an image, as a server takes it."""
    if not placed:
        return ids
    kept = np.ones(len(ids), np.bool_)
    for each in placed:
        kept[each.offset + 1 : each.offset + each.length] = False
    return ids[kept]
