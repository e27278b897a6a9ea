"""Prompts back into messages: what a real chat template wrote is cut where it writes its turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tokens import models
from tests.tokens.kit import LOOK_UP

from headrace.engine import words
from headrace.tokens import Message, Renderer, ToolCall, load_renderer
from headrace.tokens.split import PromptSplitter

CALL = ToolCall("look_up", {"q": "x"}, "abcdef123")
USER, ANSWER, SYSTEM = Message("user", "What is 2 + 2?"), Message("assistant", "Four."), Message("system", "Be brief.")
AGAIN = Message("user", "Sure?\nReally?")
RESULT = Message("tool", "42 found", None, (), CALL.id, CALL.name)


@pytest.fixture(params=models.NAMES, scope="module")
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return models.renderer(request.param)


def roles_and_texts(messages: list[Message] | None) -> list[tuple[str, str]]:
    assert messages is not None
    return [(message.role, message.content.strip()) for message in messages]


@pytest.mark.parametrize("conversation", [[USER], [SYSTEM, USER], [USER, ANSWER, AGAIN], [SYSTEM, USER, ANSWER, AGAIN]])
def test_a_conversation_comes_back(renderer: Renderer, conversation: list[Message]) -> None:
    found = roles_and_texts(PromptSplitter(renderer).split(renderer.render(conversation)))
    asked = [(message.role, message.content) for message in conversation]
    if renderer.vocabulary.folder.find("mistral") >= 0:  # its template writes a system message into the user's turn
        asked = [pair for pair in asked if pair[0] != "system"]
        assert [role for role, _ in found] == [role for role, _ in asked]
        assert all(text in content for (_, text), (_, content) in zip(asked, found, strict=True))
        return
    assert [pair for pair in found if pair[0] != "system"] == [pair for pair in asked if pair[0] != "system"]
    if conversation[0] is SYSTEM:
        assert found[0][0] == "system"
        assert "Be brief." in found[0][1]  # some templates write the date before it


def test_tools_stand_in_a_system_turn_and_their_results_are_the_tools(renderer: Renderer) -> None:
    calling = Message("assistant", "", None, (CALL,))
    found = PromptSplitter(renderer).split(renderer.render([USER, calling, RESULT, ANSWER, AGAIN], [LOOK_UP]))
    if any(name in renderer.vocabulary.folder for name in ("llama", "mistral")):
        assert found is None  # their templates write tools where no other conversation has anything: nothing is guessed
        return
    assert found is not None
    assert any("42 found" in message.content for message in found)
    assert found[-1] == AGAIN
    assert found[-2] == ANSWER


def test_what_follows_an_answer_is_cut_too(renderer: Renderer) -> None:
    first = renderer.render([USER])
    whole = renderer.render([USER, ANSWER, AGAIN])
    assert whole[: len(first)] == first
    found = PromptSplitter(renderer).split(whole[len(first) :], after="assistant")
    assert roles_and_texts(found) == [("user", AGAIN.content)]


def test_what_no_template_wrote_is_not_cut(renderer: Renderer) -> None:
    splitter = PromptSplitter(renderer)
    assert splitter.split(renderer.vocabulary.encode("Once upon a time")) is None
    assert splitter.split(renderer.vocabulary.encode(" there was"), after="assistant") is None
    whole = renderer.render([USER])
    assert splitter.split(whole[:-1] if len(whole) < 4 else whole[: len(whole) // 2]) is None


def test_a_vocabulary_that_cannot_write_any_word_is_tried_with_its_own(tmp_path: Path) -> None:
    renderer = load_renderer(words.build(tmp_path / "model", ("guess", "higher", "lower", *"123456")))
    conversation = [Message("user", "guess"), Message("assistant", "3"), Message("user", "higher")]
    found = PromptSplitter(renderer).split(renderer.render(conversation))
    assert roles_and_texts(found) == [("user", "guess"), ("assistant", "3"), ("user", "higher")]
