"""Content blocks on the wire: what becomes of each kind in a prompt, in an answer, and on its way back.

The rollout server is scripted: what it was asked and what it sampled is its own account.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.kit import Json, Running, forced_calls, told, tree
from tests.gateway.rollout import Rollout, Say, in_front, scripted, uid_of
from tests.gateway.wire import breaks
from tests.tokens import models
from tests.tokens.kit import STOPS

THOUGHT = "<think>\nmy secret\n</think>\n\n"
EDIT: Json = {
    "name": "Edit",
    "description": "Edits a file.",
    "input_schema": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "replace_all": {"type": "boolean", "default": False},
            "edits": {
                "type": "array",
                "items": {"type": "object", "properties": {"line": {"type": "integer", "default": 1}}},
            },
        },
    },
}


@pytest.fixture(scope="module")
def gateway(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder) as found:
        yield found


@pytest.fixture(scope="module")
def thinker() -> Iterator[tuple[Running, Rollout]]:
    """A model that reasons, and a template that can be told not to."""
    with (
        Rollout(models.vocabulary("qwen3"), STOPS["qwen3"]) as rollout,
        in_front(rollout, models.folder("qwen3")) as gateway,
    ):
        yield gateway, rollout


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def text(said: str, **more: Any) -> Json:
    return {"type": "text", "text": said, **more}


def called(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def post(gateway: Running, base: str, messages: list[Json], **fields: Any) -> httpx.Response:
    return gateway.post(f"{base}/v1/messages", {"model": "m", "max_tokens": 64, "messages": messages, **fields})


def ask(gateway: Running, base: str, messages: list[Json], **fields: Any) -> Json:
    found: Json = told(post(gateway, base, messages, **fields))
    return found


def events(answer: httpx.Response) -> list[Json]:
    """A stream's events, each named by its type."""
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def prompt_of(rollout: Rollout, at: int = -1) -> str:
    return rollout.vocabulary.decode(rollout.orders[at]["prompt"])


# -- into the prompt ---------------------------------------------------------------------------------------------------


def test_system_texts_and_results_are_what_the_template_is_told(gateway: Running, rollout: Rollout) -> None:
    base = gateway.init()["base_url"]
    rollout.script += [called("Edit", path="a") + called("Edit", path="b"), "done"]
    system = [text("x-anthropic-billing-header: cc=1;"), text("Be brief."), text("Be kind.", cache_control=None)]
    asked: Json = {"system": system, "tools": [EDIT]}
    messages = [user([text("one"), text("two")]), user("three"), {"role": "system", "content": [text("Mind.")]}]
    first = ask(gateway, base, messages, **asked)
    one, two = (block["id"] for block in first["content"])
    results = [
        {"type": "tool_result", "tool_use_id": two, "content": [text("r"), text("s")], "is_error": False},
        {"type": "tool_result", "tool_use_id": one, "is_error": True},
        text("and?"),
    ]
    ask(gateway, base, [*messages, {"role": "assistant", "content": first["content"]}, user(results)], **asked)
    seen = prompt_of(rollout)
    assert "<|im_start|>system\nBe brief.\nBe kind." in seen
    assert "<|im_start|>user\none\ntwo\nthree<|im_end|>\n<|im_start|>system\nMind.<|im_end|>" in seen
    assert "billing" not in seen
    where = [seen.index(said) for said in ("r\ns", "Error", "<|im_start|>user\nand?")]
    assert where == sorted(where)
    assert tree(gateway.steps(uid_of(base))) == [None, 0]


