"""Which servers are found fit, and what is said of those that are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.kit import Client, hold_until_resumed, serving
from tests.gateway.upstream.kit import OPTIONS, Puppet, Request, connected, streamed, until, upstream_request
from tests.gateway.wire import hangs

from headrace.data import InvalidInput
from headrace.gateway.upstream import NoRolloutServer, Upstream, UpstreamOptions
from headrace.tokens.check import SAMPLE
from headrace.tokens.vocabulary import Vocabulary

Make = Callable[..., Any]


class Modal(Puppet):
    """A puppet whose log-probs are those of logits / temperature, or are not."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def _answer(self, request: Request) -> tuple[int, Any]:
        status, answer = super()._answer(request)
        if request.path == "/v1/completions" and "return_tokens_as_token_ids" in request.json:
            by = 1 / request.json["temperature"] if self.mode == "processed" else 1.0
            answer["choices"][0]["logprobs"]["top_logprobs"] = [{"token_id:1": -1.0 * by, "token_id:2": -3.0 * by}]
        return status, answer


@pytest.fixture
async def modal() -> Any:
    made = []

    async def make(mode: str) -> Modal:
        made.append(Modal(mode))
        await made[-1].start()
        return made[-1]

    yield make
    for found in made:
        await found.stop()


@pytest.fixture
def raw_engine(folder: Path) -> Iterator[Client]:
    """An engine whose log-probs are of temperature 1, whatever it samples at."""
    with serving(model=str(folder), served_model_name="tiny") as client:
        yield client


async def test_a_real_engine_is_found_fit_and_described(raw_engine: Client, vocabulary: Vocabulary) -> None:
    async with connected(vocabulary, raw_engine.host) as upstream:
        (found,) = upstream.describe()
        assert (upstream.trouble, upstream.ready) == (None, True)
        assert upstream.log_prob_mode == found["log_prob_mode"]
    assert {name: found[name] for name in ("state", "reason", "wire", "model", "max_model_len", "log_prob_mode")} == {
        "state": "up",
        "reason": None,
        "wire": "generate",
        "model": "tiny",
        "max_model_len": 2048,
        "log_prob_mode": "raw",
    }


async def test_a_server_without_generate_is_asked_for_completions(puppet: Make, vocabulary: Vocabulary) -> None:
    server = await puppet()
    async with connected(vocabulary, server) as upstream:
        assert upstream.describe()[0]["wire"] == "completions"
        await upstream.sample(upstream_request())
    assert [asked["model"] for asked in server.orders] == ["puppet"]


async def test_a_server_that_must_have_generate_and_has_not_is_unfit(puppet: Make, vocabulary: Vocabulary) -> None:
    async with connected(vocabulary, await puppet(), wire="generate") as upstream:
        assert "--enable-scale-out" in (upstream.trouble or "")


