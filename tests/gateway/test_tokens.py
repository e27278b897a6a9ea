"""Exact tokens over HTTP: what is recorded is what the server consumed and sampled, turn by turn, branch by branch.

The rollout server is scripted and keeps what it was asked; nothing here asks the gateway what the tokens were.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.kit import Running, tokens, told, tree
from tests.gateway.rollout import Rollout, Say, chat, events_of, in_front, log_probs_of, scripted, user
from tests.tokens import models
from tests.tokens.kit import FORMATS, LOOK_UP, STOPS, sampled, spoken
from tests.tokens.test_conversations import THIRTY_TURNS, answer_of, mangled, turns

from headrace.tokens import read_messages

Json = dict[str, Any]


class Place:
    """A gateway in front of a scripted server, with one model's tokenizer and template."""

    def __init__(self, name: str, gateway: Running, rollout: Rollout) -> None:
        self.name, self.gateway, self.rollout = name, gateway, rollout
        self.begun = 0

    def begin(self, **given: Any) -> tuple[str, str, str]:
        """A new trajectory in a channel of its own, so that what is counted is counted of it: base, uid, channel."""
        self.begun += 1
        self.rollout.forget()
        channel = f"{self.name}-{self.begun}"
        made = self.gateway.init(channel=channel, **given)
        return made["base_url"], made["trajectory_uid"], channel

    def causes(self, channel: str) -> dict[str, int]:
        return dict(self.gateway.counted("prompts").get(channel, {}))

    def holds(self, uid: str, said: list[list[int]]) -> None:
        """The recorded steps are the orders that the server got and what it sampled to them."""
        steps = self.gateway.steps(uid)
        assert [step.step_index for step in steps] == list(range(len(said)))
        assert [step.prompt_ids.tolist() for step in steps] == [order["prompt"] for order in self.rollout.orders]
        assert [step.response_ids.tolist() for step in steps] == said
        assert [s.rollout_log_probs.tolist() for s in steps] == [log_probs_of(ids) for ids in said]
        assert [step.quarantined for step in steps] == [None] * len(said)


@pytest.fixture(scope="module", params=models.MODELS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    name = request.param
    with (
        Rollout(models.vocabulary(name), STOPS[name]) as rollout,
        in_front(rollout, models.folder(name)) as gateway,
    ):
        yield Place(name, gateway, rollout)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Place]:
    with scripted(folder) as rollout, in_front(rollout, folder) as gateway:
        yield Place("tiny", gateway, rollout)


# -- a conversation ----------------------------------------------------------------------------------------------------


def assembled(text: str) -> Json:
    """The message that a client puts together from a stream."""
    found: Json = {"role": "assistant", "content": "", "tool_calls": []}
    for chunk in events_of(text):
        delta = chunk["choices"][0]["delta"]
        found["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            found["reasoning_content"] = found.get("reasoning_content", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls", ()):
            if call.pop("index") == len(found["tool_calls"]):
                found["tool_calls"].append(call)
            else:
                found["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    if not found["tool_calls"]:
        del found["tool_calls"]
    return found


def ask(gateway: Running, base: str, messages: list[Json], *, stream: bool, **fields: Any) -> Json:
    """The message that a call answers, in whichever way it is asked for."""
    answer = chat(gateway, base, messages, stream=stream, **fields)
    assert answer.status_code == 200, answer.text
    if stream:
        return assembled(answer.text)
    found: Json = answer.json()["choices"][0]["message"]
    found.pop("reasoning", None)
    return found


def converse(place: Place, script: list[Json], *, system: bool, tools: bool, thinking: bool) -> list[Json]:
    """Plays a conversation whose every second answer is streamed; the steps are held to the server's own account."""
    name, rollout = place.name, place.rollout
    base, uid, channel = place.begin()
    renderer = models.renderer(name)
    asked: Json = {"tools": [LOOK_UP]} if tools else {}
    if name == "qwen3":
        asked["chat_template_kwargs"] = {"enable_thinking": thinking}
    messages: list[Json] = [{"role": "system", "content": "Be brief."}] if system else []
    messages.append(user("Hello, 世界"))
    said: list[list[int]] = []
    for number, turn in enumerate(script):
        content, reasoning, calls = answer_of(name, number, turn, tools=tools, thinking=thinking)
        text = spoken(FORMATS[name], content, reasoning, calls)
        ended = not (turn["cut"] and text)
        ids = sampled(renderer, text, turn["cuts"], None)
        rollout.script.append(Say(ids=ids, ended=ended))
        said.append([*ids, rollout.end] if ended else ids)
        answer = ask(place.gateway, base, messages, stream=number % 2 == 1, **asked)
        made = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in answer.get("tool_calls", ())]
        assert made == [(call.name, call.arguments) for call in calls]
        assert (answer["content"] or "").strip() == content.strip()
        results = zip(answer.get("tool_calls", ()), turn["results"], strict=False)
        follow = [{"role": "tool", "tool_call_id": call["id"], "content": result} for call, result in results]
        messages = [*messages, mangled(answer, turn["mangle"]), *(follow or [user(turn["user"])])]
    place.holds(uid, said)
    steps = place.gateway.steps(uid)
    for before, step in pairwise(steps):
        assert step.prompt_ids.tolist()[: len(tokens(before))] == tokens(before), f"step {step.step_index}"
    causes = place.causes(channel)
    assert causes == {"first": 1, **({"extended": len(script) - 1} if script[1:] else {})}
    return messages


