"""Images of a conversation: shown where they are files of pictures, and text where they are anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.pictures import SVG, data_url, in_every_dialect, picture, submit_messages, submit_placed

from headrace import DataPool
from headrace.dashboard import pictures as shown_pictures
from headrace.dashboard.branches import shown_message
from headrace.dashboard.detail import conversation, with_few_images
from headrace.dashboard.pictures import Pictures, content_text
from headrace.dashboard.records import ShownImage
from headrace.rewards.recorded import SampleReader
from headrace.tokens import Renderer, load_renderer


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return load_renderer(folder)


def only_image(part: dict[str, Any]) -> ShownImage:
    _, (found,) = content_text([part], Pictures())
    return found


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_file_is_shown_by_the_type_that_it_has(kind: str) -> None:
    data = picture(kind)
    found = only_image({"type": "image_url", "image_url": {"url": data_url(data, "image/svg+xml")}})
    assert found.url == data_url(data, f"image/{kind.lower()}")
    assert "48 × 32" in found.about


def test_an_image_of_every_dialect_is_shown() -> None:
    data = picture()
    for message in in_every_dialect(data):
        found = shown_message(message, 100, Pictures())
        assert found.content == "What is it?\n[image 1]"
        assert [image.url for image in found.images] == [data_url(data)]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.org/a.png", "elsewhere, and not fetched: https://example.org/a.png"),
        ("javascript:alert(1)", "elsewhere, and not fetched: javascript:alert(1)"),
        (data_url(SVG, "image/svg+xml"), "not shown"),
        (data_url(SVG, "image/png"), "not shown"),
        ("data:text/html,<script>alert(1)</script>", "not shown"),
        ("data:image/png;base64,@@@", "not shown"),
        (7, "not shown"),
    ],
)
def test_what_is_no_picture_is_text(url: Any, why: str) -> None:
    for part in ({"type": "image_url", "image_url": {"url": url}}, {"type": "input_image", "image_url": url}):
        found = only_image(part)
        assert found.url is None
        assert found.about.startswith(why)


def test_a_large_image_and_too_many_are_named_only(monkeypatch: pytest.MonkeyPatch) -> None:
    data = picture()
    monkeypatch.setattr(shown_pictures, "MAX_IMAGE", len(data))
    pictures = Pictures(room=2 * len(data))
    found = [pictures.of_file(one) for one in (data, picture(size=(400, 300)), data, data)]
    assert [one.url is not None for one in found] == [True, False, True, False]
    assert "larger than" in found[1].about
    assert [one.number for one in found] == [1, 2, 3, 4]


def test_a_huge_canvas_in_a_small_file_is_not_shown() -> None:
    small = picture("GIF", (2, 2))
    bomb = small[:6] + b"\xff\xff\xff\xff" + small[10:]  # says that it has 65,535 × 65,535 pixels
    assert Pictures().of_file(bomb).url is None


def test_images_that_the_gateway_recorded_stand_where_the_prompt_has_them(renderer: Renderer) -> None:
    files = [picture(color="red"), picture(color="blue")]
    with DataPool() as pool:
        submit_placed(pool, renderer, "t", files)
        found = conversation(pool.trajectory("t"), 0, SampleReader(renderer))
    assert found.messages is not None
    assert [(one.role, one.content) for one in found.messages] == [
        ("user", "[image 1]\n[image 2]\nWhat are these?"),
        ("assistant", "colours"),
    ]
    assert [image.url for image in found.messages[0].images] == [data_url(data) for data in files]


def test_a_conversation_that_an_environment_sent_is_shown_without_a_tokenizer() -> None:
    anthropic = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "look first"},
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "1", "name": "look", "input": {"at": 3}},
        ],
    }
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "a cat"}]}
    with DataPool() as pool:
        submit_messages(pool, "t", [*in_every_dialect(picture())[:1], anthropic, result])
        found = conversation(pool.trajectory("t"), 0, None)
    assert found.source == "As the environment sent it."
    assert found.messages is not None
    first, second, third = found.messages
    assert first.images[0].url == data_url(picture())
    assert (second.reasoning, second.content, second.calls) == ("look first", "Looking.", (("look", '{"at":3}'),))
    assert third.content == "a cat"
    fewer = with_few_images(found, 10)
    assert fewer.messages is not None
    assert fewer.messages[0].images[0].url is None
    assert with_few_images(found, 100_000) == found