async def test_another_tokenizer_is_trouble_and_never_used(puppet: Make, vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode(SAMPLE)
    bad, good = await puppet(), await puppet()
    bad.answers["/tokenize"] = (200, {"tokens": [*ids[:3], 1, *ids[4:]]})
    good.answers["/tokenize"] = (200, {"tokens": ids})
    async with connected(vocabulary, bad, good) as upstream:
        assert bad.address in (upstream.trouble or "")
        assert "token 3" in (upstream.trouble or "")
        assert {(await upstream.sample(upstream_request())).server for _ in range(3)} == {good.address}


async def test_a_smaller_vocabulary_is_trouble(puppet: Make, vocabulary: Vocabulary) -> None:
    server = await puppet()
    refusal = {"error": {"message": f"Token id {vocabulary.size - 1} is out of vocabulary", "code": 400}}
    server.answers["/v1/completions"] = (400, refusal)
    async with connected(vocabulary, server) as upstream:
        assert f"{vocabulary.size - 1} is out of vocabulary" in (upstream.trouble or "")
        with pytest.raises(NoRolloutServer, match="is unfit"):
            await upstream.sample(upstream_request())


@pytest.mark.parametrize("mode", ["raw", "processed"])
async def test_the_log_prob_mode_is_found(modal: Make, vocabulary: Vocabulary, mode: str) -> None:
    async with connected(vocabulary, await modal(mode), log_prob_mode=mode) as upstream:
        assert (upstream.log_prob_mode, upstream.trouble) == (mode, None)


async def test_log_probs_that_the_trainer_does_not_expect_are_trouble(modal: Make, vocabulary: Vocabulary) -> None:
    async with connected(vocabulary, await modal("raw"), log_prob_mode="processed") as upstream:
        assert "--logprobs-mode processed_logprobs" in (upstream.trouble or "")
        assert not upstream.ready


async def test_servers_with_different_log_probs_are_trouble(modal: Make, vocabulary: Vocabulary) -> None:
    raw, processed = await modal("raw"), await modal("processed")
    async with connected(vocabulary, raw, processed) as upstream:
        assert "different log-probs" in (upstream.trouble or "")
        await upstream.remove(raw.address)
        assert upstream.trouble is None


async def test_a_server_that_comes_later_and_does_not_match_is_left_out_alone(
    puppet: Make, modal: Make, vocabulary: Vocabulary
) -> None:
    good = await modal("raw")
    wrong, other = await puppet(), await modal("processed")
    wrong.answers["/tokenize"] = (200, {"tokens": [1]})
    async with connected(vocabulary, good) as upstream:
        for late in (wrong, other):
            await upstream.add(late.address)
        found = {server["address"]: (server["state"], server["reason"]) for server in upstream.describe()}
        assert [found[server.address][0] for server in (good, wrong, other)] == ["up", "unfit", "unfit"]
        assert f"it gives processed log-probs, {good.address} raw ones" in found[other.address][1]
        assert (upstream.trouble, upstream.ready) == (None, True)
        assert {(await upstream.sample(upstream_request())).server for _ in range(3)} == {good.address}


async def test_trouble_ends_when_the_server_was_mended(puppet: Make, vocabulary: Vocabulary) -> None:
    server = await puppet()
    server.answers["/tokenize"] = (200, {"tokens": [1]})
    async with connected(vocabulary, server) as upstream:
        assert upstream.trouble is not None
        server.answers["/tokenize"] = (200, {"tokens": vocabulary.encode(SAMPLE)})
        await until(lambda: upstream.ready)
        assert upstream.trouble is None


async def test_a_server_out_of_reach_is_only_down_and_verified_when_it_comes_up(
    puppet: Make, vocabulary: Vocabulary
) -> None:
    server = await puppet()
    port = int(server.address.rpartition(":")[2])
    await server.stop()
    async with connected(vocabulary, server) as upstream:
        assert (upstream.trouble, upstream.describe()[0]["state"]) == (None, "down")
        with pytest.raises(NoRolloutServer, match="is down") as caught:
            await upstream.sample(upstream_request())
        assert caught.value.retry_after_s > 0
        await server.start(port)
        await until(lambda: upstream.ready)
        assert (await upstream.sample(upstream_request())).server == server.address


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/models", (200, b"<html>")),
        ("/v1/models", (200, {"data": []})),
        ("/v1/models", (401, {"error": "Unauthorized"})),
        ("/health", (503, b"")),
        ("/v1/completions", (500, b"")),
    ],
)
async def test_a_server_that_cannot_be_verified_is_down(
    puppet: Make, vocabulary: Vocabulary, path: str, answer: Any
) -> None:
    server = await puppet(**{path: answer})
    async with connected(vocabulary, server) as upstream:
        (found,) = upstream.describe()
        assert found["state"] == "down"
        assert path in found["reason"]


