"""A gateway in front of a real vLLM: what it records is what vLLM consumed and sampled.

A witness between the two keeps vLLM's answers; transformers computes the log-probs of every recorded token anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.engine.kit import Client, Json, Reference, gap
from tests.gateway.kit import Running, running_gateway, tokens, told, tree
from tests.matrix import crossed, usual
from tests.vllm.kit import TOLERANCE, TRIES, agree, reach
from tests.vllm.server import MAX_NUM_SEQS
from tests.vllm.test_chat import ANSWERS
from tests.vllm.test_control import running
from tests.vllm.witness import Witness, witnessed

from headrace import DataPool, Step

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Says a number.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 7}},
                "required": ["number"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "say",
            "parameters": {
                "type": "object",
                "properties": {"word": {"enum": ["higher", "lower"]}},
                "required": ["word"],
                "additionalProperties": False,
            },
        },
    },
]


#: Tokens of an answer that is stopped on its way: nearly all that the context has room for.
LONG = 2000
GO_ON: Any = {
    "messages": [{"role": "user", "content": "go on"}],
    "max_tokens": LONG,
    "model": "tiny",
    "extra_body": {"ignore_eos": True},
}
#: Calls that the gateway reads and vLLM does not, or takes for text; of one that is cut, it shows what there is.
MORE_LENIENT = {
    "a call without arguments",
    "a call and one that is none",
    "a call with arguments in a string",
    "a call that is cut",
}


@pytest.fixture(scope="session")
def watched(theirs: Client) -> Iterator[tuple[str, Witness]]:
    with witnessed(f"http://{theirs.host}") as found:
        yield found


@pytest.fixture
def witness(watched: tuple[str, Witness]) -> Witness:
    """What vLLM does during this test."""
    watched[1].forget()
    return watched[1]


@pytest.fixture(params=["completions", "generate"])
def gateway(
    request: pytest.FixtureRequest, watched: tuple[str, Witness], witness: Witness, folder: Path
) -> Iterator[Running]:
    """A gateway on an empty pool; it asks vLLM by either of its routes."""
    with DataPool() as pool, running_gateway(pool, watched[0], folder, wire=request.param) as found:
        yield found


class Agent:
    """One conversation by the real SDK, which sends back what it was told, as agents do."""

    def __init__(self, gateway: Running, *, stream: bool, **asked: Any) -> None:
        self.made = gateway.init()
        self.uid: str = self.made["trajectory_uid"]
        self.stream, self.asked = stream, asked
        self.messages: list[Any] = []
        self.last: Json = {}
        self.finish_reason: str | None = None
        self.client = openai.OpenAI(base_url=self.made["base_url"] + "/v1", api_key="none", max_retries=0, timeout=900)

    def says(self, text: str, **asked: Any) -> Json:
        self.messages.append({"role": "user", "content": text})
        return self.hears(**asked)

    def returns(self, call: Json, text: str, **asked: Any) -> Json:
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return self.hears(**asked)

    def hears(self, **asked: Any) -> Json:
        """The answer's message, which joins the conversation."""
        given = {"model": "tiny", "messages": self.messages, "max_tokens": 24, **self.asked, **asked}
        self.last = given
        completions: Any = self.client.chat.completions
        if self.stream:
            chunks = list(completions.create(**given, stream=True))
            message = joined(chunks)
            self.finish_reason = chunks[-1].choices[0].finish_reason
        else:
            choice = completions.create(**given).choices[0]
            found, self.finish_reason = choice.message, choice.finish_reason
            message = {"role": "assistant", "content": found.content}
            if found.tool_calls:
                message["tool_calls"] = [call.model_dump(exclude_none=True) for call in found.tool_calls]
        self.messages.append(message)
        return message


def joined(chunks: list[Any]) -> Json:
    """The message of a stream."""
    content, calls = "", dict[int, Json]()
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(
                    part.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] += part.id or ""
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
    message: Json = {"role": "assistant", "content": content or None}
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


