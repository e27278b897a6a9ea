"""What is not taken is refused with the reason, before anything is sampled; nothing is dropped in silence."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.gateway.images.kit import FAMILY, PAD, Seeing, image_url, picture, text, url
from tests.gateway.kit import Json, Running, told
from tests.gateway.rollout import chat, error_of, in_front, scripted, uid_of

CAT = picture(2, 2)


def file_of(size: tuple[int, int], kind: str) -> bytes:
    found = io.BytesIO()
    Image.new("RGB", size).save(found, kind)
    return found.getvalue()


def part(address: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": address}}


REFUSED: list[tuple[Json, str]] = [
    (part("https://example.com/cat.png"), "nothing is fetched here"),
    (part("/etc/passwd"), "nothing is fetched here"),
    (part("file:///etc/passwd"), "nothing is fetched here"),
    (part("data:image/png,abc"), "must be a data: URL in base64"),
    (part("data:image/png;base64,a?b"), "is no base64"),
    (part(None), "must be a data: URL, not None"),
    (part(url(b"<svg/>", "image/svg+xml")), "is no image that can be read (PNG, JPEG, WEBP, GIF are)"),
    (part(url(file_of((8, 8), "BMP"), "image/png")), "is no image that can be read"),
    (part(url(CAT[: len(CAT) // 2])), "image 1 of the conversation is a broken image/png file"),
    (part(url(file_of((8192, 4097), "PNG"))), "8192x4097 pixels; at most 33554432 are taken"),
    (part(url(file_of((201, 1), "PNG"))), "one side is over 200 times the other"),
    ({"type": "input_image", "file_id": "file-1"}, "files are not kept here"),
    ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "a part of type 'input_audio'; only text"),
    ({"type": "video_url", "video_url": {"url": ""}}, "a part of type 'video_url'; only text and image parts"),
    (text(f"like {PAD} this"), "a text spells one"),
]


@pytest.mark.parametrize(("given", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_a_part_that_cannot_be_taken_is_refused_with_the_reason(
    shared: tuple[Running, Seeing], given: Json, why: str
) -> None:
    gateway, rollout = shared
    base = gateway.init()["base_url"]
    error = error_of(chat(gateway, base, [{"role": "user", "content": [text("Look:"), given]}]), 400)
    assert why in error["message"]
    assert rollout.orders == []


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_users_and_tools_show_images(shared: tuple[Running, Seeing], role: str) -> None:
    gateway, _ = shared
    messages = [{"role": role, "content": [image_url(CAT)]}, {"role": "user", "content": "Look"}]
    error = error_of(chat(gateway, gateway.init()["base_url"], messages), 400)
    assert "messages[0].content[0] is an image; only messages of user and tool may hold one" in error["message"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ({"type": "url", "url": "https://example.com/cat.png"}, "source is 'url'; nothing is fetched"),
        ({"type": "file", "file_id": "f"}, "source is 'file'; nothing is fetched and no files are kept"),
        ({"type": "base64", "media_type": "image/png", "data": "AAAA"}, "source.data is no image that can be read"),
    ],
)
def test_an_image_block_that_cannot_be_taken_is_refused(shared: tuple[Running, Seeing], source: Json, why: str) -> None:
    gateway, _ = shared
    asked = {"model": "m", "max_tokens": 9}
    said = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    answer = gateway.post(f"{gateway.init()['base_url']}/v1/messages", {**asked, "messages": said})
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"stop": ["x"]}, "stop"), ({"logprobs": True}, "logprobs"), ({"logit_bias": {"5": 1}}, "logit_bias")],
)
def test_what_a_server_cannot_do_with_images_is_named(shared: tuple[Running, Seeing], fields: Json, named: str) -> None:
    gateway, rollout = shared
    messages = [{"role": "user", "content": [image_url(CAT)]}]
    error = error_of(chat(gateway, gateway.init()["base_url"], messages, **fields), 400)
    assert f"a prompt with images is sampled without {named}" in error["message"]
    assert rollout.orders == []


def test_a_prompt_of_ids_or_text_cannot_hold_a_placeholder(shared: tuple[Running, Seeing]) -> None:
    gateway, rollout = shared
    path = f"{gateway.init()['base_url']}/v1/completions"
    for prompt in (f"a {PAD}", [5, rollout.vocabulary.id_of(PAD)]):
        error = error_of(gateway.post(path, {"model": "m", "prompt": prompt}), 400)
        assert "images are taken in messages only" in error["message"]


def test_a_model_of_text_says_that_it_takes_no_images(folder: Path) -> None:
    with scripted(folder) as server, in_front(server, folder) as gateway:
        messages = [{"role": "user", "content": [image_url(CAT)]}]
        error = error_of(chat(gateway, gateway.init()["base_url"], messages), 400)
        assert "this model takes none" in error["message"]
        assert server.orders == []


def test_a_server_without_the_route_is_named(sighted: Path) -> None:
    with scripted(sighted) as server, in_front(server, sighted, renderer=FAMILY) as gateway:
        messages = [{"role": "user", "content": [image_url(CAT)]}]
        error = error_of(chat(gateway, gateway.init()["base_url"], messages), 400)
        assert f"{server.address} takes no images" in error["message"]
        assert server.orders == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("trait", "why"), [("blind", "did not read the prompt's images"), ("silent", "did not tell the ids")]
)
def test_an_answer_of_a_server_that_may_not_have_looked_is_no_answer(
    gateway: Running, rollout: Seeing, trait: str, why: str, stream: bool
) -> None:
    """Even where an image has one token only, so that the ids are the same unfolded or not."""
    setattr(rollout, trait, True)
    base = gateway.init()["base_url"]
    messages = [{"role": "user", "content": [image_url(picture(1, 1))]}]
    error = error_of(chat(gateway, base, messages, stream=stream), 502)
    assert why in error["message"]
    assert gateway.steps(uid_of(base)) == []


def test_an_answer_that_spells_a_placeholder_ends_what_can_be_asked(gateway: Running, rollout: Seeing) -> None:
    rollout.script.append(f"a {PAD}")
    base = gateway.init()["base_url"]
    messages: list[Json] = [{"role": "user", "content": [image_url(CAT)]}]
    messages += [told(chat(gateway, base, messages))["choices"][0]["message"], {"role": "user", "content": "And?"}]
    assert "an answer spells one" in error_of(chat(gateway, base, messages), 400)["message"]