async def test_a_server_that_never_answers_a_probe_does_not_hold_up_the_start(
    puppet: Make, vocabulary: Vocabulary
) -> None:
    bad, good = await puppet(), await puppet()
    bad.behave_always = hangs
    async with connected(vocabulary, bad, good, verify_s=6) as upstream:
        assert [found["state"] for found in upstream.describe()] == ["down", "up"]


async def test_a_server_that_hangs_does_not_keep_others_from_being_found_again(
    puppet: Make, vocabulary: Vocabulary
) -> None:
    bad, good = await puppet(), await puppet()
    async with connected(vocabulary, bad, good) as upstream:
        for server in (bad, good):
            await server.stop()
        with pytest.raises(NoRolloutServer):
            await upstream.sample(upstream_request())
        bad.behave_always, known = hangs, len(bad.seen)
        await bad.start(int(bad.address.rpartition(":")[2]))
        await until(lambda: len(bad.seen) > known)
        await good.start(int(good.address.rpartition(":")[2]))
        await until(lambda: upstream.ready)
        assert (await upstream.sample(upstream_request())).server == good.address


# -- versions ----------------------------------------------------------------------------------------------------------


async def test_a_servers_first_version_is_what_it_tells(puppet: Make, vocabulary: Vocabulary) -> None:
    numbered, named = await puppet(), await puppet()
    numbered.answers["/weight_info"] = (200, {"weight_version": "12"})
    named.answers["/weight_info"] = (200, {"weight_version": "default"})
    async with connected(vocabulary, numbered, named, version=4) as upstream:
        assert upstream.versions == {numbered.address: 12, named.address: 4}
        assert upstream.version == 12


async def test_versions_are_set_for_all_or_for_one(puppet: Make, vocabulary: Vocabulary) -> None:
    one, other = await puppet(), await puppet()
    async with connected(vocabulary, one, other) as upstream:
        upstream.set_version(5)
        upstream.set_version(6, one.address)
        assert upstream.versions == {one.address: 6, other.address: 5}
        with pytest.raises(InvalidInput, match="no rollout server"):
            upstream.set_version(7, "http://elsewhere:1")
        with pytest.raises(InvalidInput, match="version"):
            upstream.set_version(-1)
        answers = [await upstream.sample(upstream_request()) for _ in range(2)]
        assert {answer.server: answer.choices[0].spans for answer in answers} == {
            one.address: ((0, 6),),
            other.address: ((0, 5),),
        }


async def test_a_server_added_later_begins_with_the_version_of_all(puppet: Make, vocabulary: Vocabulary) -> None:
    server = await puppet()
    async with connected(vocabulary) as upstream:
        upstream.set_version(9)
        await upstream.add(server.address)
        assert upstream.versions == {server.address: 9}


async def test_a_server_that_was_started_anew_takes_no_orders_until_it_has_its_weights_again(
    puppet: Make, vocabulary: Vocabulary
) -> None:
    server = await puppet()
    port = int(server.address.rpartition(":")[2])
    async with connected(vocabulary, server, probe_s=0.01) as upstream:
        upstream.set_version(7)
        server.answers["/weight_info"] = (200, {"weight_version": "7"})
        await upstream.note_versions()
        await server.stop()
        with pytest.raises(NoRolloutServer):
            await upstream.sample(upstream_request())
        server.answers["/weight_info"] = (200, {"weight_version": "default"})
        await server.start(port)
        await until(lambda: "started anew" in upstream.describe()[0]["reason"])
        server.answers["/weight_info"] = (200, {"weight_version": "8"})
        await until(lambda: upstream.ready)
        assert upstream.version == 8


async def test_a_server_that_never_told_a_version_comes_back_as_it_was(puppet: Make, vocabulary: Vocabulary) -> None:
    server = await puppet()
    port = int(server.address.rpartition(":")[2])
    async with connected(vocabulary, server, probe_s=0.01) as upstream:
        upstream.set_version(7)
        await upstream.note_versions()
        await server.stop()
        with pytest.raises(NoRolloutServer):
            await upstream.sample(upstream_request())
        await server.start(port)
        await until(lambda: upstream.ready)
        assert upstream.version == 7


