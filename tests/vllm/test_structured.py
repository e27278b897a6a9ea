"""What a gateway asks of vLLM to force an answer's form, and that vLLM does it.

Headrace's engine has no structured outputs, and says so.
"""

from __future__ import annotations

import json
import re

import pytest
from tests.engine.kit import Client, Json, Reference
from tests.vllm.kit import PROMPT, TOLERANCE

PATH = "/v1/completions"
SCHEMA: Json = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["number"],
    "additionalProperties": False,
}
WORD: Json = {
    "type": "object",
    "properties": {"word": {"enum": ["higher", "lower"]}},
    "required": ["word"],
    "additionalProperties": False,
}
TOOLS = {"guess": SCHEMA, "say": WORD}
ASKED: Json = {"prompt": PROMPT, "max_tokens": 400, "return_token_ids": True, "logprobs": 0}


def calls(**more: object) -> str:
    """Hermes' calls of these tools and nothing else, as a structural tag."""
    tags = [
        {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
            "content": {"type": "json_schema", "json_schema": schema},
            "end": "}\n</tool_call>",
        }
        for name, schema in TOOLS.items()
    ]
    form = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True, **more}
    return json.dumps({"type": "structural_tag", "format": form})


def called(text: str) -> list[Json]:
    return [json.loads(found) for found in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)]


def valid(call: Json) -> bool:
    if call["name"] == "guess":
        return call["arguments"].keys() == {"number"} and 1 <= call["arguments"]["number"] <= 7
    return bool(call["arguments"].keys() == {"word"} and call["arguments"]["word"] in ("higher", "lower"))


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_is_one_call_of_one_of_the_tools(theirs: Client, seed: int) -> None:
    form = {"structural_tag": calls(stop_after_first=True)}
    found = theirs.complete(PROMPT, seed=seed, max_tokens=400, structured_outputs=form)
    assert (found["finish_reason"], found["stop_reason"], found["token_ids"][-1]) == ("stop", None, 2)
    (call,) = called(found["text"])
    assert valid(call)
    assert found["text"].startswith("<tool_call>\n")
    assert found["text"].endswith("\n</tool_call>")


def test_an_answer_is_one_call_or_several(theirs: Client) -> None:
    counts = set()
    for seed in range(6):
        form = {"structural_tag": calls()}
        found = theirs.complete(PROMPT, seed=seed, max_tokens=1500, structured_outputs=form)
        counts.add(len(called(found["text"])))
        assert all(map(valid, called(found["text"])))
    assert min(counts) >= 1
    assert max(counts) > 1


def test_the_same_call_comes_by_ids_and_in_a_stream(theirs: Client) -> None:
    form = {"structural_tag": calls(stop_after_first=True)}
    whole = theirs.complete(PROMPT, seed=1, max_tokens=400, structured_outputs=form)
    sampling = {"seed": 1, "max_tokens": 400, "structured_outputs": form}
    given = {"token_ids": PROMPT, "output_mode": "text", "sampling_params": sampling}
    assert theirs.post("/inference/v1/generate", given)["choices"][0]["text"] == whole["text"]
    chunks = theirs.chunks(PATH, {**ASKED, "seed": 1, "structured_outputs": form})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"choice": ["higher", "lower"]}, "higher|lower"),
        ({"grammar": 'root ::= "a" | "b" root'}, "b*a"),
        ({"json": SCHEMA}, r'\{\s*"number"\s*:\s*[1-7]\s*\}'),
        ({"json": json.dumps(SCHEMA)}, r'\{\s*"number"\s*:\s*[1-7]\s*\}'),
    ],
    ids=str,
)
def test_an_answer_has_the_form_that_is_asked_for(theirs: Client, form: Json, pattern: str) -> None:
    for seed in range(3):
        found = theirs.complete(PROMPT, seed=seed, max_tokens=400, structured_outputs=form)
        assert re.fullmatch(pattern, found["text"])


@pytest.mark.parametrize(
    ("form", "same"),
    [
        ({"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"type": "json_object"}, {"json_object": True}),
        (json.loads(calls(stop_after_first=True)), {"structural_tag": calls(stop_after_first=True)}),
    ],
    ids=["json_schema", "json_object", "structural_tag"],
)
def test_a_response_format_is_a_structured_output(theirs: Client, form: Json, same: Json) -> None:
    asked = {**ASKED, "max_tokens": 60, "seed": 2}
    by_format, by_name = (
        theirs.post(PATH, {**asked, **extra})["choices"][0]["token_ids"]
        for extra in ({"response_format": form}, {"structured_outputs": same})
    )
    assert by_format == by_name


def test_log_probs_are_those_among_what_the_form_allows(theirs: Client, reference: Reference) -> None:
    """So a trainer that computes them without the form gets others."""
    found = theirs.complete(PROMPT, temperature=1.0, seed=1, structured_outputs={"choice": ["0", "1"]}, max_tokens=4)
    token = found["token_ids"][0]
    logits = reference.logits(PROMPT)[-1]
    zero, one = (theirs.post("/tokenize", {"prompt": digit})["tokens"][0] for digit in "01")
    expected = logits[token] - logits[[zero, one]].logsumexp(0)
    assert abs(found["logprobs"]["token_logprobs"][0] - expected.item()) < TOLERANCE


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "a", "json": SCHEMA},
        {},
        {"regex": "("},
        {"json": {"type": "song"}},
        {"structural_tag": "{}"},
        {"structural_tag": json.loads(calls())},
    ],
    ids=["two", "none", "no regex", "no schema", "no tag", "a tag that is no string"],
)
def test_a_form_that_is_none_is_refused(theirs: Client, form: Json) -> None:
    assert theirs.refused(PATH, {**ASKED, "structured_outputs": form})[0] == 400


def test_tools_are_nothing_to_a_completion(theirs: Client) -> None:
    tool = {"type": "function", "function": {"name": "guess", "parameters": SCHEMA}}
    asked = {**ASKED, "max_tokens": 20, "temperature": 0}
    with_tools = theirs.post(PATH, {**asked, "tools": [tool], "tool_choice": "required"})
    assert with_tools["choices"][0]["token_ids"] == theirs.post(PATH, asked)["choices"][0]["token_ids"]


def test_the_engine_says_that_it_has_none(ours: Client) -> None:
    status, error = ours.refused(PATH, {**ASKED, "structured_outputs": {"regex": "a"}})
    assert (status, error["param"]) == (400, "structured_outputs")
