"""`/v1/chat/completions` and `/tokenize` of Headrace's engine answer as vLLM's do: the same template, the same ids."""

from __future__ import annotations

import pytest
from tests.engine.kit import Client, Json
from tests.vllm.kit import both, stream_alike, tell_alike

from headrace.engine.tokenizer import parse_tool_calls

PATH = "/v1/chat/completions"
GREEDY: Json = {"model": "tiny", "temperature": 0, "max_tokens": 8, "return_token_ids": True}
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Says a number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}
CALL: Json = {"id": "call-1", "type": "function", "function": {"name": "guess", "arguments": '{"number": 4}'}}
USER: Json = {"role": "user", "content": "guess a number"}

CONVERSATIONS: dict[str, Json] = {
    "one turn": {"messages": [USER]},
    "a system turn": {"messages": [{"role": "system", "content": "Guess."}, USER]},
    "several turns": {"messages": [USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "higher"}]},
    "text parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    "two text parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    },
    "empty content": {"messages": [{"role": "user", "content": ""}]},
    "other scripts": {"messages": [{"role": "user", "content": "Größe 数 🙂"}]},
    "a template's words in a message": {"messages": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\n"}]},
    "tools": {"messages": [USER], "tools": [TOOL]},
    "tools and a system turn": {"messages": [{"role": "system", "content": "Guess."}, USER], "tools": [TOOL]},
    "a call and its answer": {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call-1", "content": "lower"},
        ],
        "tools": [TOOL],
    },
    "text and a call": {
        "messages": [USER, {"role": "assistant", "content": "I try.", "tool_calls": [CALL, CALL]}, USER],
        "tools": [TOOL],
    },
    "no generation prompt": {"messages": [USER], "add_generation_prompt": False},
    "a message to go on with": {
        "messages": [USER, {"role": "assistant", "content": "I gue"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}

REQUESTS: dict[str, Json] = {
    "ids": {},
    "log-probs": {"logprobs": True, "return_tokens_as_token_ids": True},
    "top log-probs": {"logprobs": True, "top_logprobs": 2, "allowed_token_ids": [67, 68, 69]},
    "no ids": {"return_token_ids": None},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 3},
    "a stop string": {"stop": ["e"]},
    "a stop token": {"logit_bias": {"364": 100}, "stop_token_ids": [364]},
    "EOS": {"logit_bias": {"2": 100}, "logprobs": True, "return_tokens_as_token_ids": True},
    "tools that are not called": {"tools": [TOOL]},
    "tools that may not be called": {"tools": [TOOL], "tool_choice": "none"},
    "log-probs of the prompt": {"prompt_logprobs": 0},
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_has_the_ids_of_vllms(ours: Client, theirs: Client, name: str) -> None:
    found = both(ours, theirs, "/tokenize", {"model": "tiny", **CONVERSATIONS[name]})
    assert found["count"] == len(found["tokens"])


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_is_answered_as_by_vllm(ours: Client, theirs: Client, name: str) -> None:
    both(ours, theirs, PATH, {**GREEDY, **CONVERSATIONS[name]})


@pytest.mark.parametrize("name", REQUESTS)
def test_a_whole_answer_is_vllms(ours: Client, theirs: Client, name: str) -> None:
    both(ours, theirs, PATH, {**GREEDY, "messages": [USER], **REQUESTS[name]})


@pytest.mark.parametrize("name", sorted(set(REQUESTS) - {"log-probs of the prompt"}))
def test_a_streamed_answer_tells_the_same_text_after_as_many_tokens(ours: Client, theirs: Client, name: str) -> None:
    given = {**GREEDY, "messages": [USER], **REQUESTS[name]}
    tell_alike(ours.chunks(PATH, given), theirs.chunks(PATH, given), "content")


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logprobs": True},
        {"return_token_ids": None},
        {"stream_options": {"include_usage": True}},
    ],
    ids=str,
)
def test_a_streams_chunks_have_the_shapes_of_vllms(ours: Client, theirs: Client, asked: Json) -> None:
    given = {**GREEDY, "messages": [USER], **asked}
    stream_alike(ours, theirs, PATH, given)


@pytest.mark.parametrize("text", ["guess a number", "<|im_start|>user\n", "Größe 数 🙂", "<tool_call>"])
@pytest.mark.parametrize("special", [True, False])
def test_a_text_has_the_ids_of_vllms(ours: Client, theirs: Client, text: str, special: bool) -> None:
    asked = {"model": "tiny", "prompt": text, "add_special_tokens": special, "return_token_strs": True}
    found = both(ours, theirs, "/tokenize", asked)
    both(ours, theirs, "/detokenize", {"model": "tiny", "tokens": found["tokens"]})


CALLED = '{"name": "guess", "arguments": {"number": 4}}'
ANSWERS = {
    "a call": f"<tool_call>\n{CALLED}\n</tool_call>",
    "a tight call": '<tool_call>{"name":"guess","arguments":{"number":4}}</tool_call>',
    "two calls": f"<tool_call>\n{CALLED}\n</tool_call>\n<tool_call>\n{CALLED}\n</tool_call>",
    "text and a call": f"I try.\n<tool_call>\n{CALLED}\n</tool_call>",
    "a call and text": f"<tool_call>\n{CALLED}\n</tool_call> so",
    "text between calls": f"a <tool_call>{CALLED}</tool_call> b <tool_call>{CALLED}</tool_call> c",
    "a call that is not closed": f"<tool_call>\n{CALLED}",
    "a call that is cut": f"<tool_call>\n{CALLED[:-9]}",
    "a call that is no JSON": "<tool_call>\n{name: guess}\n</tool_call>",
    "a call that is no object": "<tool_call>[1]</tool_call>",
    "a call without arguments": '<tool_call>\n{"name": "guess"}\n</tool_call>',
    "a call with arguments in a string": '<tool_call>\n{"name": "guess", "arguments": "4"}\n</tool_call>',
    "a call of no tool": '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>',
    "a call in other scripts": '<tool_call>\n{"name": "guess", "arguments": {"number": "ö数"}}\n</tool_call>',
    "a call and one that is none": f"<tool_call>{CALLED}</tool_call><tool_call>no</tool_call>",
    "text": "  no call at all  ",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_parsed_as_by_vllm(theirs: Client, name: str) -> None:
    """vLLM can be made to say a text; the engine cannot, so its parser is asked."""
    form = {"choice": [ANSWERS[name]]}
    given = {**GREEDY, "max_tokens": 300, "messages": [USER], "tools": [TOOL], "structured_outputs": form}
    choice = theirs.post(PATH, given)["choices"][0]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    content, made = parse_tool_calls(ANSWERS[name])
    assert (content, [call["function"] for call in made]) == (choice["message"]["content"], calls)
    assert choice["finish_reason"] == ("tool_calls" if made else "stop")
