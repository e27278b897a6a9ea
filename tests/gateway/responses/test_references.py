"""`item_reference`: items of stored answers, named by their ids instead of sent, as the Vercel AI SDK does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.gateway.kit import Running, running_gateway, told, tree
from tests.gateway.responses.kit import ADD, Json, checked, events_of, respond, result, text_of, user
from tests.gateway.rollout import Rollout, Say, chat, error_of, in_front, uid_of
from tests.pool.servers import serving
from tests.tokens import models
from tests.tokens.kit import STOPS

from headrace import DataPool
from headrace.pool.connect import connect

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def gateway(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder) as found:
        yield found


def referring(item: Json) -> Json:
    return {"type": "item_reference", "id": item["id"]}


def answered(gateway: Running, base: str, items: list[Json], *, stream: bool = False, **asked: object) -> Json:
    answer = respond(gateway, base, items, tools=[ADD], stream=stream, **asked)
    return checked(events_of(answer.text)) if stream else told(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_of_references_is_one_branch(
    gateway: Running, rollout: Rollout, base: str, stream: bool
) -> None:
    """Text and calls, several in one answer, and text between them: all by their ids, at every turn."""
    rollout.script += [f"Let me add.\n{CALL}", f"Twice.\n{CALL}\nand\n{CALL}", "It is 3."]
    items: list[Json] = [user("1 + 2?")]
    while True:
        found = answered(gateway, base, items, stream=stream)
        calls = [item for item in found["output"] if item["type"] == "function_call"]
        items += [*map(referring, found["output"]), *map(result, calls)]
        if not calls:
            break
    assert text_of(found) == "It is 3."
    answered(gateway, base, [*items, user("thanks")], stream=stream)
    steps = gateway.steps(uid_of(base))
    assert tree(steps) == [None, 0, 1, 2]
    assert [step.prompt_ids.tolist() for step in steps] == [order["prompt"] for order in rollout.orders]
    # All of it was kept as if it had been sent, so that either way of going on names the same.
    again = respond(gateway, base, "And now?", tools=[ADD], previous_response_id=found["id"])
    told(again)
    assert tree(gateway.steps(uid_of(base))) == [None, 0, 1, 2, 2]


def test_reasoning_is_referred_to_as_well() -> None:
    with (
        Rollout(models.vocabulary("qwen3"), STOPS["qwen3"]) as rollout,
        in_front(rollout, models.folder("qwen3")) as gateway,
    ):
        rollout.script += [f"<think>\nhm\n</think>\n\n{CALL}", "3"]
        base = gateway.init()["base_url"]
        first = told(respond(gateway, base, [user("1 + 2?")], tools=[ADD]))
        assert [item["type"] for item in first["output"]] == ["reasoning", "function_call"]
        items = [user("1 + 2?"), *map(referring, first["output"]), result(first["output"][1])]
        told(respond(gateway, base, items, tools=[ADD]))
        assert tree(gateway.steps(uid_of(base))) == [None, 0]


def test_items_and_references_may_be_mixed_and_the_type_left_out(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script += [f"Let me add.\n{CALL}", "3"]
    first = told(respond(gateway, base, [user("1 + 2?")], tools=[ADD]))
    text, call = first["output"]
    for one, other in ((text, {"id": call["id"]}), (referring(text), call)):
        told(respond(gateway, base, [user("1 + 2?"), one, other, result(call)], tools=[ADD]))
    assert tree(gateway.steps(uid_of(base))) == [None, 0, 0]


def test_of_two_answers_that_look_alike_the_one_referred_to_is_meant(
    gateway: Running, rollout: Rollout, base: str
) -> None:
    whole = rollout.vocabulary.encode("hello")
    letters = [token for letter in "hello" for token in rollout.vocabulary.encode(letter)]
    rollout.script += [Say(ids=whole), Say(ids=letters)]
    answers = [told(respond(gateway, base, "hi"))["output"][0] for _ in range(2)]
    for answer in answers:
        told(respond(gateway, base, [user("hi"), referring(answer), user("more")]))
    assert tree(gateway.steps(uid_of(base))) == [None, None, 0, 1]


def test_a_reference_to_what_is_not_stored_here_is_404_and_named(gateway: Running, rollout: Rollout, base: str) -> None:
    """Never given, in another trajectory, with store: false, in another dialect, or no item of its answer."""
    there = told(respond(gateway, base, "hi"))["output"][0]["id"]
    elsewhere = told(respond(gateway, str(gateway.init()["base_url"]), "hi"))["output"][0]["id"]
    forgotten = told(respond(gateway, base, "hi", store=False))["output"][0]["id"]
    spoken = "msg_" + told(chat(gateway, base, "hi"))["id"].removeprefix("chatcmpl-")
    call = there.removeprefix("msg_")
    parts = (f"rs_{call}", f"fc_{call}_0", f"fc_{call}", f"msg_{call}_1", f"msg_{call}_0")
    before = len(rollout.orders)
    for unknown in (elsewhere, forgotten, spoken, *parts, call, "msg_0", "msg_x", "resp_" + call, "x" * 1000):
        for stream in (False, True):
            items = [user("hi"), {"type": "item_reference", "id": unknown}, user("more")]
            found = error_of(respond(gateway, base, items, stream=stream), 404)
            assert (found["code"], found["param"]) == ("item_not_found", "input")
            assert "input[1]" in found["message"]
            assert unknown[:40] in found["message"]
    assert len(rollout.orders) == before


def test_an_output_still_needs_its_call(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script += [f"Let me add.\n{CALL}"]
    text, call = told(respond(gateway, base, [user("1 + 2?")], tools=[ADD]))["output"]
    answer = respond(gateway, base, [user("1 + 2?"), referring(text), result(call)], tools=[ADD])
    assert call["call_id"] in error_of(answer, 400)["message"]


def test_any_gateway_on_the_same_pool_finds_what_is_referred_to(rollout: Rollout, folder: Path) -> None:
    rollout.reply = lambda asked: f"answer {len(rollout.orders)}"
    with DataPool() as pool, serving(pool) as address, ExitStack() as stack:
        pools = [stack.enter_context(connect(address)) for _ in range(2)]
        gateways = [stack.enter_context(running_gateway(each, rollout.address, folder, ack="pool")) for each in pools]
        begun = gateways[0].init()
        items: list[Json] = []
        for turn in range(4):
            here = gateways[turn % 2]
            base = begun["base_url"].replace(gateways[0].address, here.address)
            items.append(user(f"question {turn}"))
            items += map(referring, told(respond(here, base, items))["output"])
        steps = gateways[0].steps(begun["trajectory_uid"])
    assert tree(steps) == [None, 0, 1, 2]