@pytest.mark.parametrize("thinking", [True, pytest.param(False, marks=pytest.mark.long)])
def test_thirty_turns_are_one_branch_bit_for_bit(place: Place, thinking: bool) -> None:
    converse(place, THIRTY_TURNS, system=True, tools=True, thinking=thinking)


@settings(max_examples=4)
@given(st.lists(turns(), min_size=2, max_size=6), st.booleans(), st.booleans(), st.booleans())
def test_whatever_is_said_every_prompt_begins_with_what_came_before(
    place: Place, script: list[Json], system: bool, tools: bool, thinking: bool
) -> None:
    converse(place, script, system=system, tools=tools, thinking=thinking)


# -- what a client may do to an answer ---------------------------------------------------------------------------------


def test_an_answer_counts_as_the_same_however_an_sdk_sends_it_back(tiny: Place) -> None:
    call = '<tool_call>\n{"name": "look_up", "arguments": {"q": "x", "deep": true, "n": 1.0}}\n</tool_call>'
    for change in (
        lambda m: m.update(content=None),
        lambda m: m.pop("content"),
        lambda m: m.update(content=""),
        lambda m: m.update(content=[]),
        lambda m: m.update(refusal=None, audio=None, annotations=[], function_call=None),
        lambda m: m["tool_calls"][0].update(index=0),
        lambda m: m["tool_calls"][0]["function"].update(arguments={"n": 1, "deep": True, "q": "x"}),
        lambda m: m["tool_calls"][0]["function"].update(arguments='{"deep":true,\n "n": 1, "q":"\\u0078"}'),
        lambda m: m["tool_calls"][0].update(id="renamed"),
    ):
        base, uid, channel = tiny.begin()
        tiny.rollout.script += [call, "done"]
        first = [user("hi")]
        answer = ask(tiny.gateway, base, first, stream=False, tools=[LOOK_UP])
        sent = copy.deepcopy(answer)
        change(sent)
        result = {"role": "tool", "tool_call_id": sent["tool_calls"][0]["id"], "content": "found"}
        ask(tiny.gateway, base, [*first, sent, result], stream=False, tools=[LOOK_UP])
        assert tiny.causes(channel) == {"first": 1, "extended": 1}, sent
        assert tree(tiny.gateway.steps(uid)) == [None, 0]


def test_what_a_client_loses_beside_its_calls_ids_is_still_what_was_sampled(tiny: Place) -> None:
    """Text that was dropped, and an integer as JavaScript rounds it, at every turn; streamed and whole."""
    base, uid, channel = tiny.begin()
    large = 1234567890123456789
    call = f'<tool_call>\n{{"name": "look_up", "arguments": {{"q": "x", "n": {large}}}}}\n</tool_call>'
    messages: list[Json] = [user("hi")]
    for number in range(4):
        tiny.rollout.script.append(f"Let me see, {number}.\n{call}")
        answer = ask(tiny.gateway, base, messages, stream=number % 2 == 1, tools=[LOOK_UP])
        (made,) = answer["tool_calls"]
        assert json.loads(made["function"]["arguments"])["n"] == large
        made["function"]["arguments"] = made["function"]["arguments"].replace(str(large), "1234567890123456800")
        answer["content"] = None
        messages += [answer, {"role": "tool", "tool_call_id": made["id"], "content": "found"}]
    assert tiny.causes(channel) == {"first": 1, "extended": 3}
    steps = tiny.gateway.steps(uid)
    assert tree(steps) == [None, 0, 1, 2]
    for before, step in pairwise(steps):
        assert step.prompt_ids.tolist()[: len(tokens(before))] == tokens(before)


