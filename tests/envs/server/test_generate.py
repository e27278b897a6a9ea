"""`/generate`, the wire of Atropos' vLLM server: spoken where it is there; where it is not, OpenAI's routes are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from tests.engine.kit import Client
from tests.site import Site

from headrace.envs.server import APIServerConfig, NoTokens, RequestRefused, ServerManager, Unavailable

Json = dict[str, Any]
Answer = Callable[[Json], Any]
Manager = Callable[..., Awaitable[ServerManager]]


class Asked(list[tuple[str, Json]]):
    """The path and the body of every call, in the order in which they came."""

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self]


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
async def manager(asked: Asked, tokenizer: Any) -> AsyncIterator[Manager]:
    """What an environment has on a server with these routes alone; an answer that is an int is a status."""
    opened: list[tuple[Site, ServerManager]] = []

    async def started(with_tokenizer: bool = True, **routes: Answer) -> ServerManager:
        def handler(path: str, answer: Answer) -> web.RouteDef:
            async def handle(request: web.Request) -> web.Response:
                body = await request.json()
                asked.append((path, body))
                found = answer(body)
                return web.Response(status=found) if isinstance(found, int) else web.json_response(found)

            return web.post(path, handle)

        paths = {"generate": "/generate", "completions": "/v1/completions"}
        site = Site(*(handler(paths[name], answer) for name, answer in routes.items()))
        config = APIServerConfig(
            base_url=f"http://127.0.0.1:{await site.start()}/v1", model_name="m", server_type="vllm", max_attempts=1
        )
        made = ServerManager([config], tokenizer=tokenizer if with_tokenizer else None)
        opened.append((site, made))
        return made

    yield started
    for site, made in opened:
        await made.close()
        await site.end()


def atropos(body: Json) -> Json:
    """As Atropos' server answers: two tokens an answer, the likeliest beside each where log-probs were asked for."""
    n = body.get("n", 1)
    told: Json = {"text": ["ab"] * n, "prompt": "x", "finish_reasons": ["stop", "length"][:n]}
    if "logprobs" in body:
        told["logprobs"] = [[[{"40": -0.5, "7": -0.1}], [{"41": -0.25}]]] * n
        told["prompt_token_ids"] = [5, 6]
        told["token_ids"] = [[40, 41]] * n
    return told


def openai(body: Json) -> Json:
    """As vLLM answers on OpenAI's route."""
    choice = {"token_ids": [40], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}
    return {"choices": [{"index": 0, "prompt_token_ids": body["prompt"], **choice}]}


async def test_it_is_sent_what_atropos_sends_and_read_as_atropos_reads_it(asked: Asked, manager: Manager) -> None:
    server = await manager(generate=atropos)
    found = await server.tokens_and_logprobs_completion(
        input_ids=[5, 6], n=2, max_completion_tokens=2, temperature=0.7, stop=None
    )
    assert found == ([5, 6], [[40, 41]] * 2, [[-0.5, -0.25]] * 2, ["stop", "length"])
    sampling = {"logprobs": 0, "n": 2, "max_tokens": 2, "temperature": 0.7}
    assert asked == [("/generate", {"prompt": {"prompt_token_ids": [5, 6]}, **sampling})]


async def test_a_server_that_tells_no_ids_apart_tells_them_with_the_log_probs(manager: Manager) -> None:
    def older(body: Json) -> Json:
        return {name: told for name, told in atropos(body).items() if not name.endswith("token_ids")}

    server = await manager(generate=older)
    found = await server.tokens_and_logprobs_completion(input_ids=[5, 6])
    assert found == ([5, 6], [[40, 41]], [[-0.5, -0.25]], ["stop"])


async def test_without_a_tokenizer_the_server_reads_the_prompt(asked: Asked, manager: Manager) -> None:
    server = await manager(with_tokenizer=False, generate=atropos)
    prompt, *_ = await server.tokens_and_logprobs_completion(prompt="hi")
    assert (prompt, asked[0][1]["prompt"]) == ([5, 6], "hi")


async def test_which_wire_a_server_has_is_asked_once(asked: Asked, manager: Manager) -> None:
    server = await manager(generate=lambda _: 404, completions=openai)
    for _ in range(2):
        assert await server.tokens_and_logprobs_completion(input_ids=[5]) == ([5], [[40]], [[-0.5]], ["stop"])
    assert asked.paths == ["/generate", "/v1/completions", "/v1/completions"]


async def test_a_front_that_forbids_the_path_does_not_hide_the_other(asked: Asked, manager: Manager) -> None:
    server = await manager(generate=lambda _: 403, completions=openai)
    for _ in range(2):
        await server.tokens_and_logprobs_completion(input_ids=[5])
    assert asked.paths == ["/generate", "/v1/completions", "/v1/completions"]


