"""Conversations with images: the ids that are recorded are those that the server says it made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gateway.images.kit import FAMILY, PAD, Seeing, image_url, picture, text, url
from tests.gateway.kit import Json, Running, tokens, told, tree
from tests.gateway.rollout import chat, content_of, in_front, uid_of
from tests.gateway.tool_model import ADD

from headrace import DataPool, Step

CAT, DOG = picture(3, 2, seed=1), picture(1, 4, seed=2)


def shown(step: Step) -> list[tuple[bytes, int, int]]:
    """A step's images: their files, and where they stand."""
    media = step.multi_modal_data
    return [(each["data"], each["offset"], each["length"]) for each in media["images"]] if media else []


def stands(rollout: Seeing, step: Step, files: list[bytes]) -> None:
    """A step is what the server unfolded: its ids, and each image where its placeholders are."""
    pad = rollout.vocabulary.id_of(PAD)
    ids = step.prompt_ids.tolist()
    assert [data for data, _, _ in shown(step)] == files
    places = [at for _, offset, length in shown(step) for at in range(offset, offset + length)]
    assert places == [at for at, token in enumerate(ids) if token == pad]
    assert step.quarantined is None


def said(content: Any) -> Json:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("stream", [False, True])
def test_a_recorded_prompt_is_what_the_server_unfolded_and_the_next_one_begins_with_it(
    gateway: Running, rollout: Seeing, stream: bool
) -> None:
    base = gateway.init()["base_url"]
    rollout.script += ["a cat", "a dog", "both"]
    messages = [said([text("What is "), image_url(CAT), text("this?")])]
    for more in ([image_url(DOG), image_url(CAT)], "And now?", None):
        answer = chat(gateway, base, messages, stream=stream)
        content = content_of(answer.text) if stream else told(answer)["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": content}, said(more)]
    steps = gateway.steps(uid_of(base))
    assert [step.prompt_ids.tolist() for step in steps] == [rollout.unfolded(order)[0] for order in rollout.orders]
    assert tree(steps) == [None, 0, 1]
    for step, files in zip(steps, ([CAT], [CAT, DOG, CAT], [CAT, DOG, CAT]), strict=True):
        stands(rollout, step, files)


def test_the_same_conversation_has_the_same_ids_in_every_dialect(gateway: Running, rollout: Seeing) -> None:
    """With an image from the user and one that a tool gave."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    rollout.reply = lambda asked: call if len(asked["content_parts"]) == 1 else "seen"
    chats, responses, messages = (gateway.init()["base_url"] for _ in range(3))

    first = said([text("Look:"), image_url(CAT)])
    answer = told(chat(gateway, chats, [first], tools=[ADD]))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": [text("3"), image_url(DOG)]}
    told(chat(gateway, chats, [first, answer, result], tools=[ADD]))

    function = ADD["function"]
    given = [said([{"type": "input_text", "text": "Look:"}, {"type": "input_image", "image_url": url(CAT)}])]
    fields: Json = {"model": "m", "tools": [{"type": "function", **function}]}
    response = told(gateway.post(f"{responses}/v1/responses", {**fields, "input": given}))
    output = [{"type": "input_text", "text": "3"}, {"type": "input_image", "image_url": url(DOG)}]
    item = {"type": "function_call_output", "call_id": response["output"][-1]["call_id"], "output": output}
    fields["previous_response_id"] = response["id"]
    told(gateway.post(f"{responses}/v1/responses", {**fields, "input": [item]}))

    def block(file: bytes) -> Json:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url(file)[22:]}}

    schema = {"name": "add", "description": function["description"], "input_schema": function["parameters"]}
    asked: Json = {"model": "m", "max_tokens": 500, "tools": [schema]}
    asked["messages"] = [said([text("Look:"), block(CAT)])]
    made = told(gateway.post(f"{messages}/v1/messages", asked))["content"]
    results = {"type": "tool_result", "tool_use_id": made[-1]["id"], "content": [text("3"), block(DOG)]}
    asked["messages"] += [{"role": "assistant", "content": made}, said([results])]
    told(gateway.post(f"{messages}/v1/messages", asked))

    found = [gateway.steps(uid_of(base)) for base in (chats, responses, messages)]
    assert [list(map(tokens, steps)) for steps in found[1:]] == [list(map(tokens, found[0]))] * 2
    for steps in found:
        assert tree(steps) == [None, 0]
        stands(rollout, steps[1], [CAT, DOG])


def test_another_gateway_goes_on_with_the_same_images(rollout: Seeing, sighted: Path, pool: DataPool) -> None:
    with in_front(rollout, sighted, pool, renderer=FAMILY) as gateway:
        base = gateway.init()["base_url"].removeprefix(gateway.address)
        path, item = f"{base}/v1/responses", {"type": "input_image", "image_url": url(CAT)}
        first = told(gateway.post(path, {"model": "m", "input": [said([item])]}))
    with in_front(rollout, sighted, pool, renderer=FAMILY) as gateway:
        told(gateway.post(path, {"model": "m", "input": "And?", "previous_response_id": first["id"]}))
        steps = gateway.steps(path.split("/")[1])
    assert tree(steps) == [None, 0]
    stands(rollout, steps[1], [CAT])


def test_another_image_of_the_same_size_is_another_conversation(gateway: Running, rollout: Seeing) -> None:
    base = gateway.init()["base_url"]
    told(chat(gateway, base, [said([image_url(CAT)])]))
    other = picture(3, 2, seed=9)
    told(chat(gateway, base, [said([image_url(other)]), {"role": "assistant", "content": "ok"}, said("And?")]))
    one, two = gateway.steps(uid_of(base))
    assert tokens(one) == tokens(two)[: len(tokens(one))]  # and yet
    assert two.metadata["cause"] == "history_rewritten"
    assert shown(two)[0][0] == other
    assert gateway.pool.trajectory(uid_of(base)).parents == {0: -1, 1: -1}


def test_an_image_is_kept_once_however_many_steps_show_it(gateway: Running) -> None:
    base = gateway.init()["base_url"]
    messages = [said([image_url(CAT)])]
    for _ in range(3):
        messages += [told(chat(gateway, base, messages))["choices"][0]["message"], said("And?")]
    found = gateway.pool.trajectory(uid_of(base))
    assert [bytes(blob) for blob in found.blobs.values()] == [CAT]
    (sequence,) = found.sequences()
    assert sequence.multi_modal_data is not None
    assert [each["data"] for each in sequence.multi_modal_data["images"]] == [CAT]