# -- branches ----------------------------------------------------------------------------------------------------------


def test_two_sub_agents_and_a_compaction_give_the_right_tree(tiny: Place) -> None:
    base, uid, channel = tiny.begin()
    tiny.rollout.reply = lambda asked: f"answer {len(tiny.rollout.orders)}"

    def say(messages: list[Json]) -> list[Json]:
        return [*messages, ask(tiny.gateway, base, messages, stream=False)]

    main = say([{"role": "system", "content": "You lead."}, user("task")])  # 0
    one = say([{"role": "system", "content": "You search."}, user("find a")])  # 1
    two = say([{"role": "system", "content": "You search."}, user("find b")])  # 2
    one = say([*one, user("more a")])  # 3
    main = say([*main, user("a says, b says")])  # 4
    two = say([*two, user("more b")])  # 5
    short = say([{"role": "system", "content": "You lead."}, user("summary of all so far")])  # 6
    say([*short, user("go on")])  # 7
    say([*main, user("and the old one too")])  # 8
    steps = tiny.gateway.steps(uid)
    assert tree(steps) == [None, None, None, 1, 0, 2, None, 6, 4]
    parents = tiny.gateway.pool.trajectory(uid).parents
    assert {at: found for at, found in parents.items() if found >= 0} == {3: 1, 4: 0, 5: 2, 7: 6, 8: 4}
    assert tiny.causes(channel) == {"first": 1, "new_conversation": 3, "extended": 5}


def test_each_cause_of_a_branch_is_counted(tiny: Place) -> None:
    base, uid, channel = tiny.begin()
    first = [{"role": "system", "content": "Be brief."}, user("hi")]
    answer = ask(tiny.gateway, base, first, stream=False)
    more = [*first, answer, user("more")]
    ask(tiny.gateway, base, first, stream=False)  # asked again
    ask(tiny.gateway, base, [user("another")], stream=False)
    ask(tiny.gateway, base, [{"role": "system", "content": "Be long."}, *more[1:]], stream=False)
    ask(tiny.gateway, base, more, stream=False, tools=[LOOK_UP])
    ask(tiny.gateway, base, more, stream=False, chat_template_kwargs={"x": 1})
    ask(tiny.gateway, base, [*first, {"role": "assistant", "content": "never said"}, user("more")], stream=False)
    ask(tiny.gateway, base, more, stream=False)
    assert tiny.causes(channel) == {
        "first": 1,
        "repeated": 1,
        "new_conversation": 1,
        "system_changed": 1,
        "tools_changed": 1,
        "options_changed": 1,
        "history_rewritten": 1,
        "extended": 1,
    }
    assert tree(tiny.gateway.steps(uid))[-1] in (0, 1)
    assert [step.metadata["cause"] for step in tiny.gateway.steps(uid)][-1] == "extended"


def test_the_choices_of_one_call_are_branches_of_one_node(tiny: Place) -> None:
    base, uid, _ = tiny.begin()
    tiny.rollout.script += ["root", Say(("left", "middle", "right")), "leaf", Say(("up", "down"))]
    first = [user("hi")]
    root = ask(tiny.gateway, base, first, stream=False)
    asked = [*first, root, user("choose")]
    found = told(chat(tiny.gateway, base, asked, n=3))
    assert [c["message"]["content"] for c in found["choices"]] == ["left", "middle", "right"]
    assert tiny.rollout.orders[1]["n"] == 3
    ask(tiny.gateway, base, [*asked, found["choices"][1]["message"], user("go on")], stream=False)
    streamed = events_of(chat(tiny.gateway, base, [user("both")], n=2, stream=True).text)
    texts = {0: "", 1: ""}
    for chunk in streamed:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == {0: "up", 1: "down"}
    steps = tiny.gateway.steps(uid)
    assert tree(steps) == [None, 0, 0, 0, 2, None, None]
    assert [step.step_index for step in steps] == list(range(7))
    assert len({step.call_id for step in steps}) == 7
    assert {tuple(step.prompt_ids.tolist()) for step in steps[1:4]} == {tuple(tiny.rollout.orders[1]["prompt"])}


