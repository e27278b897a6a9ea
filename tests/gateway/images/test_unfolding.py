"""An image's run of placeholders is as long as the family's own renderer makes it, whatever the image's size."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image as Pillow
from tests.gateway.images.kit import text, write_tokenizer
from tests.gateway.kit import Json
from transformers import AutoImageProcessor

from headrace.engine import tiny
from headrace.tokens import Conversation, History, load_renderer, plan_prompt
from headrace.tokens.families import FamilyRenderer
from headrace.tokens.images import check_pixels, read_file
from headrace.tokens.messages import Message, join_parts
from headrace.tokens.vision import fold_images

#: Wider and higher than a processor leaves them, smaller than a token, and odd.
SIZES = [(1, 1), (31, 33), (48, 48), (80, 16), (700, 90), (1000, 1000), (33, 1500)]


def file_of(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Pillow.new("RGB", size, (200, 10, 90)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen3.5"])
def test_prompts_are_those_of_the_library(sighted: Path, family: str) -> None:
    renderer = load_renderer(sighted, family)
    assert isinstance(renderer, FamilyRenderer)
    renderer._library._processor = SimpleNamespace(image_processor=AutoImageProcessor.from_pretrained(sighted))
    files = [file_of(size) for size in SIZES]
    pieces = [piece for at, file in enumerate(files) for piece in (f"the {at}th:", read_file(file, "it"))]
    content, parts = join_parts(pieces)
    plan = plan_prompt(renderer, History(), Conversation([Message("user", content, parts=parts)]))
    theirs: list[Json] = []
    for at, file in enumerate(files):
        theirs += [text(f"the {at}th:"), {"type": "image", "image": file}]
    given = renderer._library.render([{"role": "user", "content": theirs}], add_generation_prompt=True)
    assert plan.ids.tolist() == given.token_ids
    places = [(place.offset, place.length) for place in given.multi_modal_data.mm_placeholders["image"]]
    assert [(placed.offset, placed.length) for placed in plan.images] == places
    short = fold_images(plan.ids, plan.images)
    assert not isinstance(renderer.vision, str)
    assert np.array_equal(renderer.vision.unfolded(short, [placed.image for placed in plan.images]), plan.ids)


def test_a_jpeg_of_several_pictures_is_a_jpeg_of_its_first() -> None:
    file = io.BytesIO()
    first, second = Pillow.new("RGB", (64, 32)), Pillow.new("RGB", (640, 320))
    first.save(file, "MPO", save_all=True, append_images=[second])
    found = read_file(file.getvalue(), "it")
    assert (found.type, found.width, found.height, found.data) == ("image/jpeg", 64, 32, file.getvalue())
    check_pixels(found, "it")


def test_texts_that_follow_each_other_are_paragraphs_and_an_image_stands_between() -> None:
    cat = read_file(file_of((8, 8)), "it")
    assert join_parts(["a", "b", cat, "c"]) == ("a\nbc", ("a\nb", cat, "c"))
    assert join_parts(["a", "b"]) == ("a\nb", ())


def test_messages_with_images_are_the_same_only_with_the_same_files_in_the_same_places() -> None:
    one, two = (read_file(file_of(size), "it") for size in ((8, 8), (8, 9)))
    contents = [("a", one), (one, "a"), ("a", two), ("a", one, two), ("a", two, one), ("a",)]
    keys = [Conversation([Message("user", "a", parts=parts)]).chain.whole for parts in contents]
    assert len(set(keys)) == len(keys)


def test_a_family_of_images_without_a_processor_says_so(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    assert load_renderer(tmp_path, "qwen3-vl").vision == "there is no preprocessor_config.json beside its tokenizer"
    assert "takes images" in str(load_renderer(tiny.folder()).vision)
