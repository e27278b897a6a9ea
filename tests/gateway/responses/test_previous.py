"""`previous_response_id`: the pool knows the conversation, whichever gateway is asked to go on with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
from tests.gateway.kit import Running, running_gateway, told, tree, until
from tests.gateway.responses.kit import ADD, checked, events_of, respond, result, settled, text_of, user
from tests.gateway.rollout import RETRY, Rollout, Say, chat, error_of, in_front, uid_of
from tests.pool.servers import ServedPool, serving

from headrace import DataPool
from headrace.gateway import executor
from headrace.gateway.sessions import Session, StoredResponse
from headrace.pool.connect import connect
from headrace.tokens import Image, Message

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def gateway(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder) as found:
        yield found


def causes(gateway: Running, base: str) -> list[str]:
    return [step.metadata["cause"] for step in gateway.steps(uid_of(base))]


def test_a_conversation_outlives_its_gateway(rollout: Rollout, folder: Path, tmp_path: Path) -> None:
    rollout.script += [CALL, "It is 3.", "As I said."]
    with DataPool(tmp_path) as pool, in_front(rollout, folder, pool) as before:
        base = before.init()["base_url"]
        first = told(respond(before, base, "1 + 2?", tools=[ADD]))
        output = [result(item) for item in first["output"]]
        second = told(respond(before, base, output, tools=[ADD], previous_response_id=first["id"]))
    with DataPool(tmp_path) as pool, in_front(rollout, folder, pool) as after:
        base = base.replace(before.address, after.address)
        asked = {"tools": [ADD], "previous_response_id": second["id"]}
        assert text_of(told(respond(after, base, "Again?", **asked))) == "As I said."
        steps = after.steps(uid_of(base))
    assert tree(steps) == [None, 0, 1]
    assert [step.prompt_ids.tolist() for step in steps] == [order["prompt"] for order in rollout.orders]


def test_a_conversation_may_change_its_gateway_at_every_turn(rollout: Rollout, folder: Path) -> None:
    rollout.reply = lambda asked: f"answer {len(rollout.orders)}"
    with DataPool() as pool, serving(pool) as address, ExitStack() as stack:
        pools = [stack.enter_context(connect(address)) for _ in range(2)]
        gateways = [stack.enter_context(running_gateway(each, rollout.address, folder, ack="pool")) for each in pools]
        begun = gateways[0].init()
        last = None
        for turn in range(6):
            here = gateways[turn % 2]
            base = begun["base_url"].replace(gateways[0].address, here.address)
            last = told(respond(here, base, f"question {turn}", previous_response_id=last))["id"]
        steps = gateways[0].steps(begun["trajectory_uid"])
    assert tree(steps) == [None, 0, 1, 2, 3, 4]


def test_an_id_that_the_pool_cannot_be_asked_for_is_503(rollout: Rollout, folder: Path, tmp_path: Path) -> None:
    """What this gateway answered itself goes on; what another may have answered is not said to be unknown."""
    with (
        ServedPool(tmp_path) as served,
        connect(served.address) as pool,
        running_gateway(pool, rollout.address, folder) as gateway,
    ):
        base = gateway.init()["base_url"]
        first = told(respond(gateway, base, "hi"))
        served.kill()
        told(respond(gateway, base, "more", previous_response_id=first["id"]))
        answer = respond(gateway, base, "more", previous_response_id="resp_of_another")
        assert error_of(answer, 503)["param"] == "previous_response_id"
        assert answer.headers["retry-after"]
        served.start()
        until(lambda: respond(gateway, base, "more", previous_response_id="resp_of_another").status_code == 404)
        assert tree(gateway.steps(uid_of(base))) == [None, 0]


def test_what_is_too_large_for_the_pool_is_gone_on_from_here_alone(
    rollout: Rollout, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are kept as any others."""
    monkeypatch.setattr(executor, "MAX_STORED_BYTES", 600)
    with DataPool(tmp_path) as pool, in_front(rollout, folder, pool) as before:
        base = before.init()["base_url"]
        first = told(respond(before, base, "long " * 150))
        second = told(respond(before, base, "more", previous_response_id=first["id"]))
        assert tree(before.steps(uid_of(base))) == [None, 0]
    with DataPool(tmp_path) as pool, in_front(rollout, folder, pool) as after:
        base = base.replace(before.address, after.address)
        found = error_of(respond(after, base, "more", previous_response_id=second["id"]), 404)
        assert found["code"] == "previous_response_not_found"
        assert tree(after.steps(uid_of(base))) == [None, 0]


def test_what_follows_an_answer_whose_step_was_dropped_is_found_again(
    rollout: Rollout, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "rules.py").write_text("def keep(step):\n    return step.metadata['model'] != 'drop'\n")
    redact = f"{tmp_path}/rules.py:keep"
    with DataPool(tmp_path / "pool") as pool, in_front(rollout, folder, pool, redact=redact) as before:
        base = before.init()["base_url"]
        dropped = told(respond(before, base, "first", model="drop"))
        kept = told(respond(before, base, "second", previous_response_id=dropped["id"]))
    with DataPool(tmp_path / "pool") as pool, in_front(rollout, folder, pool, redact=redact) as after:
        base = base.replace(before.address, after.address)
        told(respond(after, base, "third", previous_response_id=kept["id"]))
        assert tree(after.steps(uid_of(base))) == [None, 0]
    said = rollout.vocabulary.decode(rollout.orders[-1]["prompt"])
    assert all(part in said for part in ("first", "second", "third"))