def test_parallel_calls_never_share_or_skip_an_index(tiny: Place) -> None:
    base, uid, _ = tiny.begin()
    rollout = tiny.rollout
    root = ask(tiny.gateway, base, [user("hi")], stream=False)
    gate = rollout.gate()
    rollout.reply = lambda asked: Say(f"answer {len(asked['prompt'])}", at=gate)

    def call(number: int) -> int:
        messages = [user("hi"), root, user("x " * number)] if number % 2 else [user("y " * number)]
        body = {"messages": messages, "stream": number % 3 == 0}
        return httpx.post(f"{base}/v1/chat/completions", json=body, timeout=240, trust_env=False).status_code

    with ThreadPoolExecutor(24) as threads:
        calls = [threads.submit(call, number) for number in range(24)]
        rollout.until(lambda: len(rollout.orders) == 25)
        gate.open()
        assert [found.result(240) for found in calls] == [200] * 24
    steps = tiny.gateway.steps(uid)
    assert [step.step_index for step in steps] == list(range(25))
    assert sorted(order["prompt"] for order in rollout.orders) == sorted(step.prompt_ids.tolist() for step in steps)
    parents = tiny.gateway.pool.trajectory(uid).parents
    extended = [step.step_index for step in steps if step.metadata["cause"] == "extended"]
    assert len(extended) == 12
    assert {parents[index] for index in extended} == {0}


def test_trajectories_side_by_side_are_not_mixed(tiny: Place) -> None:
    tiny.rollout.forget()
    tiny.rollout.reply = lambda asked: f"heard {len(asked['prompt'])} tokens"
    made = [tiny.gateway.init(channel="aside") for _ in range(8)]
    start = threading.Barrier(8)

    def run(number: int) -> None:
        start.wait()
        messages: list[Json] = [user(f"I am {number}")]
        with httpx.Client(timeout=240, trust_env=False) as http:
            for turn in range(6):
                body = {"messages": messages, "model": "m"}
                answer = told(http.post(f"{made[number]['base_url']}/v1/chat/completions", json=body))
                messages += [answer["choices"][0]["message"], user(f"{number}, turn {turn}")]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, range(8)))
    for number, found in enumerate(made):
        steps = tiny.gateway.steps(found["trajectory_uid"])
        assert tree(steps) == [None, 0, 1, 2, 3, 4]
        assert f"I am {number}" in tiny.rollout.vocabulary.decode(steps[-1].prompt_ids)


# -- as the template would ---------------------------------------------------------------------------------------------


def test_with_history_template_a_stripped_thought_begins_a_branch() -> None:
    with (
        Rollout(models.vocabulary("qwen3"), STOPS["qwen3"]) as rollout,
        in_front(rollout, models.folder("qwen3"), history="template") as gateway,
    ):
        place = Place("template", gateway, rollout)
        base, uid, channel = place.begin()
        rollout.script += ["<think>\nhm\n</think>\n\nfirst", "<think>\nhm\n</think>\n\nsecond"]
        answer = ask(gateway, base, [user("hi")], stream=False)
        assert (answer["content"], answer["reasoning_content"]) == ("first", "hm")
        ask(gateway, base, [user("hi"), answer, user("more")], stream=False)
        assert place.causes(channel) == {"first": 1, "template_differs": 1}
        assert tree(gateway.steps(uid)) == [None, None]
        assert "hm" not in rollout.vocabulary.decode(rollout.orders[1]["prompt"])
        base, uid, channel = place.begin()
        plain = {"chat_template_kwargs": {"enable_thinking": False}}
        whole = models.renderer("qwen3").with_options({"enable_thinking": False})
        answer = ask(gateway, base, [user("hi")], stream=False, **plain)
        ask(gateway, base, [user("hi"), answer, user("more")], stream=False, **plain)
        rendered = whole.render(read_messages([user("hi"), answer, user("more")]), ())
        assert rollout.orders[1]["prompt"] == list(rendered)


