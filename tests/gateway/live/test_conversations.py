"""Which conversation a call under root `/v1` belongs to: the one that gave an answer which the call contains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tests.gateway.kit import Running, told
from tests.gateway.live.kit import Json, Talk, conversations, lines, say
from tests.gateway.models.kit import provided
from tests.gateway.rollout import RETRY, Rollout, answers, error_of, in_front, user

from headrace.gateway.live.conversations import PoolDiscovery

SESSION = "x-headrace-session"
SETTLED: Json = {"api_key": "none", "max_retries": 0}


def turns_of_openai(client: openai.OpenAI) -> Callable[[str], None]:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]

    def turn(text: str) -> None:
        messages.append(user(text))
        answer = client.chat.completions.create(model="m", messages=messages)
        messages.append(answer.choices[0].message)

    return turn


def turns_of_a_stream(client: openai.OpenAI) -> Callable[[str], None]:
    messages: list[Any] = []

    def turn(text: str) -> None:
        messages.append(user(text))
        chunks = client.chat.completions.create(model="m", messages=messages, stream=True)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        messages.append({"role": "assistant", "content": said})

    return turn


def turns_of_responses(client: openai.OpenAI) -> Callable[[str], None]:
    before: list[str] = []

    def turn(text: str) -> None:
        named: Json = {"previous_response_id": before[-1]} if before else {}
        before.append(client.responses.create(model="m", input=text, **named).id)

    return turn


def turns_of_anthropic(client: anthropic.Anthropic) -> Callable[[str], None]:
    messages: list[Any] = []

    def turn(text: str) -> None:
        messages.append(user(text))
        counted = client.messages.count_tokens(model="m", messages=messages).input_tokens
        answer = client.messages.create(model="m", max_tokens=64, messages=messages)
        assert answer.usage.input_tokens == counted
        messages.append({"role": "assistant", "content": answer.content})

    return turn


def test_real_clients_that_changed_one_url_are_conversations_of_their_own(service: Running) -> None:
    """Interleaved, in every dialect, all with the same words."""
    with (
        openai.OpenAI(base_url=f"{service.address}/v1", **SETTLED) as spoken,
        anthropic.Anthropic(base_url=service.address, **SETTLED) as other,
    ):
        assert [model.id for model in spoken.models.list()] == ["scripted"]
        talks = [
            *(make(spoken) for make in (turns_of_openai, turns_of_openai, turns_of_a_stream, turns_of_responses)),
            turns_of_anthropic(other),
        ]
        for text in ("hi", "and then?", "go on"):
            for turn in talks:
                turn(text)
    assert lines(service) == [[None, 0, 1]] * len(talks)


def test_two_users_with_the_same_first_message_are_two_conversations(service: Running) -> None:
    one, two = Talk(), Talk()
    for talk in (one, two):
        talk.says(service, "hi")
    for text in ("more", "still more"):
        for talk in (two, one):
            talk.says(service, text)
    assert lines(service) == [[None, 0, 1]] * 2


def test_even_where_they_were_answered_alike(service: Running, rollout: Rollout) -> None:
    rollout.reply = lambda asked: "ok"
    talks = [Talk() for _ in range(3)]
    for text in ("hi", "more", "still more"):
        for talk in talks:
            talk.says(service, text)
    assert lines(service) == [[None, 0, 1]] * 3


async def test_a_look_that_was_given_up_is_none_for_those_who_waited_for_it() -> None:
    """They came before it ended, and would take what was not read for what is not there."""
    reads: list[asyncio.Event] = []

    class Discovery(PoolDiscovery):
        async def _read(self) -> None:
            reads.append(asyncio.Event())
            await reads[-1].wait()

    async def begun(count: int) -> None:
        while len(reads) < count:
            await asyncio.sleep(0)

    discovery = Discovery(None, lambda held, found: None, lambda held: False)  # type: ignore[arg-type]
    first = asyncio.ensure_future(discovery.look())
    await begun(1)
    given_up, waits, late = (asyncio.ensure_future(discovery.look()) for _ in range(3))
    await asyncio.sleep(0)
    reads[0].set()
    await begun(2)
    given_up.cancel()
    await begun(3)
    reads[2].set()
    await asyncio.gather(first, waits, late)
    assert len(reads) == 3


def test_what_is_not_recorded_continues_nothing(service: Running, rollout: Rollout) -> None:
    """Of conversations that are alike, a call goes on with one that nobody continued."""
    rollout.reply = lambda asked: "ok"
    talks = [Talk() for _ in range(2)]
    for talk in talks:
        talk.says(service, "hi")
    unrecorded = {"x-headrace-record": "off"}
    told(say(service, [*talks[0].messages, user("a test")], headers=unrecorded))
    told(say(service, [*talks[0].messages, user("a test")], headers=unrecorded))
    for talk in talks:
        talk.says(service, "more")
    assert lines(service) == [[None, 0]] * 2


def test_those_of_different_users_are_never_one(service: Running, rollout: Rollout) -> None:
    rollout.reply = lambda asked: "ok"
    talk = Talk(user="ann")
    talk.says(service, "hi")
    told(say(service, [*talk.messages, user("more")], user="bob"))
    assert lines(service) == [[None], [None]]


def test_a_text_that_goes_on_is_found_whatever_its_length(service: Running, rollout: Rollout) -> None:
    rollout.reply = lambda asked: " and"
    texts = ["once", "x" * 255, "y" * 256, "\u00e9" * 300, "z" * 1000]
    for _ in range(3):
        for at, text in enumerate(texts):
            answer = told(service.post("/v1/completions", {"prompt": text, "max_tokens": 8}))
            texts[at] = text + answer["choices"][0]["text"] + " then"
    told(service.post("/v1/completions", {"prompt": "once upon", "max_tokens": 8}))
    assert lines(service) == [[None, 0, 1]] * len(texts) + [[None]]


def test_rewriting_is_a_branch_where_an_answer_is_left_and_a_new_conversation_where_none_is(service: Running) -> None:
    talk = Talk()
    for text in ("hi", "more"):
        talk.says(service, text)
    first, answer, more, _ = talk.messages
    told(say(service, [first, answer, user("something else")]))  # a fork
    told(say(service, [first, answer, more, {"role": "assistant", "content": "edited"}, user("so?")]))  # a rewrite
    told(say(service, [user("In short: hi, more."), {"role": "assistant", "content": "nobody said so"}, user("so?")]))
    assert [len(line) for line in lines(service)] == [4, 1]
    assert lines(service)[0][:3] == [None, 0, 0]


def test_a_session_header_joins_what_no_answer_does(service: Running) -> None:
    named = {"headers": {SESSION: "a coding agent #1"}}
    for text in ("write a title", "do the work", "check it"):
        told(say(service, text, **named))
    told(say(service, "by itself"))
    assert lines(service) == [[None, None, None], [None]]
    assert service.pool.trajectory(conversations(service)[0]).metadata["session"] == "a coding agent #1"


@pytest.mark.parametrize("value", [b"../../pool", b"a/b%2F..\\'\"<>{}", b"@other", b"x" * 256])
def test_any_printable_session_header_is_a_name(service: Running, value: bytes) -> None:
    for text in ("hi", "more"):
        told(say(service, text, headers={SESSION.encode(): value}))
    assert lines(service) == [[None, None]]


@pytest.mark.parametrize("value", [b"", b"x" * 257, b"tab\there", b"caf\xe9", b"\xff\xfe"])
def test_any_other_is_refused_and_begins_nothing(service: Running, value: bytes) -> None:
    assert SESSION in error_of(say(service, "hi", headers={SESSION.encode(): value}), 400)["message"]
    assert conversations(service) == []


def test_a_session_header_that_is_given_twice_is_refused(service: Running) -> None:
    twice = [(SESSION, "a"), (SESSION, "b"), ("content-type", "application/json")]
    answer = service.http.post("/v1/messages", headers=twice, content=b"{}")
    assert (answer.status_code, answer.json()["type"]) == (400, "error")


def test_a_call_that_fails_leaves_no_conversation(service: Running, rollout: Rollout) -> None:
    error_of(say(service, []), 400)
    rollout.script.append(answers(400, {"error": {"message": "no", "param": None, "code": 400}}))
    error_of(say(service, "hi"), 400)
    error_of(service.post("/v1/responses", {"input": "x", "previous_response_id": "resp_nobody"}), 404)
    told(say(service, "hi", headers={"x-headrace-record": "off"}))
    assert conversations(service) == []


def test_a_retry_of_a_first_call_is_the_same_conversation(
    service: Running, rollout: Rollout, threads: ThreadPoolExecutor
) -> None:
    first = told(say(service, "hi"))
    again = told(say(service, "hi", headers=RETRY))
    assert {**again, "created": 0} == {**first, "created": 0}  # a recorded answer was created when it was whole
    told(say(service, [user("hi"), first["choices"][0]["message"], user("more")]))
    told(say(service, "hi"))  # on purpose: another
    assert lines(service) == [[None, 0], [None]]


def test_without_open_it_says_what_to_do_in_the_dialects_own_words(gateway: Running) -> None:
    for path in ("chat/completions", "completions", "responses"):
        found = error_of(gateway.post(f"/v1/{path}", {}), 404)
        assert found["code"] == "not_open"
        assert "--open" in found["message"]
        assert "/init_trajectory" in found["message"]
    for path in ("messages", "messages/count_tokens"):
        answer = gateway.post(f"/v1/{path}", {})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert error_of(gateway.get("/v1/models"), 404)["code"] == "not_open"
    assert gateway.post("/v1/feedback", {"response_id": "x", "reward": 1}).status_code == 404


def test_models_that_are_passed_on_to_are_no_conversations(rollout: Rollout, folder: Path, tmp_path: Path) -> None:
    with provided() as judge:
        file = tmp_path / "models.yaml"
        file.write_text(f"models:\n  judge: {{mode: pass, addresses: ['{judge.address}']}}\n  other: {{mode: train}}\n")
        with in_front(rollout, folder, open=True, models=str(file)) as service:
            talk = Talk()
            talk.says(service, "hi")
            for path in ("chat/completions", "embeddings"):
                service.post(f"/v1/{path}?x=1", {"model": "judge", "messages": [user("good?")]})
            assert [(asked.path, asked.query) for asked in judge.asked] == [
                ("/v1/chat/completions", "x=1"),
                ("/v1/embeddings", "x=1"),
            ]
            told(say(service, [*talk.messages, user("more")], model="other"))
            talk.says(service, "more")
            (uid,) = conversations(service)
            assert lines(service) == [[None, 0]]
            assert len(service.pool.trajectory(f"{uid}@other")) == 1
