"""Judges and reward models, asked over HTTP from servers that speak as vLLM does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from aiohttp import web

from headrace.data.errors import InvalidInput
from headrace.rewards import Reward, RewardConfig, RewardFailure, Sample, Score
from headrace.rewards.judge import combined, json_score

Reply = Callable[[dict[str, Any], int], Any]


class Server:
    """Answers every POST by `reply`, which gets the body and how many came before; an int is a status, None silence."""

    def __init__(self) -> None:
        self.address = ""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str] = []
        self.reply: Reply = lambda body, at: 500
        #: Set at the end of a test, for requests that got no answer.
        self.over = asyncio.Event()
        self.most_at_once = 0
        self._at_once = 0

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        at = len(self.asked)
        self.asked.append((request.path, body))
        self.keys.append(request.headers.get("authorization", ""))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            found = self.reply(body, at)
            if isinstance(found, Awaitable):
                found = await found
        finally:
            self._at_once -= 1
        if found is None:
            await self.over.wait()
            return web.Response()
        if isinstance(found, int):
            return web.json_response({"error": {"message": "as told"}}, status=found)
        return web.json_response(found)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_post("/{path:.*}", made.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    made.over.set()
    await runner.cleanup()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.rewards.judge.FIRST_WAIT_S", 0.0)
    monkeypatch.setattr("headrace.rewards.reward_model.FIRST_WAIT_S", 0.0)


def chat(said: Any, tokens: tuple[int, int] = (10, 5)) -> dict[str, Any]:
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    message = {"role": "assistant", "content": said}
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}


def judged(server: Server, retries: int = 2, **options: Any) -> Reward:
    judge = {"address": server.address, "model": "judge", **options}
    return Reward(RewardConfig.of({"judge": judge, "retries": retries}))


def values(outcomes: Sequence[Score | RewardFailure]) -> list[float | str]:
    return [one.value if isinstance(one, Score) else one.reason for one in outcomes]


SAMPLE = Sample(
    messages=[{"role": "user", "content": "Capital of France?"}, {"role": "assistant", "content": "Paris"}],
    text="Paris",
    ground_truth="Paris",
)


async def test_a_judge_sees_rubric_conversation_answer_and_reference(server: Server) -> None:
    server.reply = lambda body, at: chat("It is right.\nScore: 7")
    async with judged(server, rubric="Is it polite?", body={"top_p": 0.9}, weight=2.0) as reward:
        (outcome,) = await reward.score([SAMPLE])
    assert isinstance(outcome, Score)
    assert outcome.value == 1.4
    assert outcome.parts == {"judge": 0.7}
    assert outcome.info == {"judge.said": "It is right.\nScore: 7", "judge.votes": [0.7]}
    ((path, body),) = server.asked
    assert path == "/v1/chat/completions"
    assert (body["model"], body["temperature"], body["top_p"]) == ("judge", 0.0, 0.9)
    system, user = (message["content"] for message in body["messages"])
    assert "Is it polite?" in system
    assert '"conversation": [{"role": "user", "content": "Capital of France?"}]' in user
    assert '"answer": "Paris"' in user
    assert '"reference answer": "Paris"' in user
    assert (reward.counters.tokens_in, reward.counters.tokens_out) == (10, 5)


async def test_a_key_is_sent_and_the_reference_can_be_kept_from_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    server.reply = lambda body, at: chat("Score: 10")
    server.address += "/v1"
    async with judged(server, key_env="JUDGE_KEY", reference=False) as reward:
        assert values(await reward.score([SAMPLE])) == [1.0]
    assert server.keys == ["Bearer sk-1"]
    assert server.asked[0][0] == "/v1/chat/completions"
    assert "reference answer" not in server.asked[0][1]["messages"][1]["content"]


@pytest.mark.parametrize(
    ("options", "said", "wanted"),
    [
        ({}, "Fine.\n**Score: 8/10.**", 0.8),
        ({}, "Fine.\n**Score:** 8", 0.8),
        ({}, "Fine.\n**Score**: 8/10", 0.8),
        ({}, "Fine.\nScore: **8**/10", 0.8),
        ({}, "Fine.\nScore: `8.5`", 0.85),
        ({}, "Score: 2 * 4", None),
        ({}, "Score: 1_0", None),
        ({}, "<think>Score: 1</think>\n4", 0.4),
        ({"best": 5}, "Score: 4.5", 0.9),
        ({}, "I would say 8 of 10", None),
        ({}, "Score: 11", None),
        ({}, "", None),
        ({"parser": "regex", "pattern": r"\[\[(\d+)\]\]"}, "[[3]] no, [[6]] it is", 0.6),
        ({"parser": "regex", "pattern": r"\[\[(\w+)\]\]"}, "[[six]]", None),
        ({"parser": "json"}, 'So: {"why": {"a": 1}, "score": 5}', 0.5),
        ({"parser": "json", "field": "points"}, '```json\n{"points": 9}\n```', 0.9),
        ({"parser": "json"}, '{"score": "5"}', None),
        ({"parser": "json"}, '{"score": true}', None),
        ({"parser": "json"}, f'{{"score": {10**400}}}', None),
        ({"parser": "json"}, f'{{"score": -{10**400}}}', None),
    ],
)
async def test_parsers(server: Server, options: dict[str, Any], said: str, wanted: float | None) -> None:
    server.reply = lambda body, at: chat(said)
    async with judged(server, retries=0, **options) as reward:
        assert values(await reward.score([SAMPLE])) == ["bad_answer" if wanted is None else pytest.approx(wanted)]


@pytest.mark.parametrize("said", [[{"type": "text", "text": "Score: 7"}], {"score": 7}, 7, None])
async def test_a_message_that_is_no_text_is_no_verdict_and_costs_no_other_sample(server: Server, said: Any) -> None:
    server.reply = lambda body, at: chat(said if '"answer": "odd"' in body["messages"][1]["content"] else "Score: 5")
    async with judged(server, retries=0) as reward:
        assert values(await reward.score([Sample(text="odd"), SAMPLE])) == ["bad_answer", 0.5]


@pytest.mark.parametrize("usage", ["much", {"prompt_tokens": "much"}, None])
async def test_a_verdict_counts_whatever_a_server_says_of_its_tokens(server: Server, usage: Any) -> None:
    server.reply = lambda body, at: {**chat("Score: 5"), "usage": usage}
    async with judged(server) as reward:
        assert values(await reward.score([SAMPLE])) == [0.5]
    assert (reward.counters.tokens_in, reward.counters.tokens_out) == (0, 0)


async def test_what_a_judge_raises_is_a_failure_of_that_sample_and_logged(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def parsed(said: str, field: str) -> float:
        return 1 / len(said.partition("{")[0])

    monkeypatch.setattr("headrace.rewards.judge.json_score", parsed)
    server.reply = lambda body, at: chat("{}" if '"answer": "odd"' in body["messages"][1]["content"] else "One: {}")
    async with judged(server, retries=1, parser="json", best=1) as reward:
        odd, good = await reward.score([Sample(text="odd"), SAMPLE])
    assert good.value == 0.2
    assert (odd.source, odd.reason, odd.detail) == ("judge", "error", "it raised ZeroDivisionError: division by zero")
    assert reward.counters.retried == 1
    assert "in parsed" in caplog.text


async def test_a_judge_without_a_verdict_is_asked_again_with_some_temperature(server: Server) -> None:
    server.reply = lambda body, at: chat("Well." if at < 2 else "Score: 5")
    async with judged(server) as reward:
        assert values(await reward.score([SAMPLE])) == [0.5]
    assert [body["temperature"] for _, body in server.asked] == [0.0, 0.7, 0.7]
    assert reward.counters.retried == 2
    assert (reward.counters.tokens_in, reward.counters.tokens_out) == (30, 15)


async def test_votes_are_combined(server: Server) -> None:
    server.reply = lambda body, at: chat(f"Score: {(2, 2, 8)[at]}")
    async with judged(server, votes=3, combine="majority") as reward:
        (outcome,) = await reward.score([SAMPLE])
    assert isinstance(outcome, Score)
    assert outcome.value == 0.2
    assert sorted(outcome.info["judge.votes"]) == [0.2, 0.2, 0.8]
    assert {body["temperature"] for _, body in server.asked} == {0.7}


@pytest.mark.parametrize(
    ("how", "wanted"), [("mean", 0.375), ("median", 0.3), ("majority", 0.2), ("min", 0.2), ("max", 0.8)]
)
def test_how_votes_become_one(how: str, wanted: float) -> None:
    assert combined([0.8, 0.2, 0.2, 0.3], how) == pytest.approx(wanted if how != "median" else 0.25)
    assert combined([0.4, 0.2], "majority") == 0.2


@pytest.mark.parametrize(("quorum", "wanted"), [(None, "bad_answer"), (2, 0.5)])
async def test_a_quorum_is_enough(server: Server, quorum: int | None, wanted: float | str) -> None:
    server.reply = lambda body, at: chat("Score: 5" if at else "Hm.")
    async with judged(server, retries=0, votes=3, quorum=quorum) as reward:
        assert values(await reward.score([SAMPLE])) == [wanted]


async def test_a_servers_trouble_is_tried_again_and_then_told(server: Server) -> None:
    server.reply = lambda body, at: 503 if at < 2 else chat("Score: 5")
    async with judged(server) as reward:
        assert values(await reward.score([SAMPLE])) == [0.5]
        server.reply = lambda body, at: 429
        (outcome,) = await reward.score([SAMPLE])
    assert len(server.asked) == 6
    assert isinstance(outcome, RewardFailure)
    assert (outcome.reason, outcome.source) == ("unavailable", "judge")
    assert "429" in outcome.detail
    assert reward.counters.failed == {"unavailable": 1}


async def test_a_request_that_is_wrong_is_not_repeated(server: Server) -> None:
    server.reply = lambda body, at: 404
    async with judged(server) as reward:
        assert values(await reward.score([SAMPLE])) == ["unavailable"]
    assert len(server.asked) == 1


async def test_a_judge_that_hangs_costs_its_sample_alone(server: Server) -> None:
    server.reply = lambda body, at: None if '"answer": "hang"' in body["messages"][1]["content"] else chat("Score: 5")
    async with judged(server, retries=0, timeout_s=6.0) as reward:
        assert values(await reward.score([Sample(text="hang"), SAMPLE])) == ["timeout", 0.5]


async def test_no_more_requests_at_once_than_told(server: Server) -> None:
    async def reply() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return chat("Score: 5")

    server.reply = lambda body, at: reply()
    async with judged(server, concurrency=3, votes=2) as reward:
        assert values(await reward.score([SAMPLE] * 12)) == [0.5] * 12
    assert 1 < server.most_at_once <= 3


async def test_an_address_where_nobody_listens_is_unavailable() -> None:
    config = {"judge": {"address": "http://127.0.0.1:9", "model": "m"}, "retries": 0}
    async with Reward(RewardConfig.of(config)) as reward:
        assert values(await reward.score([SAMPLE])) == ["unavailable"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": "localhost"}, "is no server's address"),
        ({"parser": "regex"}, "`pattern` goes with `parser: regex`"),
        ({"parser": "regex", "pattern": "score"}, "has no group"),
        ({"votes": 3, "temperature": 0}, "the same vote 3 times"),
        ({"votes": 2, "quorum": 3}, "more than votes"),
        ({"rubrik": "x"}, "rubrik is not known; did you mean rubric?"),
    ],
)
def test_a_judge_that_cannot_work_is_told_before_it_is_asked(options: dict[str, Any], words: str) -> None:
    judge = {"address": "http://127.0.0.1:1", "model": "m", **options}
    with pytest.raises(InvalidInput, match=words.replace("?", "\\?")):
        RewardConfig.of({"judge": judge})


def test_a_key_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    config = RewardConfig.of({"judge": {"address": "http://127.0.0.1:1", "model": "m", "key_env": "JUDGE_KEY"}})
    with pytest.raises(InvalidInput, match="JUDGE_KEY is not set"):
        Reward(config)


def test_the_last_object_with_the_field_counts() -> None:
    assert json_score('{"score": 1} {"score": 2} {"other": 3}', "score") == 2.0
    assert json_score("{{{", "score") is None


# -- reward models -----------------------------------------------------------------------------------------------------


def classified(*rows: list[float]) -> dict[str, Any]:
    data = [{"index": at, "label": "LABEL_0", "probs": row, "num_classes": len(row)} for at, row in enumerate(rows)]
    return {"id": "classify-1", "object": "list", "model": "rm", "data": data, "usage": {"prompt_tokens": 3}}


def pooled(*rows: Any) -> dict[str, Any]:
    data = [{"index": at, "object": "pooling", "data": row} for at, row in enumerate(rows)]
    return {"id": "pool-1", "object": "list", "model": "rm", "data": data, "usage": {"prompt_tokens": 3}}


def modelled(server: Server, retries: int = 1, **options: Any) -> Reward:
    model = {"address": server.address, "model": "rm", **options}
    return Reward(RewardConfig.of({"reward_model": model, "retries": retries}))


def texts(*said: str) -> list[Sample]:
    return [Sample(messages=[{"role": "user", "content": "Q"}], text=text) for text in said]


async def test_answers_are_scored_in_batches_in_their_order(server: Server) -> None:
    def reply(body: dict[str, Any], at: int) -> dict[str, Any]:
        found = classified(*([float(text[-1]) / 10] for text in body["input"]))
        found["data"].reverse()
        return found

    server.reply = reply
    async with modelled(server, batch_size=2) as reward:
        outcomes = await reward.score(texts("1", "2", "3", "4", "5"))
    assert values(outcomes) == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert sorted((path, len(body["input"])) for path, body in server.asked) == [
        ("/classify", 1),
        ("/classify", 2),
        ("/classify", 2),
    ]
    assert server.asked[0][1] == {"model": "rm", "input": ["Q\n\n1", "Q\n\n2"]}


@pytest.mark.parametrize(
    ("options", "row", "wanted"),
    [
        ({}, [0.5], 0.5),
        ({}, [[0.1], [0.2], [0.6]], 0.6),
        ({"take": "mean"}, [[0.1], [0.2], [0.6]], 0.3),
        ({"take": "min"}, [[0.3, 0.1], [0.2, 0.9]], 0.1),
        ({}, -1.5, -1.5),
        ({}, [0.1, 0.9], "bad_answer"),
        ({}, None, "none"),
        ({}, ["0.5"], "wrong_type"),
        ({}, [], "bad_answer"),
    ],
)
async def test_pooling(server: Server, options: dict[str, Any], row: Any, wanted: float | str) -> None:
    server.reply = lambda body, at: pooled(row)
    label = {"label": 1} if options.get("take") == "min" else {}
    async with modelled(server, retries=0, route="pooling", **options, **label) as reward:
        assert values(await reward.score(texts("a"))) == [pytest.approx(wanted)]
    assert server.asked[0][0] == "/pooling"


async def test_of_several_classes_one_is_named(server: Server) -> None:
    server.reply = lambda body, at: classified([0.2, 0.8])
    async with modelled(server, label=1) as reward:
        assert values(await reward.score(texts("a"))) == [0.8]
    async with modelled(server) as reward:
        (outcome,) = await reward.score(texts("a"))
    assert "say by `label`" in str(outcome)


async def test_ids_and_messages_are_sent_where_told(server: Server) -> None:
    server.reply = lambda body, at: classified(*([0.5] for _ in body.get("input", [1])))
    sample = Sample(messages=SAMPLE.messages, prompt_ids=[1, 2], response_ids=[3])
    async with modelled(server, input="ids") as reward:
        assert values(await reward.score([sample, sample])) == [0.5, 0.5]
        assert values(await reward.score([SAMPLE])) == ["error"]
    async with modelled(server, input="messages") as reward:
        assert values(await reward.score([sample, sample])) == [0.5, 0.5]
    assert [body for _, body in server.asked] == [
        {"model": "rm", "input": [[1, 2, 3], [1, 2, 3]]},
        {"model": "rm", "messages": SAMPLE.messages},
        {"model": "rm", "messages": SAMPLE.messages},
    ]


async def test_one_answer_that_the_server_refuses_costs_no_other(server: Server) -> None:
    def reply(body: dict[str, Any], at: int) -> Any:
        return 400 if any("long" in text for text in body["input"]) else classified(*([0.5] for _ in body["input"]))

    server.reply = reply
    async with modelled(server) as reward:
        outcomes = await reward.score(texts("a", "too long", "b"))
    assert values(outcomes) == [0.5, "unavailable", 0.5]


async def test_a_score_that_is_no_number_is_asked_for_again_and_fails_alone(server: Server) -> None:
    def reply(body: dict[str, Any], at: int) -> Any:
        return pooled(*([None] if "odd" in text else [0.5] for text in body["input"]))

    server.reply = reply
    async with modelled(server, route="pooling") as reward:
        assert values(await reward.score(texts("a", "odd", "b"))) == [0.5, "none", 0.5]
    assert [len(body["input"]) for _, body in server.asked] == [3, 1, 1]
    assert reward.counters.retried == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [({"template": "{prompt}"}, "leaves out the"), ({"template": "{question} {answer}"}, "may name")],
)
def test_a_template_that_cannot_work_is_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        RewardConfig.of({"reward_model": {"address": "http://127.0.0.1:1", **options}})