def test_the_files_of_images_count_for_what_is_kept_in_memory(pool: DataPool) -> None:
    message = Message("user", "look", parts=("look", Image("a", "image/png", 8, 8, b"x" * 4000)))
    session = Session("t", "p", "train")
    session.stored.add("call", StoredResponse(None, 0, (message,)))
    assert session.stored.tokens == 1001


def test_an_id_that_is_not_stored_here_is_404(gateway: Running, rollout: Rollout, base: str) -> None:
    """Nobody goes on with what was never said, said with store: false, or said in another trajectory."""
    elsewhere = told(respond(gateway, str(gateway.init()["base_url"]), "hi"))["id"]
    forgotten = told(respond(gateway, base, "hi", store=False))["id"]
    spoken = told(chat(gateway, base, "hi"))["id"]
    before = len(rollout.orders)
    for unknown in (elsewhere, forgotten, spoken, "resp_0", "", "x" * 1000):
        for stream in (False, True):
            answer = respond(gateway, base, "go on", previous_response_id=unknown, stream=stream)
            found = error_of(answer, 404)
            assert (found["code"], found["param"]) == ("previous_response_not_found", "previous_response_id")
    with openai.OpenAI(**settled(base)) as client, pytest.raises(openai.NotFoundError):
        client.responses.create(model="any", input="go on", previous_response_id=elsewhere)
    assert len(rollout.orders) == before
    assert len(gateway.steps(uid_of(base))) == 2


def test_instructions_are_a_call_s_own(gateway: Running, rollout: Rollout, base: str) -> None:
    """Other ones begin a branch with the same conversation behind them, as OpenAI documents; none is other ones too."""
    rollout.reply = lambda asked: f"answer {len(rollout.orders)}"
    first = told(respond(gateway, base, "hi", instructions="be brief"))
    told(respond(gateway, base, "more", instructions="be brief", previous_response_id=first["id"]))
    other = told(respond(gateway, base, "more", instructions="be long", previous_response_id=first["id"]))
    told(respond(gateway, base, "again", instructions="be long", previous_response_id=other["id"]))
    told(respond(gateway, base, "more", previous_response_id=first["id"]))
    assert causes(gateway, base) == ["first", "extended", "system_changed", "extended", "system_changed"]
    assert tree(gateway.steps(uid_of(base))) == [None, 0, None, 2, None]
    texts = [rollout.vocabulary.decode(order["prompt"]) for order in rollout.orders]
    assert all(part in texts[3] for part in ("be long", "hi", "answer 0", "more", "answer 2", "again"))
    assert "be brief" not in texts[3]


def test_one_answer_may_be_gone_on_from_twice(gateway: Running, rollout: Rollout, base: str) -> None:
    first = told(respond(gateway, base, "hi"))
    for question in ("this way", "that way"):
        told(respond(gateway, base, question, previous_response_id=first["id"]))
    assert tree(gateway.steps(uid_of(base))) == [None, 0, 0]


def test_of_two_answers_that_look_alike_the_named_one_is_meant(gateway: Running, rollout: Rollout, base: str) -> None:
    whole = rollout.vocabulary.encode("hello")
    letters = [token for letter in "hello" for token in rollout.vocabulary.encode(letter)]
    assert whole != letters
    rollout.script += [Say(ids=whole), Say(ids=letters)]
    one, other = (told(respond(gateway, base, "hi"))["id"] for _ in range(2))
    told(respond(gateway, base, "more", previous_response_id=one))
    told(respond(gateway, base, "more", previous_response_id=other))
    assert tree(gateway.steps(uid_of(base))) == [None, None, 0, 1]


def test_chat_and_responses_take_turns_and_either_can_be_named(gateway: Running, rollout: Rollout, base: str) -> None:
    """A response that goes on from a chat keeps the whole of it."""
    rollout.reply = lambda asked: f"answer {len(rollout.orders)}"
    items = [user("hi"), {"role": "assistant", "content": "answer 0"}, user("two")]
    told(chat(gateway, base, "hi"))
    second = told(respond(gateway, base, items))
    third = told(respond(gateway, base, "three", previous_response_id=second["id"]))
    items += [*second["output"], user("three"), *third["output"], user("four")]
    spoken = [{"role": item["role"], "content": item["content"]} for item in items]
    told(chat(gateway, base, spoken))
    assert tree(gateway.steps(uid_of(base))) == [None, 0, 1, 2]


def test_the_text_of_a_conversation_is_kept_once(gateway: Running, rollout: Rollout, base: str) -> None:
    """However often an agent that stores its responses sends all its items again."""
    items = [user("a question like no other")]
    for turn in range(4):
        items += [*told(respond(gateway, base, items))["output"], user(f"turn {turn}")]
    kept = [step.metadata["kept"] for step in gateway.steps(uid_of(base))]
    assert ["like no other" in each for each in kept] == [True, False, False, False]


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_gets_the_same_response_and_makes_no_step(
    gateway: Running, rollout: Rollout, base: str, stream: bool
) -> None:
    rollout.script += ["hello", f"{CALL}\n{CALL}"]
    first = told(respond(gateway, base, "hi", tools=[ADD]))
    asked = {"previous_response_id": first["id"], "tools": [ADD], "parallel_tool_calls": False, "stream": stream}
    answers = [respond(gateway, base, "more", **asked, headers=headers) for headers in (None, RETRY)]
    one, again = (checked(events_of(each.text)) if stream else told(each) for each in answers)
    # A retry tells when the answer was recorded, which a second may have begun before.
    assert again["created_at"] - one["created_at"] >= 0
    assert {**again, "created_at": one["created_at"]} == one
    assert [item["type"] for item in one["output"]] == ["function_call"]
    assert len(gateway.steps(uid_of(base))) == 2