@pytest.mark.parametrize("place", ["qwen3"], indirect=True)
def test_earlier_reasoning_stays_in_context_by_default(place: Place) -> None:
    base, uid, _ = place.begin()
    place.rollout.script += ["<think>\nmy secret\n</think>\n\nfirst", "second"]
    answer = ask(place.gateway, base, [user("hi")], stream=True)
    assert (answer["content"], answer["reasoning_content"]) == ("first", "my secret")
    answer.pop("reasoning_content")
    ask(place.gateway, base, [user("hi"), answer, user("more")], stream=False)
    assert "my secret" in place.rollout.vocabulary.decode(place.rollout.orders[1]["prompt"])
    assert tree(place.gateway.steps(uid)) == [None, 0]


# -- text completions --------------------------------------------------------------------------------------------------


def test_a_text_that_grows_continues_with_exact_tokens(place: Place) -> None:
    base, uid, channel = place.begin()
    rollout = place.rollout
    text, said = "Once upon", []
    for number, piece in enumerate([" a time", ", there was naïve 日本", " 🙂", "\n\nThe"]):
        # Cut in the middle of a word, so that no encoder would give these ids.
        half = len(piece) // 2
        ids = rollout.vocabulary.encode(piece[:half]) + rollout.vocabulary.encode(piece[half:])
        said.append(ids)
        rollout.script.append(Say(ids=ids, ended=False))
        body = {"prompt": text, "max_tokens": 64, "stream": number % 2 == 1}
        answer = place.gateway.post(f"{base}/v1/completions", body)
        if body["stream"]:
            found = "".join(chunk["choices"][0]["text"] for chunk in events_of(answer.text))
        else:
            found = told(answer)["choices"][0]["text"]
        assert found == piece
        text += found + f" and {number}"
    place.holds(uid, said)
    assert tree(place.gateway.steps(uid)) == [None, 0, 1, 2]
    assert place.causes(channel) == {"first": 1, "extended": 3}


def test_ids_that_grow_are_one_branch(tiny: Place) -> None:
    base, uid, channel = tiny.begin()
    for prompt in ([5, 6, 7], [8, 9]):
        found = told(tiny.gateway.post(f"{base}/v1/completions", {"prompt": prompt, "return_token_ids": True}))
        grown = [*prompt, *found["choices"][0]["token_ids"], 11]
        told(tiny.gateway.post(f"{base}/v1/completions", {"prompt": grown}))
    assert tree(tiny.gateway.steps(uid)) == [None, 0, None, 2]
    assert tiny.causes(channel) == {"first": 1, "extended": 2, "new_conversation": 1}


def test_ids_that_go_on_where_an_answer_was_cut_are_a_branch_that_may_be_trained_on(tiny: Place) -> None:
    """Nothing is new between the two answers, so that the second has no parent, or an earlier one."""
    base, uid, channel = tiny.begin()
    prompt, said = [5, 6, 7], []
    for piece, new in ((" there was", []), (" a fox", [11]), (" and", []), (" a hen", [])):
        ids = tiny.rollout.vocabulary.encode(piece)
        tiny.rollout.script.append(Say(ids=ids, ended=False))
        told(tiny.gateway.post(f"{base}/v1/completions", {"prompt": prompt, "max_tokens": 64}))
        said.append(ids)
        prompt = [*prompt, *ids, *new]
    tiny.holds(uid, said)
    assert tiny.causes(channel) == {"first": 1, "new_conversation": 1, "extended": 2}
    sampled = [sequence.tokens[sequence.loss_mask] for sequence in tiny.gateway.pool.trajectory(uid).sequences()]
    assert sorted(token for ids in sampled for token in ids.tolist()) == sorted(token for ids in said for token in ids)


# -- what becomes of it ------------------------------------------------------------------------------------------------


def test_a_long_episode_is_one_sequence_with_every_sampled_token_marked(tiny: Place) -> None:
    base, uid, channel = tiny.begin()
    tiny.rollout.reply = lambda asked: f"answer {len(tiny.rollout.orders)}"
    messages: list[Json] = [user("go")]
    for turn in range(5):
        messages = [*messages, ask(tiny.gateway, base, messages, stream=False), user(f"turn {turn}")]
    tiny.gateway.complete(uid, reward=1.0)
    batch = tiny.gateway.pool.fetch_batch(1, channel=channel, timeout=60)
    assert batch is not None
    (sequence,) = batch.sequences()
    steps = batch.groups[0].steps
    last = steps[-1]
    assert sequence.tokens.tolist() == tokens(last)
    assert sequence.tokens[sequence.loss_mask].tolist() == [
        token for step in steps for token in step.response_ids.tolist()
    ]