def test_what_claude_code_sends_along_is_taken(gateway: Running, rollout: Rollout) -> None:
    base = gateway.init()["base_url"]
    fields: Json = {
        "thinking": {"type": "adaptive", "display": "omitted"},
        "metadata": {"user_id": "someone"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "tools": [{**EDIT, "defer_loading": True, "cache_control": {"type": "ephemeral"}}],
        "top_k": 7,
        "betas": ["something-new"],
    }
    told(gateway.post(f"{base}/v1/messages?beta=true", {"messages": [user("hi")], "max_tokens": 128_000, **fields}))
    (order,) = rollout.orders
    assert order["top_k"] == 7
    assert not order.keys() & {"context_management", "output_config", "betas", "metadata", "thinking"}
    (step,) = gateway.steps(uid_of(base))
    assert step.metadata["user"] == "someone"


def test_a_format_and_a_choice_are_enforced(gateway: Running, rollout: Rollout) -> None:
    base = gateway.init()["base_url"]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    ask(gateway, base, [user("a")], output_config={"format": {"type": "json_schema", "schema": schema}})
    assert rollout.orders[-1]["structured_outputs"] == {"json": schema}
    tools = [EDIT, {**EDIT, "name": "Other"}]
    for choice, names in (({"type": "any"}, ("Edit", "Other")), ({"type": "tool", "name": "Other"}, ("Other",))):
        ask(gateway, base, [user("b")], tools=tools, tool_choice=choice)
        assert [begun.split('"')[3] for begun in forced_calls(rollout.orders[-1])] == list(names)
    rollout.script.append(called("Edit", path="a"))
    answer = ask(gateway, base, [user("c")], tools=tools, tool_choice={"type": "none"})
    assert [block["type"] for block in answer["content"]] == ["text"]


# -- into the answer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("say", "reason", "sequence"),
    [
        (Say("ok"), "end_turn", None),
        (Say("ok", ended=False), "max_tokens", None),
        (Say("ok END", ended=False, finish="stop", stop_reason="END"), "stop_sequence", "END"),
        (Say(called("Edit", path="a")), "tool_use", None),
        (Say("   "), "end_turn", None),
    ],
    ids=["end", "length", "stop", "call", "blank"],
)
def test_an_answer_says_why_it_ended(
    gateway: Running, rollout: Rollout, say: Say, reason: str, sequence: str | None, stream: bool
) -> None:
    base = gateway.init()["base_url"]
    rollout.script.append(say)
    answer = post(gateway, base, [user("hi")], stop_sequences=["END"], tools=[EDIT], stream=stream)
    (step,) = gateway.steps(uid_of(base))
    if stream:
        first, ping, *blocks, ended, last = events(answer)
        assert [event["type"] for event in (first, ping, last)] == ["message_start", "ping", "message_stop"]
        shown = [event["content_block"]["type"] for event in blocks if event["type"] == "content_block_start"]
        assert (first["message"]["usage"]["input_tokens"], ended["usage"]["output_tokens"]) == (
            len(step.prompt_ids),
            len(step.response_ids),
        )
        found = ended["delta"]
    else:
        found = told(answer)
        shown = [block["type"] for block in found["content"]]
        assert found["usage"]["output_tokens"] == len(step.response_ids)
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
    blank = isinstance(say.text, str) and say.text.isspace()
    assert shown == ([] if blank else ["tool_use"] if reason == "tool_use" else ["text"])


def test_text_around_calls_is_streamed_block_by_block(gateway: Running, rollout: Rollout) -> None:
    base = gateway.init()["base_url"]
    rollout.script += [f"I will.\n{called('Edit', path='a')}\n{called('Edit', path='b')}\nDone so.", "ok"]
    found = events(post(gateway, base, [user("hi")], tools=[EDIT], stream=True))
    begun = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == ["text", "tool_use", "tool_use", "text"]
    deltas = {at: "" for at in range(4)}
    for event in found:
        if event["type"] == "content_block_delta":
            deltas[event["index"]] += event["delta"].get("text") or event["delta"].get("partial_json")
    assert deltas == {0: "I will.", 1: '{"path": "a"}', 2: '{"path": "b"}', 3: "Done so."}
    content = [
        {**block, "input": json.loads(deltas[at])} if block["type"] == "tool_use" else text(deltas[at])
        for at, block in enumerate(begun)
    ]
    results = [{"type": "tool_result", "tool_use_id": begun[at]["id"], "content": "ok"} for at in (1, 2)]
    ask(gateway, base, [user("hi"), {"role": "assistant", "content": content}, user(results)], tools=[EDIT])
    assert tree(gateway.steps(uid_of(base))) == [None, 0]


