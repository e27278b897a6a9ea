"""What the `openai` SDK makes of trouble: its own exceptions, its own retries, and no step that should not be."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.engine.kit import Client
from tests.gateway.kit import Evidence, Json, Running, running_gateway, serving, told
from tests.gateway.tool_model import ADD, HELLO, HI

from headrace import DataPool

ASK: Json = {"model": "any", "messages": [{"role": "user", "content": HELLO}], "temperature": 0}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def client(base_url: str, **more: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": base_url, "api_key": "none", "max_retries": 0, **more})


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "param", "said"),
        [
            ({"temperature": -1}, "temperature", "-1"),
            ({"n": 0}, "n", "must lie in"),
            ({"messages": []}, "messages", "messages"),
            ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "wizard"),
            ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages", "image"),
            ({"tools": [{"type": "function", "function": {}}]}, "tools", "tools[0].function.name"),
            ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice", "mul"),
            ({"response_format": {"type": "poem"}}, "response_format", "poem"),
            ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
            ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_bad_field_is_named(self, gateway: Running, stream: bool, change: Json, param: str, said: str) -> None:
        begun = gateway.init()
        with client(begun["base_url"]) as sdk, pytest.raises(openai.BadRequestError) as refused:
            sdk.chat.completions.create(**{**ASK, "stream": stream, **change})
        assert said in refused.value.message
        assert refused.value.param == param
        assert refused.value.type == "invalid_request_error"
        assert gateway.steps(begun["trajectory_uid"]) == []

    def test_a_prompt_past_the_context_is_refused_and_not_cut(self, gateway: Running) -> None:
        begun = gateway.init()
        with client(begun["base_url"]) as sdk, pytest.raises(openai.BadRequestError) as refused:
            sdk.chat.completions.create(**{**ASK, "messages": [{"role": "user", "content": "x" * 5000}]})
        assert refused.value.code == "context_length_exceeded"
        assert gateway.steps(begun["trajectory_uid"]) == []

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_unknown_trajectory_is_not_found(self, gateway: Running, stream: bool) -> None:
        with client(f"{gateway.address}/nobody/nothing/v1") as sdk, pytest.raises(openai.NotFoundError) as refused:
            sdk.chat.completions.create(**ASK, stream=stream)
        assert "nobody" in refused.value.message
        assert gateway.pool.stats()["ledger"]["submitted"] == 0

    def test_a_complete_trajectory_is_a_conflict(self, gateway: Running) -> None:
        begun = gateway.init()
        with client(begun["base_url"]) as sdk:
            sdk.chat.completions.create(**ASK, max_tokens=3)
            gateway.complete(begun["trajectory_uid"], reward=1.0)
            with pytest.raises(openai.ConflictError):
                sdk.chat.completions.create(**ASK, max_tokens=3)
        assert len(gateway.steps(begun["trajectory_uid"])) == 1

    def test_a_wrong_key_is_an_authentication_error(self, pool: DataPool, engine: Client, folder: Any) -> None:
        with running_gateway(pool, f"http://{engine.host}", folder, api_key="right") as gateway:
            told(gateway.post("/init_trajectory", {"trajectory_uid": "t"}, headers={"authorization": "Bearer right"}))
            base = f"{gateway.address}/t/t"
            with client(base, api_key="wrong") as sdk, pytest.raises(openai.AuthenticationError):
                sdk.chat.completions.create(**ASK, max_tokens=3)
            with client(base, api_key="right") as sdk:
                sdk.chat.completions.create(**ASK, max_tokens=3)
            assert len(gateway.steps("t")) == 1

    def test_a_route_that_is_not_there_is_not_found(self, gateway: Running) -> None:
        with client(gateway.init()["base_url"] + "/v1") as sdk, pytest.raises(openai.NotFoundError) as refused:
            sdk.embeddings.create(model="any", input="x")
        assert refused.value.code == "no_route"


class Between:
    """A proxy that passes requests on, and may lose answers or give others in their place."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.seen: list[Request] = []
        #: Answers in place of the next ones; None loses the answer after the target has given it.
        self.instead: list[tuple[int, Json] | None] = []
        self.app = Starlette(routes=[Route("/{path:path}", self.forward, methods=["GET", "POST"])])

    async def forward(self, request: Request) -> Response:
        body = await request.body()
        called = request.method == "POST" and request.url.path.endswith(("completions", "inference/v1/generate"))
        if called:
            self.seen.append(request)
            if self.instead and self.instead[0] is not None:
                status, said = self.instead.pop(0) or (0, {})
                return JSONResponse(said, status)
        async with httpx.AsyncClient(timeout=240, trust_env=False) as http:
            headers = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
            answer = await http.request(request.method, self.target + request.url.path, content=body, headers=headers)
        if called and self.instead:
            self.instead.pop(0)
            return JSONResponse({"error": {"message": "lost on the way"}}, 502)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