def computes(reference: Reference, step: Step, temperature: float) -> None:
    """The recorded log-probs are those of a fresh forward pass."""
    expected = reference.logprobs(step.prompt_ids.tolist(), step.response_ids.tolist(), temperature)
    assert gap(step.rollout_log_probs.tolist(), expected) < TOLERANCE


def route(body: Json) -> str:
    return "generate" if "token_ids" in body else "completions"


def a_chain(steps: list[Step]) -> bool:
    """Each prompt begins with the prompt and the response before it."""
    return tree(steps) == [None, *range(len(steps) - 1)]


@pytest.mark.parametrize(("stream", "temperature"), crossed([True, False], [1.0, 0.7]))
def test_a_conversation_is_recorded_as_vllm_sampled_it(
    gateway: Running, witness: Witness, reference: Reference, stream: bool, temperature: float
) -> None:
    agent = Agent(gateway, stream=stream, temperature=temperature, seed=3)
    for text in ("guess a number", "higher", "lower", "no, higher"):
        agent.says(text)
    steps = gateway.steps(agent.uid)
    assert len(steps) == 4
    assert {route(body) for body in witness.asked} == {gateway.app.state.gateway.settings.wire}
    witness.holds(steps)
    assert a_chain(steps)
    for step in steps:
        computes(reference, step, temperature)


@pytest.mark.parametrize(("stream", "tools"), crossed([False, True], [None, TOOLS]))
def test_an_answer_is_the_one_that_vllms_own_chat_gives(
    gateway: Running, theirs: Client, stream: bool, tools: list[Any] | None
) -> None:
    """The same template, the same sampling, the same text: also where special tokens or half characters are sampled."""
    for seed in range(3):
        agent = Agent(gateway, stream=stream, seed=seed, max_tokens=48, **({"tools": tools} if tools else {}))
        said = agent.says("guess a number")
        expected = theirs.post("/v1/chat/completions", {**agent.last, "messages": agent.messages[:-1]})["choices"][0]
        assert said["content"] == expected["message"]["content"]
        assert agent.finish_reason == expected["finish_reason"]


