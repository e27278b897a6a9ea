"""First prompts are tokenised once, and never taken for one another."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.planner import PromptCache
from headrace.tokens import Conversation, read_messages

TEXT = st.text(max_size=6)


def conversation(texts: list[str], **options: object) -> Conversation:
    roles = ["system", *["user"] * len(texts)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return Conversation(read_messages(messages), None, options)


@given(st.lists(TEXT, min_size=1, max_size=4), st.lists(TEXT, min_size=1, max_size=4))
def test_only_the_same_texts_are_the_same_prompt(one: list[str], other: list[str]) -> None:
    prompts = PromptCache()
    assert (prompts.key(conversation(one)) == prompts.key(conversation(other))) == (one == other)


def test_tools_and_options_are_part_of_a_prompt() -> None:
    prompts = PromptCache()
    messages = read_messages([{"role": "user", "content": "hi"}])
    tool = {"type": "function", "function": {"name": "add"}}
    asked = [
        Conversation(messages),
        Conversation(messages, [tool]),
        Conversation(messages, None, {"enable_thinking": False}),
    ]
    assert len({prompts.key(request) for request in asked}) == 3


def test_a_conversation_with_an_answer_in_it_is_not_remembered() -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "?"}]
    assert PromptCache().key(Conversation(read_messages(said))) is None


def test_the_least_used_are_forgotten_first() -> None:
    prompts = PromptCache(most_tokens=10)
    keys = [prompts.key(conversation([str(n)])) for n in range(3)]
    for key in keys[:2]:
        assert key is not None
        prompts.put(key, np.arange(5, dtype=np.int32))
    assert keys[0] is not None
    assert prompts.get(keys[0]) is not None
    assert keys[2] is not None
    prompts.put(keys[2], np.arange(4, dtype=np.int32))
    assert [prompts.get(key) is not None for key in keys if key is not None] == [True, False, True]


def test_no_more_than_so_many_are_remembered_however_short_they_are() -> None:
    prompts = PromptCache(most_prompts=3)
    keys = [prompts.key(conversation([str(n)])) for n in range(5)]
    for key in keys:
        assert key is not None
        prompts.put(key, np.arange(2, dtype=np.int32))
    assert [prompts.get(key) is not None for key in keys if key is not None] == [False, False, True, True, True]
