"""`/compute_reward`: what an answer is worth, by a reward in the gateway's own process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests.gateway.kit import Running, running_gateway, serving, told, until

from headrace import DataPool
from headrace.gateway.settings import GatewaySettings
from headrace.tokens import Message, Renderer, load_renderer

#: Nothing listens there: scoring needs no rollout server.
NO_SERVER = "http://127.0.0.1:9"
FUNCTION = """
def seen(sample):
    if sample.text == "crash":
        raise ValueError("it crashed")
    if sample.text == "nan":
        return float("nan")
    shown = ("messages", "prompt_ids", "response_ids", "num_turns", "metadata")
    about = {name: getattr(sample, name) for name in shown}
    return {"score": len(sample.text), "truth": sample.ground_truth, "uid": sample.trajectory_uid, **about}
"""


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return load_renderer(folder)


@pytest.fixture(scope="module")
def gateway(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    base = tmp_path_factory.mktemp("reward")
    (base / "seen.py").write_text(FUNCTION)
    reward = base / "reward.json"
    reward.write_text(json.dumps({"functions": ["seen.py:seen"], "ground_truth": "solution", "retries": 0}))
    lengths = {"prompt_length": 64, "response_length": 16}
    with (
        DataPool() as pool,
        running_gateway(pool, NO_SERVER, folder, until_ready=False, reward=str(reward), **lengths) as found,
    ):
        body = {"prompt_ids": [1], "response_ids": [2], "dataset_fields": {"solution": 0}}
        until(lambda: found.post("/compute_reward", body).status_code == 200)
        yield found


def scored(gateway: Running, **body: Any) -> Any:
    found = told(gateway.post("/compute_reward", body))
    assert found.keys() == {"reward_score", "reward", "reward_extra_info"}
    assert found["reward"] == found["reward_score"]
    return found["reward_score"], {
        name.removeprefix("seen."): value for name, value in found["reward_extra_info"].items()
    }


def test_ids_are_scored_by_their_text_with_the_rows_fields(gateway: Running, renderer: Renderer) -> None:
    prompt = renderer.render([Message("system", "Be brief."), Message("user", "2 + 2?")])
    response = renderer.vocabulary.encode("four<|im_end|>")
    value, about = scored(
        gateway,
        prompt_ids=prompt,
        response_ids=response,
        dataset_fields={"solution": "4", "data_source": "sums"},
        extra_fields={"tool_calls": 0, "solution": "forged"},
        num_turns=1,
    )
    assert value == about["seen"] == 4.0
    assert about["truth"] == "4"
    assert about["metadata"] == {"solution": "4", "data_source": "sums", "tool_calls": 0}
    assert (about["prompt_ids"], about["response_ids"], about["num_turns"]) == (prompt, response, 1)
    assert about["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "four"},
    ]


def test_ids_may_be_padded_to_the_gateways_lengths(gateway: Running, renderer: Renderer) -> None:
    pad = renderer.vocabulary.hf.pad_token_id
    prompt, response = renderer.render([Message("user", "hi")]), renderer.vocabulary.encode("yes")
    padded = {
        "prompt_ids": [pad] * (64 - len(prompt)) + prompt,
        "response_ids": response + [pad] * (16 - len(response)),
    }
    value, about = scored(gateway, **padded, dataset_fields={"solution": 1})
    assert (value, about["prompt_ids"], about["response_ids"]) == (3.0, prompt, response)


def test_a_conversation_is_scored_with_what_its_trajectory_was_begun_with(gateway: Running) -> None:
    begun = gateway.init(metadata={"solution": "4", "level": 3})
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four!"}]
    value, about = scored(gateway, trajectory_uid=begun["trajectory_uid"], messages=messages)
    assert (value, about["truth"], about["metadata"]["level"]) == (5.0, "4", 3)
    assert (about["uid"], about["messages"], about["num_turns"]) == (begun["trajectory_uid"], messages, 1)
    # Whoever asks may know better, and need not have begun the trajectory here.
    _, about = scored(
        gateway, trajectory_uid=begun["trajectory_uid"], messages=messages, dataset_fields={"solution": "5"}
    )
    assert (about["truth"], about["metadata"]["level"]) == ("5", 3)
    _, about = scored(gateway, trajectory_uid="elsewhere", messages=messages, dataset_fields={"solution": "6"})
    assert about["truth"] == "6"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "either prompt_ids and response_ids, or messages"),
        ({"prompt_ids": [1]}, "either prompt_ids and response_ids, or messages"),
        ({"prompt_ids": [1], "response_ids": [2], "messages": []}, "either prompt_ids and response_ids, or messages"),
        ({"prompt_ids": [1], "response_ids": [-2]}, "response_ids[0] is -2"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role is 'judge'"),
        ({"prompt_ids": [1], "response_ids": [2]}, "no column 'solution'"),
        ({"prompt_ids": [1], "response_ids": [2], "reward": 1}, "unknown field"),
    ],
)
def test_what_cannot_be_scored_is_400_that_says_why(gateway: Running, body: dict[str, Any], said: str) -> None:
    refused = gateway.post("/compute_reward", body)
    assert refused.status_code == 400
    assert said in refused.json()["detail"]


@pytest.mark.parametrize(("text", "said"), [("crash", "error: it raised ValueError"), ("nan", "not_a_number: ")])
def test_a_sample_that_fails_is_422_with_its_reason_and_never_a_zero(gateway: Running, text: str, said: str) -> None:
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": text}]
    refused = gateway.post("/compute_reward", {"messages": messages, "dataset_fields": {"solution": 1}})
    assert refused.status_code == 422
    assert refused.json()["code"] == "reward_failed"
    assert f"seen: {said}" in refused.json()["detail"]
    assert gateway.counted("rewards")[said.partition(":")[0]] == 1


def test_a_judge_that_is_away_or_mumbles_is_not_the_samples_fault(folder: Path, tmp_path: Path) -> None:
    async def mumble(request: Request) -> JSONResponse:
        return JSONResponse({"choices": [{"message": {"content": "well, well"}}]})

    asked = {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "gone"}]}
    with serving(Starlette(routes=[Route("/v1/chat/completions", mumble, methods=["POST"])])) as judge:
        for address, status, code in ((NO_SERVER, 503, "reward_unavailable"), (judge, 502, "reward_failed")):
            reward = tmp_path / "judge.json"
            reward.write_text(json.dumps({"judge": {"address": address, "model": "m"}, "retries": 0}))
            with (
                DataPool() as pool,
                running_gateway(pool, NO_SERVER, folder, until_ready=False, reward=str(reward)) as gateway,
            ):
                refused = gateway.post("/compute_reward", asked)
            assert (refused.status_code, refused.json()["code"]) == (status, code), refused.text
            assert ("retry-after" in refused.headers) == (status == 503)


def test_a_reward_that_cannot_work_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"rules": [{"use": "exact_mach"}]}))
    with pytest.raises(ValueError, match="exact_match"):
        GatewaySettings(vllm_addresses=NO_SERVER, reward=str(wrong))
    with pytest.raises(ValueError, match="give one"):
        GatewaySettings(vllm_addresses=NO_SERVER, reward=str(_good(tmp_path)), reward_worker_name="judge")
    (tmp_path / "broken.py").write_text("import no_such_module\n\ndef score(sample):\n    return 1.0\n")
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"functions": ["broken.py:score"]}))
    with (
        DataPool() as pool,
        running_gateway(pool, NO_SERVER, folder, until_ready=False, reward=str(broken)) as gateway,
    ):
        until(lambda: "no_such_module" in gateway.get("/ready").text)
        assert gateway.get("/ready").status_code == 503


def _good(base: Path) -> Path:
    good = base / "good.json"
    good.write_text(json.dumps({"rules": [{"use": "exact_match"}]}))
    return good
