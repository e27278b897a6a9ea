"""What finds conversations and what ends them: pure, bounded, and true of any sequence of calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.live.endings import IdleClock
from headrace.gateway.live.index import (
    MAX_ALIKE,
    AnswerIndex,
    TextIndex,
    call_in,
    conversation_of,
    is_live,
    new_call_id,
    new_conversation_uid,
    session_uid,
    tenant_prefix,
)
from headrace.gateway.turn import CHUNK_BYTES, TextKey
from headrace.tokens import Conversation, Message, ToolCall

OK = Message("assistant", "ok")


def asked(*texts: str) -> Conversation:
    """A conversation in which every question was answered with ok, but the last."""
    messages = [message for text in texts for message in (Message("user", text), OK)]
    return Conversation(messages[:-1])


def answer(answers: AnswerIndex, uid: str, request: Conversation, scope: str = "") -> None:
    answers.add(uid, scope, *request.chain.answer(OK))


def test_the_conversations_that_were_quiet_longest_are_forgotten_first() -> None:
    answers = AnswerIndex(most=4)
    for uid in ("a", "b", "c"):
        answer(answers, uid, asked(uid))
    for texts in (["a", "1"], ["a", "1", "2"]):
        answer(answers, "a", asked(*texts))
    assert "b" not in answers
    assert len(answers) == 4
    assert answers.find("", asked("b", "more")) is None
    found = answers.find("", asked("a", "1", "2", "3"))
    assert found is not None
    assert (found.answer.uid, found.last) == ("a", True)


def test_what_is_dropped_leaves_nothing() -> None:
    answers = AnswerIndex()
    for at in range(2 * MAX_ALIKE):
        answer(answers, f"c{at}", asked("hi"))
    assert len(answers) == MAX_ALIKE
    for at in range(2 * MAX_ALIKE):
        answers.drop(f"c{at}")
    assert len(answers) == 0
    assert answers.find("", asked("hi", "more")) is None


def test_an_answer_whose_text_was_dropped_is_found_by_its_calls_ids() -> None:
    """Two conversations with the same question, the same call and other ids; a third that asked something else."""
    answers, question = AnswerIndex(), Message("user", "hi")
    said = {
        uid: Message("assistant", f"I am {uid}.", None, (ToolCall("look_up", {"q": "x"}, f"call_{uid}"),))
        for uid in ("a", "b")
    }
    for uid, message in said.items():
        answers.add(uid, "", *Conversation([question]).chain.answer(message))
    for uid, message in said.items():
        bare, result = Message("assistant", "", None, message.tool_calls), Message("tool", "1", None, (), f"call_{uid}")
        found = answers.find("", Conversation([question, bare, result]))
        assert found is not None
        assert (found.answer.uid, found.last, found.alike) == (uid, True, (uid,))
        assert answers.find("", Conversation([Message("user", "ho"), bare, result])) is None
        answers.drop(uid)
        assert answers.find("", Conversation([question, bare, result])) is None
    assert len(answers) == 0


def test_no_scope_finds_what_was_given_in_another() -> None:
    answers = AnswerIndex()
    answer(answers, "a", asked("hi"), "tenant\0user\0")
    for scope in ("", "tenant\0\0", "tenant\0user", "other\0user\0"):
        assert answers.find(scope, asked("hi", "more")) is None


@given(st.lists(st.text(max_size=3 * CHUNK_BYTES), max_size=8), st.text(max_size=CHUNK_BYTES))
def test_of_all_texts_that_a_prompt_begins_with_the_longest_is_first(texts: list[str], more: str) -> None:
    known = TextIndex()
    for text in texts:
        known.add("s", TextKey.of(text))
    for text in texts:
        prompt = text + more
        fitting = [other for other in texts if prompt.startswith(other)]
        found = [key.hex() for key in known.known("s", prompt)]
        first = next(key for key in found if key in {TextKey.of(other).digest for other in texts})
        assert first == TextKey.of(max(fitting, key=len)).digest
        assert list(known.known("other", prompt)) == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=30))
def test_what_is_due_was_not_heard_of_for_so_long(calls: list[tuple[str, int]]) -> None:
    idle, now = IdleClock(20), 0
    last: dict[str, int] = {}
    for uid, wait in calls:
        now += wait
        assert set(idle.due(now)) == {uid for uid, at in last.items() if now - at >= 20}
        assert bool(idle.due(now)) == (bool(last) and idle.wait(now) == 0)
        idle.touch(uid, now)
        last[uid] = now


def test_a_response_id_names_its_conversation_in_every_dialect() -> None:
    uid = new_conversation_uid()
    call = new_call_id(uid, "0123456789abcdef" * 2)
    for shown in (call, f"chatcmpl-{call}", f"cmpl-{call}-0", f"resp_{call}", f"msg_{call}"):
        named = call_in(shown)
        assert named is not None
        assert conversation_of(named) == uid
    assert is_live(f"tenant/{uid}")
    assert tenant_prefix(f"tenant/{uid}") == "tenant/"
    assert not is_live(f"{uid}@other")
    assert session_uid("s", 1) != session_uid("s", 2)