@pytest.mark.parametrize("display", ["summarized", "omitted"])
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_comes_back_as_the_tokens_that_were_sampled(
    thinker: tuple[Running, Rollout], display: str, stream: bool
) -> None:
    gateway, rollout = thinker
    rollout.forget()
    rollout.script += [f"{THOUGHT}first", "<think>\nof something else\n</think>\n\nfirst", "last"]
    base = gateway.init()["base_url"]
    asked: Json = {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": display}}
    given = [post(gateway, base, [user("hi")], stream=stream, **asked) for _ in range(2)]
    content, _ = [_content(events(answer)) if stream else told(answer)["content"] for answer in given]
    thinking, said = content
    assert thinking["thinking"] == ("my secret" if display == "summarized" else "")
    assert thinking["signature"]
    assert said == text("first")
    ask(gateway, base, [user("hi"), {"role": "assistant", "content": content}, user("more")], **asked)
    assert "my secret" in prompt_of(rollout)
    steps = gateway.steps(uid_of(base))
    assert tree(steps) == [None, None, 0]  # of two that say the same, the one that thought so
    assert steps[2].prompt_ids.tolist() == rollout.orders[2]["prompt"]


def _content(found: list[Json]) -> list[Json]:
    """The blocks that events of text and reasoning amount to."""
    blocks: list[Json] = []
    for event in found:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            for name, value in event["delta"].items():
                if name != "type":
                    blocks[-1][name] += value
    return blocks


def test_thinking_is_the_template_s_option_where_it_has_one(
    thinker: tuple[Running, Rollout], gateway: Running, rollout: Rollout
) -> None:
    clever, other = thinker
    other.forget()
    for kind, closed in (("disabled", True), ("adaptive", False)):
        ask(clever, clever.init()["base_url"], [user("hi")], thinking={"type": kind})
        assert prompt_of(other).endswith("</think>\n\n") == closed
    base = gateway.init()["base_url"]
    messages = [user("hi")]
    for kind in ("disabled", "adaptive", "between_tools"):
        content = ask(gateway, base, messages, thinking={"type": kind})["content"]
        messages = [*messages, {"role": "assistant", "content": content}, user("more")]
    assert tree(gateway.steps(uid_of(base))) == [None, 0, 1]


def test_arguments_that_are_no_object_come_back_as_they_were(gateway: Running, rollout: Rollout) -> None:
    base = gateway.init()["base_url"]
    rollout.script += ['<tool_call>\n{"name": "Edit", "arguments": [1, 2]}\n</tool_call>', "ok"]
    (block,) = ask(gateway, base, [user("hi")], tools=[EDIT])["content"]
    assert block["input"] == {"_raw": [1, 2]}
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "no"}
    ask(gateway, base, [user("hi"), {"role": "assistant", "content": [block]}, user([result])], tools=[EDIT])
    assert tree(gateway.steps(uid_of(base))) == [None, 0]


# -- and back ----------------------------------------------------------------------------------------------------------

Change = Callable[[list[Json]], list[Json]]
#: What agents do to the blocks of an answer: `[text, Edit]`.
CHANGES: dict[str, Change] = {
    "defaults are filled in": lambda blocks: _with_input(blocks, replace_all=False),
    "defaults are filled in below": lambda blocks: _with_input(blocks, edits=[{"line": 1}, {"line": 2}]),
    "the call comes first": lambda blocks: blocks[::-1],
    "white space in a block of its own": lambda blocks: [text("\n\n"), *blocks, text("  ")],
    "text in two blocks": lambda blocks: [text("I wi"), text("ll."), *blocks[1:]],
    "cache control": lambda blocks: [{**block, "cache_control": {"type": "ephemeral"}} for block in blocks],
    "reasoning of somewhere else": lambda blocks: [{"type": "redacted_thinking", "data": "x"}, *blocks],
    "citations": lambda blocks: [{**blocks[0], "citations": None}, *blocks[1:]],
    "a caller": lambda blocks: [blocks[0], {**blocks[1], "caller": {"type": "direct"}}],
}


def _with_input(blocks: list[Json], **more: Any) -> list[Json]:
    found = copy.deepcopy(blocks)
    found[1]["input"] = {**more, **found[1]["input"], **({"edits": more["edits"]} if "edits" in more else {})}
    return found


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_answer_counts_as_the_same_however_an_agent_sends_it_back(
    gateway: Running, rollout: Rollout, change: Change
) -> None:
    base = gateway.init()["base_url"]
    rollout.script += [f"I will.\n{called('Edit', path='a', edits=[{}, {'line': 2}])}", "done"]
    content = ask(gateway, base, [user("hi")], tools=[EDIT])["content"]
    result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "ok"}
    ask(gateway, base, [user("hi"), {"role": "assistant", "content": change(content)}, user([result])], tools=[EDIT])
    assert tree(gateway.steps(uid_of(base))) == [None, 0]


def test_an_argument_that_is_no_default_begins_a_branch(gateway: Running, rollout: Rollout) -> None:
    base = gateway.init()["base_url"]
    rollout.script += [called("Edit", path="a"), "done"]
    (call,) = ask(gateway, base, [user("hi")], tools=[EDIT])["content"]
    call["input"]["replace_all"] = True
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}
    ask(gateway, base, [user("hi"), {"role": "assistant", "content": [call]}, user([result])], tools=[EDIT])
    assert tree(gateway.steps(uid_of(base))) == [None, None]


# -- trouble in a stream -----------------------------------------------------------------------------------------------


def test_an_error_after_the_first_token_is_the_stream_s_last_event(folder: Path) -> None:
    with scripted(folder) as rollout, in_front(rollout, folder) as gateway:
        gate = rollout.gate()
        gate.open()
        rollout.script.append(Say("a long answer", after=(3, gate), then=breaks))
        base = gateway.init()["base_url"]
        found = events(post(gateway, base, [user("hi")], stream=True))
        assert found[0]["type"] == "message_start"
        assert found[-1]["type"] == "error"
        assert found[-1]["error"]["type"] in ("api_error", "overloaded_error")
        assert gateway.steps(uid_of(base)) == []