@pytest.mark.parametrize("name", sorted(set(ANSWERS) - MORE_LENIENT))
@pytest.mark.parametrize("gateway", ["completions", pytest.param("generate", marks=pytest.mark.long)], indirect=True)
def test_a_call_is_the_one_that_vllms_own_chat_finds(gateway: Running, theirs: Client, name: str) -> None:
    """The same tools with the same arguments; what is content beside them is the gateway's own to say."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], "tools": TOOLS, "max_tokens": 300}
    body["structured_outputs"] = {"choice": [ANSWERS[name]]}
    mine = told(gateway.post(gateway.init()["base_url"] + "/v1/chat/completions", body))["choices"][0]
    other = theirs.post("/v1/chat/completions", body)["choices"][0]
    assert mine["finish_reason"] == other["finish_reason"]
    assert called(mine) == called(other)


def called(choice: Json) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls") or ()
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_the_log_probs_that_an_agent_asks_for_are_vllms(gateway: Running, theirs: Client) -> None:
    made = gateway.init()
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    body |= {"model": "tiny", "temperature": 0}
    mine = told(gateway.post(made["base_url"] + "/v1/chat/completions", body))["choices"][0]["logprobs"]["content"]
    other = theirs.post("/v1/chat/completions", body)["choices"][0]["logprobs"]["content"]
    agree(mine, other)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_conversation_with_tools_is_recorded_as_vllm_sampled_it(
    gateway: Running, witness: Witness, reference: Reference, stream: bool
) -> None:
    agent = Agent(gateway, stream=stream, temperature=1.0, seed=5, tools=TOOLS, max_tokens=200)
    for turn in range(3):
        called = agent.says(f"turn {turn}", tool_choice="required")
        (call,) = called["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert arguments.get("number") in range(1, 8) or arguments.get("word") in ("higher", "lower")
        agent.returns(call, "higher", tool_choice="auto", max_tokens=16)
    steps = gateway.steps(agent.uid)
    assert len(steps) == 6
    witness.holds(steps)
    assert a_chain(steps)
    for step in steps[1::2]:  # what a form was forced upon has the log-probs of that form
        computes(reference, step, 1.0)


def test_a_named_tool_is_the_one_that_is_called(gateway: Running, witness: Witness) -> None:
    agent = Agent(gateway, stream=False, tools=TOOLS, max_tokens=200)
    for name in ("say", "guess", "say"):
        message = agent.says("go", tool_choice={"type": "function", "function": {"name": name}})
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == name
        agent.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
    steps = gateway.steps(agent.uid)
    witness.holds(steps)
    assert a_chain(steps)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_json_by_a_schema_is_json_of_that_schema(gateway: Running, witness: Witness, stream: bool) -> None:
    schema = TOOLS[0]["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    agent = Agent(gateway, stream=stream, response_format=form, max_tokens=200)
    assert json.loads(agent.says("a number")["content"])["number"] in range(1, 8)
    witness.holds(gateway.steps(agent.uid))


def test_every_choice_is_a_step(gateway: Running, witness: Witness, reference: Reference) -> None:
    agent = Agent(gateway, stream=False, n=3, temperature=1.0)
    agent.says("guess a number")
    steps = gateway.steps(agent.uid)
    assert len(steps) == 3
    witness.holds(steps)
    for step in steps:
        computes(reference, step, 1.0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_stop_string_ends_the_text_and_not_the_record(gateway: Running, witness: Witness, stream: bool) -> None:
    agent = Agent(gateway, stream=stream, seed=3, max_tokens=64)
    whole = agent.says("guess a number")["content"]
    stop = re.findall(r"[ -~]{2}", whole)[2]
    again = Agent(gateway, stream=stream, seed=3, max_tokens=64, stop=[stop])
    assert again.says("guess a number")["content"] == whole[: whole.index(stop)]
    steps = [*gateway.steps(agent.uid), *gateway.steps(again.uid)]
    witness.holds(steps)
    assert steps[1].finish_reason == "stop"
    assert tokens(steps[0])[: len(tokens(steps[1]))] == tokens(steps[1])


def test_agents_at_once_are_recorded_each_by_itself(gateway: Running, witness: Witness, reference: Reference) -> None:
    def talk(seed: int) -> str:
        agent = Agent(gateway, stream=bool(seed % 2), temperature=0.7, seed=seed)
        for text in ("guess", "higher", "lower"):
            agent.says(text)
        return agent.uid

    with ThreadPoolExecutor(8) as pool:
        uids = list(pool.map(talk, range(8)))
    trajectories = [gateway.steps(uid) for uid in uids]
    witness.holds([step for steps in trajectories for step in steps])
    for steps in trajectories:
        assert a_chain(steps)
        for step in steps:
            computes(reference, step, 0.7)


def test_a_prompt_past_the_context_is_refused_with_openais_code(gateway: Running, witness: Witness) -> None:
    agent = Agent(gateway, stream=False)
    with pytest.raises(openai.BadRequestError) as refused:
        agent.says("number " * 3000)
    assert refused.value.code == "context_length_exceeded"
    assert gateway.steps(agent.uid) == []
    assert witness.calls == []


@pytest.mark.alone
def test_an_agent_that_hangs_up_leaves_no_step_and_ends_the_answer(
    gateway: Running, witness: Witness, theirs: Client
) -> None:
    for _ in range(TRIES):
        witness.forget()
        agent = Agent(gateway, stream=True)
        stream = agent.client.chat.completions.create(**GO_ON, stream=True)
        chunks = iter(stream)
        for _ in range(3):  # the role, and some text
            next(chunks)
        stream.close()
        while running(theirs) or not witness.calls:
            pass
        (cut,) = [choice for _, choices in witness.calls for choice in choices]
        if len(cut.ids) < LONG:
            break
    else:
        raise AssertionError(f"in {TRIES} tries the answer had ended before the agent hung up")
    assert cut.finish_reason is None
    assert [step for step in gateway.steps(agent.uid) if step.quarantined is None] == []


@pytest.mark.alone
@pytest.mark.parametrize(
    ("gateway", "mode"),
    usual(["generate", "completions"], ["abort-resume", "keep"]),
    indirect=["gateway"],
)
def test_an_answer_goes_on_over_a_pause_under_the_new_weights(
    gateway: Running, watched: tuple[str, Witness], theirs: Client, folder: Path, other: Path, mode: str
) -> None:
    """Its tokens are those of the old weights up to the pause, and of the new ones after it."""
    for version in range(1, 2 * TRIES, 2):
        agent = Agent(gateway, stream=True)
        try:
            told(gateway.post("/policy_version", {"version": version}))
            theirs.post("/update_weight_version", {"new_version": str(version)})
            chunks = iter(agent.client.chat.completions.create(**GO_ON, stream=True))
            seen = [next(chunks) for _ in range(3)]
            told(gateway.post(f"/pause?mode={mode}"))
            with reach(watched[0]) as through:
                through.get("/is_paused")  # what was sampled before has passed the witness by its answer
            load(theirs, other)
            theirs.post("/update_weight_version", {"new_version": str(version + 1)})
            told(gateway.post("/policy_version", {"version": version + 1}))
            told(gateway.post("/resume"))
            seen += list(chunks)
        finally:
            theirs.post("/resume")
            load(theirs, folder)
            theirs.post("/update_weight_version", {"new_version": "default"})
        assert seen[-1].choices[0].finish_reason == "length"
        (step,) = gateway.steps(agent.uid)
        if step.version_spans is not None:
            break
    else:
        raise AssertionError(f"in {TRIES} tries the answer had ended before the pause")
    (first, one), (cut, two) = step.version_spans
    assert (first, one, two, step.policy_version) == (0, version, version + 1, version)
    assert 0 < cut < len(step.response_ids) == LONG
    ids, prompt = step.response_ids.tolist(), step.prompt_ids.tolist()
    before, after = Reference(folder), Reference(other)
    expected = before.logprobs(prompt, ids[:cut], 1.0) + after.logprobs(prompt + ids[:cut], ids[cut:], 1.0)
    assert gap(step.rollout_log_probs.tolist(), expected) < TOLERANCE


@pytest.mark.alone
@pytest.mark.parametrize(("gateway", "stream"), usual(["completions", "generate"], [True, False]), indirect=["gateway"])
def test_answers_that_wait_are_cut_and_continued_like_those_that_run(
    gateway: Running, witness: Witness, theirs: Client, reference: Reference, stream: bool
) -> None:
    for _ in range(TRIES):
        witness.forget()
        agents = [Agent(gateway, stream=stream, max_tokens=600, seed=seed) for seed in range(MAX_NUM_SEQS + 4)]
        theirs.post("/pause?mode=keep")
        with ThreadPoolExecutor(len(agents)) as pool:
            asked = [pool.submit(agent.says, "go on", extra_body={"ignore_eos": True}) for agent in agents]
            witness.await_begun(len(agents))
            theirs.post("/resume")  # now all begin at once, and more than can run
            ended = False
            while running(theirs) <= MAX_NUM_SEQS and not ended:
                ended = any(call.done() for call in asked)
            if not ended:
                told(gateway.post("/pause?mode=abort-resume"))
                told(gateway.post("/resume"))
            for call in asked:
                call.result(900)
        if not ended:
            break
    else:
        raise AssertionError(f"in {TRIES} tries they ended before they could be paused")
    for agent in agents:
        (step,) = gateway.steps(agent.uid)
        assert (agent.finish_reason, len(step.response_ids)) == ("length", 600)
        computes(reference, step, 1.0)


def load(server: Client, folder: Path) -> None:
    server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
    server.post("/reset_prefix_cache")


def test_the_gateway_tells_the_trajectory_as_the_pool_holds_it(gateway: Running) -> None:
    agent = Agent(gateway, stream=False)
    agent.says("guess a number")
    agent.says("higher")
    gateway.complete(agent.uid, reward=1.0)
    found = told(gateway.get(f"/trajectories/{agent.uid}"))
    assert found["complete"]
    assert [step["prompt_ids"] + step["response_ids"] for step in found["steps"]] == [
        tokens(step) for step in gateway.steps(agent.uid)
    ]