class TestRetries:
    def test_an_answer_that_was_lost_is_given_again_and_makes_one_step(
        self, gateway: Running, evidence: Evidence
    ) -> None:
        begun = gateway.init()
        between = Between(gateway.address)
        between.instead = [None, None]
        with serving(between.app, lifespan=False) as address:
            base = begun["base_url"].replace(gateway.address, address)
            with client(base, max_retries=2) as sdk:
                answer = sdk.chat.completions.create(**{**ASK, "temperature": 1}, max_tokens=20)
        assert [seen.headers["x-stainless-retry-count"] for seen in between.seen] == ["0", "1", "2"]
        (step,) = gateway.steps(begun["trajectory_uid"])
        evidence.holds([step])
        assert answer.id == f"chatcmpl-{step.call_id}"

    def test_a_streamed_answer_that_was_lost_is_given_again_and_makes_one_step(
        self, gateway: Running, evidence: Evidence
    ) -> None:
        begun = gateway.init()
        between = Between(gateway.address)
        between.instead = [None]
        with serving(between.app, lifespan=False) as address:
            base = begun["base_url"].replace(gateway.address, address)
            with client(base, max_retries=1) as sdk:
                chunks = list(sdk.chat.completions.create(**{**ASK, "temperature": 1}, max_tokens=20, stream=True))
        (step,) = gateway.steps(begun["trajectory_uid"])
        evidence.holds([step])
        assert {chunk.id for chunk in chunks} == {f"chatcmpl-{step.call_id}"}

    def test_the_same_question_asked_twice_on_purpose_makes_two_steps(
        self, gateway: Running, evidence: Evidence
    ) -> None:
        begun = gateway.init()
        with client(begun["base_url"]) as sdk:
            for _ in range(2):
                sdk.chat.completions.create(**{**ASK, "temperature": 1}, max_tokens=20)
        steps = gateway.steps(begun["trajectory_uid"])
        assert len(steps) == 2
        evidence.holds(steps)

    def test_a_retry_after_a_rollout_server_failed_makes_one_step(
        self, pool: DataPool, calculator: Client, taught: Any
    ) -> None:
        between = Between(f"http://{calculator.host}")
        with (
            serving(between.app, lifespan=False) as address,
            running_gateway(pool, address, taught, wire="completions") as gateway,
        ):
            evidence = Evidence(calculator)
            begun = gateway.init()
            between.instead = [(400, {"error": {"message": "not today", "type": "BadRequestError", "code": 400}})]
            with client(begun["base_url"]) as sdk, pytest.raises(openai.BadRequestError, match="not today"):
                sdk.chat.completions.create(**ASK)
            assert gateway.steps(begun["trajectory_uid"]) == []
            between.instead = [(500, {"error": {"message": "a fault", "type": "InternalServerError", "code": 500}})]
            with client(begun["base_url"], max_retries=50) as sdk:  # until the server was found well again
                assert sdk.chat.completions.create(**ASK).choices[0].message.content == HI
            (step,) = gateway.steps(begun["trajectory_uid"])
            others = evidence.includes([step])  # the server was probed again
            assert step.prompt_ids.tolist() not in [call["prompt_token_ids"] for call in others]

    def test_no_rollout_server_left_is_a_status_that_the_sdk_knows_to_retry(
        self, pool: DataPool, folder: Any, own: Client
    ) -> None:
        between = Between(f"http://{own.host}")
        with serving(between.app, lifespan=False) as address, running_gateway(pool, address, folder) as gateway:
            begun = gateway.init()
            between.instead = [(500, {"error": {"message": "a fault", "type": "InternalServerError", "code": 500}})] * 9
            with client(begun["base_url"]) as sdk, pytest.raises(openai.InternalServerError) as refused:
                sdk.chat.completions.create(**ASK)
            assert refused.value.status_code == 503
            assert int(refused.value.response.headers["retry-after"]) > 0
            assert gateway.steps(begun["trajectory_uid"]) == []