async def test_what_it_refuses_is_said_and_not_that_another_route_is_missing(asked: Asked, manager: Manager) -> None:
    server = await manager(generate=lambda _: 400)
    with pytest.raises(RequestRefused, match="/generate answered 400") as refused:
        await server.tokens_and_logprobs_completion(input_ids=[5])
    assert refused.value.status == 400


async def test_a_server_with_neither_is_told_by_both_names(manager: Manager) -> None:
    server = await manager()
    with pytest.raises(RequestRefused, match=r"/v1/completions answered 404.* no POST http://[^ ]*/generate either"):
        await server.tokens_and_logprobs_completion(input_ids=[5])


async def test_messages_to_a_server_that_has_it_alone_are_an_error_that_names_what_answers(manager: Manager) -> None:
    server = await manager(generate=atropos)
    with pytest.raises(RequestRefused, match=r"chat/completions answered 404.*/generate alone.*managed_server\(\)"):
        await server.chat_completion(messages=[{"role": "user", "content": "a"}])


async def test_a_conversation_needs_it_alone(asked: Asked, manager: Manager) -> None:
    def answer(body: Json) -> Json:
        return {**atropos(body), "prompt_token_ids": body["prompt"]["prompt_token_ids"]}

    server = await manager(generate=answer)
    async with server.managed_server() as managed:
        await managed.chat_completion(messages=[{"role": "user", "content": "a"}], max_tokens=2)
        (node,) = managed.get_state()["nodes"]
    assert asked.paths == ["/generate"]
    assert (node.tokens[-2:], node.logprobs[-2:]) == ([40, 41], [-0.5, -0.25])


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"logprobs": None}, NoTokens, "without logprobs.*vllm serve"),
        ({"logprobs": [[["no"], ["object"]]]}, NoTokens, "which tokens it sampled"),
        ({"logprobs": [[[{"9": -0.5}], [{"41": -0.25}]]]}, Unavailable, "empty ones"),
        ({"finish_reasons": ["stop", "stop"]}, Unavailable, "answers where 1 were asked for"),
        ({"prompt_token_ids": [5, 7]}, Unavailable, "other tokens than it was sent"),
    ],
)
async def test_what_is_not_its_answer_is_not_trained_on(
    manager: Manager, change: Json, error: type[Exception], said: str
) -> None:
    server = await manager(generate=lambda body: {**atropos(body), **change})
    with pytest.raises(error, match=said):
        await server.tokens_and_logprobs_completion(input_ids=[5, 6])


# -- a prompt's own log-probs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
async def test_a_prompt_s_log_probs_are_asked_and_read_as_atropos_does(
    asked: Asked, manager: Manager, nested: bool
) -> None:
    rows: list[Any] = [None, {"6": -2.0, "9": -0.5}] if not nested else [[[{"5": -3.0}], [{"6": -2.0}, {"9": -0.5}]]]
    server = await manager(generate=lambda body: {**atropos(body), "prompt_logprobs": rows})
    found = await server.get_logprobs(input_ids=[5, 6], top_k=0)
    assert found["prompt_tokens"] == [5, 6]
    assert found["prompt_topk_token_ids"] == [[5] if nested else [], [6, 9]]
    assert found["prompt_topk_logprobs"] == [[-3.0] if nested else [], [-2.0, -0.5]]
    fixed = {"prompt_logprobs": 1, "max_tokens": 1, "n": 1, "temperature": 0.0, "top_p": 1.0}
    assert asked == [("/generate", {"prompt": {"prompt_token_ids": [5, 6]}, **fixed})]


async def test_a_server_that_tells_none_of_a_prompt_is_named(manager: Manager) -> None:
    server = await manager(generate=atropos)
    with pytest.raises(NoTokens, match=r"/generate answered without prompt_logprobs"):
        await server.get_logprobs(input_ids=[5, 6])


async def test_a_teacher_tells_its_log_probs_of_tokens_that_were_sampled_elsewhere(
    server: ServerManager, engine: Client
) -> None:
    """As an environment that distils asks its teacher: a whole rollout's ids, for the likeliest at each."""
    prompt, (ids,), _, _ = await server.tokens_and_logprobs_completion(prompt="Once upon a", max_tokens=6)
    rollout = prompt + ids
    told = await server.get_logprobs(input_ids=rollout, top_k=4, max_tokens=1, split="train")
    assert told["prompt_tokens"] == rollout
    assert len(told["prompt_topk_token_ids"]) == len(told["prompt_topk_logprobs"]) == len(rollout)
    scored = engine.post("/score_tokens", {"prompt_token_ids": rollout})["logprobs"]
    for token, score, row, values in zip(
        rollout[1:], scored, told["prompt_topk_token_ids"][1:], told["prompt_topk_logprobs"][1:], strict=True
    ):
        assert row[0] == token, "the rollout's own token, then the likeliest"
        assert values[0] == pytest.approx(score, abs=1e-4)
        assert len(row) in (4, 5)