# -- servers that come and go ------------------------------------------------------------------------------------------


async def test_an_added_server_takes_orders_and_a_removed_one_none(puppet: Make, vocabulary: Vocabulary) -> None:
    old, new = await puppet(), await puppet()
    async with connected(vocabulary, old) as upstream:
        await upstream.add(new.address + "/v1/")
        assert {(await upstream.sample(upstream_request())).server for _ in range(2)} == {old.address, new.address}
        await upstream.remove(old.address)
        assert {(await upstream.sample(upstream_request())).server for _ in range(3)} == {new.address}
        assert [found["address"] for found in upstream.describe()] == [new.address]


async def test_what_is_in_flight_at_a_removed_server_ends(own: Client, vocabulary: Vocabulary) -> None:
    async with connected(vocabulary, own.host) as upstream:
        await asyncio.to_thread(hold_until_resumed, own)
        stream = streamed(upstream, upstream_request(max_tokens=50, ignore_eos=True))
        tokens = len((await anext(stream)).ids)
        await upstream.remove(own.host)
        assert [found["state"] for found in upstream.describe()] == ["leaving"]
        with pytest.raises(NoRolloutServer):
            await upstream.sample(upstream_request())
        await asyncio.to_thread(own.post, "/resume")
        async for piece in stream:
            tokens += len(piece.ids)
        assert tokens == 50
        assert upstream.describe() == []


@pytest.mark.parametrize("address", ["", "ftp://host", "http://", "http://host:port", "http://host/?x=1"])
async def test_an_address_that_is_none_is_refused(vocabulary: Vocabulary, address: str) -> None:
    async with connected(vocabulary) as upstream:
        with pytest.raises(InvalidInput, match="http://host:8001"):
            await upstream.add(address)


async def test_without_any_server_an_order_is_told_so(vocabulary: Vocabulary) -> None:
    async with connected(vocabulary) as upstream:
        with pytest.raises(NoRolloutServer, match="none is configured"):
            await upstream.sample(upstream_request())
        with pytest.raises(NoRolloutServer):
            await upstream.models()


@pytest.mark.parametrize(
    "bad", [{"balance": "random"}, {"wire": "grpc"}, {"idle_s": 0}, {"version": -1}, {"call_s": float("inf")}]
)
def test_options_that_could_not_work_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(bad))):
        UpstreamOptions(**{**OPTIONS, **bad})


async def test_one_that_was_never_started_can_be_closed() -> None:
    upstream = Upstream(["http://127.0.0.1:9"], UpstreamOptions())
    await upstream.close()
    assert [found["state"] for found in upstream.describe()] == ["new"]


async def test_a_server_that_others_paused_is_left_alone_until_it_goes_on(puppet: Make, vocabulary: Vocabulary) -> None:
    server = await puppet()
    server.answers["/is_paused"] = (200, {"is_paused": True})
    async with connected(vocabulary, server, probe_s=0.01) as upstream:
        await until(lambda: sum(request.path == "/is_paused" for request in server.seen) >= 3)
        assert (upstream.ready, upstream.describe()[0]["state"]) == (False, "paused")
        assert not {"/v1/completions", "/resume"} & {request.path for request in server.seen}
        server.answers["/is_paused"] = (200, {"is_paused": False})
        await until(lambda: upstream.ready)


async def test_a_server_that_stays_paused_is_let_go_on_in_the_end(puppet: Make, vocabulary: Vocabulary) -> None:
    server = await puppet()
    server.answers["/is_paused"] = (200, {"is_paused": True})
    async with connected(vocabulary, server, probe_s=0.01, foreign_pause_s=0.05) as upstream:
        await until(lambda: upstream.ready)
    assert [request.path for request in server.seen].count("/resume") == 1
