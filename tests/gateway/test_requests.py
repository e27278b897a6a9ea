"""What agents may ask for: what goes upstream of it, what comes back, and what is refused, with nothing recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.kit import Running, forced_calls, told
from tests.gateway.rollout import (
    Rollout,
    Say,
    answers,
    chat,
    error_of,
    events_of,
    in_front,
    log_probs_of,
    uid_of,
    user,
)
from tests.tokens.kit import LOOK_UP

EXPLICIT = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
CONTEXT = 4096


@pytest.fixture(scope="module")
def shared(shared: Rollout) -> Rollout:
    shared.max_model_len = CONTEXT
    return shared


@pytest.fixture(scope="module")
def gateway(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder) as found:
        yield found


# -- what goes upstream ------------------------------------------------------------------------------------------------


def test_every_parameter_goes_upstream_explicitly_and_is_recorded(
    gateway: Running, rollout: Rollout, base: str
) -> None:
    told(chat(gateway, base, "hi"))
    (order,) = rollout.orders
    assert {name: order[name] for name in EXPLICIT} == EXPLICIT
    assert order["max_tokens"] == CONTEXT - len(order["prompt"])
    assert (order["model"], order["return_token_ids"], order["logprobs"]) == ("scripted", True, 1)
    assert rollout.end in order["stop_token_ids"]
    (step,) = gateway.steps(uid_of(base))
    assert step.sampling is not None
    assert set(EXPLICIT) | {"max_tokens"} <= set(step.sampling)
    assert step.sampling == {name: order[name] for name in step.sampling}


def test_what_the_agent_asks_for_is_what_is_sampled_with(gateway: Running, rollout: Rollout, base: str) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "seed": 7,
        "max_tokens": 33,
        "min_tokens": 2,
        "stop": ["END", "\n\n"],
        "logit_bias": {"12": -100, "13": 5},
    }
    told(chat(gateway, base, "hi", **given))
    (order,) = rollout.orders
    assert {name: order[name] for name in given} == given
    (step,) = gateway.steps(uid_of(base))
    assert step.sampling is not None
    assert {name: step.sampling[name] for name in given} == given


def test_null_is_not_given(gateway: Running, rollout: Rollout, base: str) -> None:
    names = [
        "temperature",
        "stop",
        "seed",
        "max_tokens",
        "tools",
        "tool_choice",
        "n",
        "stream",
        "logprobs",
        "top_logprobs",
    ]
    told(chat(gateway, base, "hi", **dict.fromkeys([*names, "response_format", "logit_bias", "stream_options"])))
    (order,) = rollout.orders
    assert {name: order[name] for name in EXPLICIT} == EXPLICIT
    assert not {"stop", "seed", "logit_bias", "n", "stream", "structured_outputs"} & set(order)


def test_a_stop_string_may_stand_alone(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script.append(Say("one END", shown="one ", ended=False, stop_reason="END"))
    found = told(chat(gateway, base, "hi", stop="END"))["choices"][0]
    assert rollout.orders[0]["stop"] == ["END"]
    assert (found["message"]["content"], found["finish_reason"]) == ("one ", "stop")
    (step,) = gateway.steps(uid_of(base))
    assert (step.finish_reason, step.metadata["stop_reason"], step.quarantined) == ("stop", "END", None)
    assert step.response_ids.tolist() == rollout.vocabulary.encode("one END")


def test_unknown_fields_are_passed_on(gateway: Running, rollout: Rollout, base: str) -> None:
    given = {"priority": 3, "bad_words": ["x"], "some_new_thing": {"a": [1]}, "user": "me"}
    told(chat(gateway, base, "hi", **given))
    assert {name: rollout.orders[0][name] for name in given} == given


@pytest.mark.parametrize("name", ["prompt", "request_id", "return_token_ids", "skip_special_tokens"])
def test_an_agents_field_cannot_change_what_the_gateway_needs(
    gateway: Running, rollout: Rollout, base: str, name: str
) -> None:
    chat(gateway, base, "hi", **{name: True})
    (order,) = rollout.orders
    assert order["return_token_ids"] is True
    assert order["skip_special_tokens"] is False
    assert isinstance(order["prompt"], list)
    assert isinstance(order["request_id"], str)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"type": "json_object"}, {"json_object": True}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
            {"json": {"type": "object"}},
        ),
        ({"type": "text"}, None),
    ],
)
def test_response_format_becomes_what_the_server_honours(
    gateway: Running, rollout: Rollout, base: str, given: Any, sent: Any
) -> None:
    told(chat(gateway, base, "hi", response_format=given))
    assert rollout.orders[0].get("structured_outputs") == sent
    assert "response_format" not in rollout.orders[0]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_a_tool_that_must_be_called_is_a_grammar_upstream(
    gateway: Running, rollout: Rollout, base: str, choice: Any
) -> None:
    rollout.script.append('<tool_call>\n{"name": "look_up", "arguments": {"q": "x", "deep": true}}\n</tool_call>')
    found = told(chat(gateway, base, "hi", tools=[LOOK_UP], tool_choice=choice))["choices"][0]
    assert found["finish_reason"] == "tool_calls"
    (call,) = found["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"q": "x", "deep": True}
    (begun,) = forced_calls(rollout.orders[0])
    assert begun.split() == ["<tool_call>", '{"name":', '"look_up",', '"arguments":']
    assert not {"tools", "tool_choice"} & set(rollout.orders[0])
    (step,) = gateway.steps(uid_of(base))
    assert step.sampling is not None
    assert "structured_outputs" in step.sampling


def test_tool_choice_none_shows_calls_as_text(gateway: Running, rollout: Rollout, base: str) -> None:
    said = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
    rollout.script.append(said)
    found = told(chat(gateway, base, "hi", tools=[LOOK_UP], tool_choice="none"))["choices"][0]
    assert "tool_calls" not in found["message"]
    assert found["message"]["content"] == said
    assert "structured_outputs" not in rollout.orders[0]


def test_with_parallel_calls_off_one_call_is_shown(gateway: Running, rollout: Rollout, base: str) -> None:
    one = '<tool_call>\n{"name": "look_up", "arguments": {"q": "%s"}}\n</tool_call>'
    both = f"{one % 'a'}\n{one % 'b'}"
    rollout.script += [both, both, both]
    asked = {"tools": [LOOK_UP], "parallel_tool_calls": False}
    assert len(told(chat(gateway, base, "hi", **asked))["choices"][0]["message"]["tool_calls"]) == 1
    chunks = events_of(chat(gateway, base, "ho", stream=True, **asked).text)
    new = [call for c in chunks if c["choices"] for call in c["choices"][0]["delta"].get("tool_calls", ())]
    assert [call["index"] for call in new if "id" in call] == [0]
    assert "".join(call["function"]["arguments"] for call in new) == '{"q": "a"}'
    assert len(told(chat(gateway, base, "hi", tools=[LOOK_UP]))["choices"][0]["message"]["tool_calls"]) == 2


# -- lengths -----------------------------------------------------------------------------------------------------------


def test_the_response_length_is_default_and_cap_of_max_tokens(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder, response_length=8) as gateway:
        base = gateway.init()["base_url"]
        told(chat(gateway, base, "hi"))
        told(chat(gateway, base, "hi", max_tokens=100))
        told(chat(gateway, base, "hi", max_tokens=5))
        told(chat(gateway, base, "hi", max_completion_tokens=3, max_tokens=100))
        told(gateway.post(f"{base}/v1/completions", {"prompt": "x"}))
        assert [order["max_tokens"] for order in rollout.orders] == [8, 8, 5, 3, 8]
        assert [step.sampling["max_tokens"] for step in gateway.steps(uid_of(base)) if step.sampling] == [8, 8, 5, 3, 8]


def test_an_answer_is_cut_at_max_tokens_and_says_so(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script.append("a long answer that goes on")
    found = told(chat(gateway, base, "hi", max_tokens=3))
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 3
    (step,) = gateway.steps(uid_of(base))
    assert (len(step.response_ids), step.finish_reason) == (3, "length")


def test_a_prompt_that_is_too_long_is_refused_never_cut(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder, prompt_length=64) as gateway:
        base = gateway.init()["base_url"]
        for stream in (False, True):
            found = error_of(chat(gateway, base, "word " * 100, stream=stream), 400)
            assert (found["code"], found["type"]) == ("context_length_exceeded", "invalid_request_error")
            assert "64" in found["message"]
        text = {"prompt": "word " * 100}
        assert error_of(gateway.post(f"{base}/v1/completions", text), 400)["code"] == "context_length_exceeded"
        ids = {"prompt": [5] * 65}
        assert error_of(gateway.post(f"{base}/v1/completions", ids), 400)["code"] == "context_length_exceeded"
        assert rollout.orders == []
        assert gateway.steps(uid_of(base)) == []
        told(gateway.post(f"{base}/v1/completions", {"prompt": [5] * 64}))


def test_a_prompt_past_the_models_context_is_refused(gateway: Running, rollout: Rollout, base: str) -> None:
    ids = {"prompt": [5] * CONTEXT, "max_tokens": 1}
    assert error_of(gateway.post(f"{base}/v1/completions", ids), 400)["code"] == "context_length_exceeded"
    told(gateway.post(f"{base}/v1/completions", {"prompt": [5] * (CONTEXT - 3), "max_tokens": 100}))
    assert rollout.orders[0]["max_tokens"] == 3


# -- channels ----------------------------------------------------------------------------------------------------------


def test_a_channel_forces_and_refuses_parameters(rollout: Rollout, folder: Path) -> None:
    rules = {"sampling": ["train:temperature=1,top_p=1", "train:top_k=-1"], "refuse": ["val:temperature=0"]}
    with in_front(rollout, folder, **rules) as gateway:
        train, val = gateway.init()["base_url"], gateway.init(channel="val")["base_url"]
        told(chat(gateway, train, "hi", temperature=0, top_p=0.5, top_k=3, seed=1))
        told(chat(gateway, val, "hi", temperature=0.3, top_p=0.5))
        found = error_of(chat(gateway, val, "hi", temperature=0), 400)
        assert (found["code"], found["param"]) == ("parameter_refused", "temperature")
        sent = [{n: o.get(n) for n in ("temperature", "top_p", "top_k", "seed")} for o in rollout.orders]
        assert sent == [
            {"temperature": 1, "top_p": 1, "top_k": -1, "seed": 1},
            {"temperature": 0.3, "top_p": 0.5, "top_k": -1, "seed": None},
        ]
        (step,) = gateway.steps(uid_of(train))
        assert step.sampling is not None
        assert step.sampling["temperature"] == 1


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_a_chat_answers_openais_object_and_nothing_of_ours(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script.append("hello")
    answer = chat(gateway, base, "hi", model="any/name")
    found = told(answer)
    assert set(found) == {"id", "object", "created", "model", "choices", "usage"}
    assert (found["object"], found["model"]) == ("chat.completion", "any/name")
    (choice,) = found["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "hello", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    (step,) = gateway.steps(uid_of(base))
    asked, sampled = len(step.prompt_ids), len(step.response_ids)
    assert found["usage"] == {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled}
    assert answer.headers["x-headrace-call"] == step.call_id
    assert answer.headers["x-headrace-policy-version"] == str(step.policy_version)
    assert (step.metadata["model"], step.metadata["server"]) == ("any/name", rollout.address)
    assert set(step.metadata["timings"]) == {"first_token_s", "total_s"}


def test_a_stream_says_the_same_in_openais_events(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script += ["größer 🙂 than that", "größer 🙂 than that"]
    whole = told(chat(gateway, base, "hi"))
    answer = chat(gateway, base, "hi", stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-headrace-call"]
    chunks = events_of(answer.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == "größer 🙂 than that"
    assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    one, other = gateway.steps(uid_of(base))
    assert one.response_ids.tolist() == other.response_ids.tolist()
    assert rollout.orders[1]["stream"] is True


def test_a_stream_comes_token_by_token(gateway: Running, rollout: Rollout, base: str) -> None:
    gate = rollout.gate()
    rollout.script.append(Say("one two three", after=(3, gate)))
    body = {"model": "m", "messages": [user("hi")], "stream": True}
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=240, trust_env=False) as answer:
        lines = answer.iter_lines()
        seen = ""
        while "on" not in seen:
            line = next(lines)
            if line.startswith("data: "):
                seen += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        assert "three" not in seen
        gate.open()
        assert "data: [DONE]" in list(lines)


def test_log_probs_are_answered_when_asked_for(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script += ["hello", "hello"]
    found = told(chat(gateway, base, "hi", logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    ids = [*rollout.vocabulary.encode("hello"), rollout.end]
    assert [entry["logprob"] for entry in found] == log_probs_of(ids)
    assert [entry["token"] for entry in found] == [rollout.vocabulary.decode([token]) for token in ids]
    assert bytes(found[0]["bytes"]).decode() == found[0]["token"]
    assert [top["logprob"] for top in found[0]["top_logprobs"]] == [-0.5, -1.5]
    assert rollout.orders[0]["logprobs"] == 2
    chunks = events_of(chat(gateway, base, "hi", logprobs=True, stream=True).text)
    streamed = [c["choices"][0]["logprobs"]["content"] for c in chunks if c["choices"][0].get("logprobs")]
    assert [entry["logprob"] for part in streamed for entry in part] == log_probs_of(ids)


def test_completions_answer_log_probs_as_completions_do(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script += ["hello", "hello"]
    body = {"prompt": "say", "logprobs": 1, "max_tokens": 50}
    found = told(gateway.post(f"{base}/v1/completions", body))["choices"][0]
    ids = [*rollout.vocabulary.encode("hello"), rollout.end]
    assert found["logprobs"]["token_logprobs"] == log_probs_of(ids)
    assert set(found["logprobs"]) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert found["text"] == "hello"
    streamed = events_of(gateway.post(f"{base}/v1/completions", {**body, "stream": True}).text)
    values = [v for c in streamed if c["choices"][0]["logprobs"] for v in c["choices"][0]["logprobs"]["token_logprobs"]]
    assert values == log_probs_of(ids)


def test_token_ids_are_shown_when_asked_for(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script += ["hello", "hello", "hello"]
    found = told(chat(gateway, base, "hi", return_token_ids=True))
    (step,) = gateway.steps(uid_of(base))
    assert found["prompt_token_ids"] == step.prompt_ids.tolist()
    assert found["choices"][0]["token_ids"] == step.response_ids.tolist()
    chunks = events_of(chat(gateway, base, "hi", return_token_ids=True, stream=True).text)
    assert chunks[0]["prompt_token_ids"] == step.prompt_ids.tolist()
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", ())] == step.response_ids.tolist()
    body = {"prompt": [5, 6, 7], "return_token_ids": True}
    plain = told(gateway.post(f"{base}/v1/completions", body))["choices"][0]
    assert plain["prompt_token_ids"] == [5, 6, 7]
    assert plain["token_ids"] == step.response_ids.tolist()


def test_several_prompts_of_a_completion_are_several_steps(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.reply = lambda asked: f"answer to {len(asked['prompt'])}"
    body = {"prompt": [[5], [5, 6]], "n": 2, "max_tokens": 50}
    for stream in (False, True):
        answer = gateway.post(f"{base}/v1/completions", {**body, "stream": stream})
        chunks = events_of(answer.text) if stream else [told(answer)]
        texts = ["", "", "", ""]
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == ["answer to 1", "answer to 1", "answer to 2", "answer to 2"]
    steps = gateway.steps(uid_of(base))
    assert [len(step.prompt_ids) for step in steps] == [1, 1, 2, 2] * 2
    assert [step.step_index for step in steps] == list(range(8))


# -- what is refused ---------------------------------------------------------------------------------------------------

MESSAGE = {"role": "user", "content": "hi"}
BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"7",
    b'"x"',
    b"\xff\xfe",
    b'{"messages": [',
    b"{'messages': 1}",
    b"[" * 100_000,
]
BAD_MESSAGES: list[Any] = [
    None,
    [],
    {},
    "hi",
    [None],
    ["hi"],
    [{}],
    [{"role": "wizard", "content": "x"}],
    [{"role": 7, "content": "x"}],
    [{"role": ["user"], "content": "x"}],
    [{"role": "user", "content": 7}],
    [{"role": "user", "content": {"text": "x"}}],
    [{"role": "user", "content": [7]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}]}],
    [{"role": "user", "content": [{"type": "text", "text": None}]}],
    [{"role": "user", "content": [{"type": "file", "file": {}}]}],
    [MESSAGE, {"role": "assistant", "tool_calls": 7}],
    [MESSAGE, {"role": "assistant", "tool_calls": [7]}],
    [MESSAGE, {"role": "assistant", "tool_calls": [{"function": {"name": None}}]}],
    [MESSAGE, {"role": "tool", "tool_call_id": 7, "content": "x"}],
]
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 1000}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": []}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": "2"}, "n"),
    ({"n": True}, "n"),
    ({"stop": 7}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [7]}, "stop"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 7}, "stream_options"),
    ({"model": 7}, "model"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 100}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": {}}, "tools"),
    ({"tools": [7]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 7}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": 7}, "tool_choice"),
    ({"tools": [LOOK_UP], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"functions": [{}]}, "functions"),
    ({"echo": True}, "echo"),
    ({"best_of": 3}, "best_of"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"chat_template": "x"}, "chat_template"),
    ({"continue_final_message": True}, "continue_final_message"),
]
BAD_PROMPTS: list[Any] = [
    None,
    "",
    [],
    [[]],
    [None],
    [1, "x"],
    [-1],
    [2**31],
    [2**40],
    [10**6],
    [[1], "x"],
    {},
    7,
    True,
]


@pytest.fixture
def nothing_recorded(gateway: Running, rollout: Rollout, base: str) -> Iterator[str]:
    """The base_url of a trajectory that must be empty when the test ends, with nothing asked upstream."""
    yield base
    assert gateway.steps(uid_of(base)) == []
    assert rollout.orders == []


@pytest.mark.parametrize("body", BAD_BODIES)
@pytest.mark.parametrize("route", ["chat/completions", "completions", "responses"])
def test_a_body_that_is_no_object_is_400(gateway: Running, nothing_recorded: str, route: str, body: bytes) -> None:
    found = error_of(gateway.post(f"{nothing_recorded}/v1/{route}", body), 400)
    assert found["type"] == "invalid_request_error"


@pytest.mark.parametrize("messages", BAD_MESSAGES)
def test_messages_that_cannot_be_read_are_400(gateway: Running, nothing_recorded: str, messages: Any) -> None:
    answer = gateway.post(f"{nothing_recorded}/v1/chat/completions", {"model": "m", "messages": messages})
    found = error_of(answer, 400)
    assert "messages" in found["message"]
    assert found["param"] == "messages"


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda given: str(given)[:60])
def test_a_field_that_cannot_be_taken_is_named(
    gateway: Running, nothing_recorded: str, fields: dict[str, Any], param: str
) -> None:
    found = error_of(chat(gateway, nothing_recorded, "hi", **fields), 400)
    assert found["type"] == "invalid_request_error"
    assert param in found["message"]
    assert found["param"] == param


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=str)
def test_a_prompt_that_cannot_be_read_is_400(gateway: Running, nothing_recorded: str, prompt: Any) -> None:
    found = error_of(gateway.post(f"{nothing_recorded}/v1/completions", {"prompt": prompt}), 400)
    assert found["param"] == "prompt"


@pytest.mark.parametrize("depth", [300, 700, 100_000])
def test_json_nested_past_all_measure_is_no_traceback(
    gateway: Running, rollout: Rollout, base: str, depth: int
) -> None:
    deep = "[" * depth + "]" * depth
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    messages = [MESSAGE, {"role": "assistant", "tool_calls": [call]}, result]
    assert chat(gateway, base, messages).status_code in (200, 400)
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"x": {deep}}}}}}}'
    body = f'{{"messages": [{json.dumps(MESSAGE)}], "tools": [{tool}]}}'
    assert gateway.post(f"{base}/v1/chat/completions", body.encode()).status_code in (200, 400)


DEEP = {
    "an unknown field": ("chat/completions", '"messages": [{"role": "user", "content": "hi"}], "x": DEEP'),
    "a schema": (
        "chat/completions",
        '"messages": [{"role": "user", "content": "hi"}], "response_format": '
        '{"type": "json_schema", "json_schema": {"name": "a", "schema": {"x": DEEP}}}',
    ),
    "a format": ("chat/completions", '"messages": [{"role": "user", "content": "hi"}], "response_format": DEEP'),
    "input": ("responses", '"input": DEEP'),
    "a part of input": ("responses", '"input": [{"role": "user", "content": DEEP}]'),
    "a text's schema": (
        "responses",
        '"input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"x": DEEP}}}',
    ),
    "a prompt": ("completions", '"prompt": DEEP'),
    "a message's content": ("messages", '"max_tokens": 5, "messages": [{"role": "user", "content": DEEP}]'),
}


@pytest.mark.parametrize("depth", [100, 300, 1_000, 5_000])
@pytest.mark.parametrize("where", DEEP)
def test_what_nests_too_deep_anywhere_is_400_and_not_sampled(
    gateway: Running, rollout: Rollout, base: str, where: str, depth: int
) -> None:
    route, fields = DEEP[where]
    for deep in ("[" * depth + "1" + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        body = f"{{{fields.replace('DEEP', deep)}}}".encode()
        assert gateway.post(f"{base}/v1/{route}", body).status_code == 400
    sampling = {"prompt_ids": [5], "sampling_params": {"x": "DEEP"}}
    assert gateway.post("/generate", json.dumps(sampling).replace('"DEEP"', deep).encode()).status_code == 400
    assert not rollout.orders


@pytest.mark.parametrize("streamed", [False, True])
def test_a_body_past_the_limit_is_413(rollout: Rollout, folder: Path, streamed: bool) -> None:
    with in_front(rollout, folder, max_body_mb=0.01) as gateway:
        base = gateway.init()["base_url"]
        data = json.dumps({"messages": [user("x" * 20_000)]}).encode()
        parts = (data[at : at + 1000] for at in range(0, len(data), 1000))
        with httpx.Client(timeout=240, trust_env=False) as http:
            answer = http.post(f"{base}/v1/chat/completions", content=parts if streamed else data)
        assert "0.01 MB" in error_of(answer, 413)["message"]
        assert gateway.steps(uid_of(base)) == []
        told(chat(gateway, base, "x" * 1000))


def test_what_the_server_refuses_is_told_with_its_words(gateway: Running, rollout: Rollout, base: str) -> None:
    fault = {"error": {"message": "logit_bias: token 9 is out of vocabulary", "param": "logit_bias", "code": 400}}
    for stream in (False, True):
        rollout.script.append(answers(400, fault))
        found = error_of(chat(gateway, base, "hi", stream=stream), 400)
        assert "out of vocabulary" in found["message"]
        assert found["param"] == "logit_bias"
    assert gateway.steps(uid_of(base)) == []


def test_nothing_is_counted_as_a_step_that_was_refused(gateway: Running, rollout: Rollout, base: str) -> None:
    before = gateway.counted("steps").get("train", 0)
    error_of(chat(gateway, base, "hi", temperature=-1), 400)
    assert gateway.counted("steps").get("train", 0) == before
    assert gateway.counted("calls")["chat/completions"]["400"] >= 1
