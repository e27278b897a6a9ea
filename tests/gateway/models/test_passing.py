"""A model with mode `pass`: its calls go on as they are, are answered as it answers, and leave no trace."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.kit import Running, told
from tests.gateway.models.kit import Provider, provided, with_models
from tests.gateway.rollout import Rollout, chat, error_of, uid_of, user

from headrace import DataPool

AGENT, ADMIN, SECRET = "agent-key", "admin-key", "providers-own-key"


@pytest.fixture(scope="module")
def somewhere() -> Iterator[Provider]:
    with provided() as found:
        yield found


@pytest.fixture
def provider(somewhere: Provider) -> Provider:
    """As if it were new."""
    fresh = Provider(somewhere.address)
    vars(somewhere).update(vars(fresh))
    return somewhere


@pytest.fixture(scope="module")
def gateway(
    shared: Rollout, somewhere: Provider, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    models = {
        "judge": {"mode": "pass", "addresses": somewhere.address, "pattern": "gpt-*"},
        "renamed": {"mode": "pass", "addresses": f"{somewhere.address}/api/v9/", "served": "Their Name"},
    }
    file = tmp_path_factory.mktemp("models") / "models.json"
    with DataPool() as pool, with_models(pool, shared.address, folder, file, models) as found:
        yield found


@pytest.fixture
def base(gateway: Running) -> str:
    return str(gateway.init()["base_url"])


BODY = b'{"messages": [{"role":"user", "content": [{"type": "image"}]}],\n "x": 1e2, "model": "judge"}'


@pytest.mark.parametrize(
    ("path", "reached"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/completions", "/v1/completions"),
        ("/v1/messages", "/v1/messages"),
        ("/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/v1/responses", "/v1/responses"),
        ("/v1/embeddings", "/v1/embeddings"),
        ("/v1/chat%2Fcompletions", "/v1/chat/completions"),
    ],
)
def test_whichever_call_it_is_the_body_goes_on_byte_for_byte(
    gateway: Running, rollout: Rollout, provider: Provider, base: str, path: str, reached: str
) -> None:
    answer = gateway.post(f"{base}{path}?beta=true", BODY, headers={"anthropic-version": "2023-06-01"})
    assert (answer.status_code, answer.content) == (200, provider.answer)
    (asked,) = provider.asked
    assert (asked.path, asked.query, asked.body) == (reached, "beta=true", BODY)
    assert asked.headers["anthropic-version"] == "2023-06-01"
    assert asked.headers["host"] in provider.address
    assert rollout.orders == []
    assert gateway.steps(uid_of(base)) == []


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files",
        "/v1/fine_tuning/jobs",
        "/v1/chat/completions/7",
        "/v1/chat//completions",
        "/v1/../../admin/keys",
        "/v1/%2e%2e/%2e%2e/admin/keys",
        "/v1/..%2f..%2fadmin%2fkeys",
        "/v1/%252e%252e/admin/keys",
        "/v1/chat/completions/../../../admin/keys",
        "/v1/embeddings/..%2F..%2Fadmin",
        "/v1/embeddings%3Fx",
        "/v1/v1/embeddings",
        "/v1/http://elsewhere.example/embeddings",
    ],
)
def test_no_other_path_reaches_the_provider(gateway: Running, provider: Provider, base: str, path: str) -> None:
    """Sent as it is: clients would otherwise resolve the dots themselves. Below a trajectory, and at the root."""
    for model in ("judge", "renamed"):
        for prefix in (httpx.URL(base).path, ""):
            connection = http.client.HTTPConnection(httpx.URL(base).netloc.decode(), timeout=240)
            connection.request("POST", prefix + path, f'{{"model": "{model}"}}', {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.status in (403, 404), answer.read()
            answer.read()
            connection.close()
    assert provider.asked == []


def test_a_path_that_is_not_passed_on_is_named_with_those_that_are(gateway: Running, provider: Provider) -> None:
    base = str(gateway.init()["base_url"])
    fault = error_of(gateway.post(f"{base}/v1/files", {"model": "judge"}), 404)
    assert fault["code"] == "path_not_passed"
    for named in ("'judge'", "'files'", "chat/completions", "`paths`"):
        assert named in fault["message"]


def test_a_models_own_paths_are_passed_on_and_no_others(
    rollout: Rollout, provider: Provider, folder: Path, tmp_path: Path, pool: DataPool
) -> None:
    models = {"judge": {"mode": "pass", "addresses": provider.address, "paths": ["/v1/score", "audio/speech/"]}}
    with with_models(pool, rollout.address, folder, tmp_path / "m.json", models) as gateway:
        base = gateway.init()["base_url"]
        for path in ("score", "audio/speech"):
            assert gateway.post(f"{base}/v1/{path}", {"model": "judge"}).status_code == 200
        for path in ("embeddings", "audio", "chat/completions"):
            assert error_of(gateway.post(f"{base}/v1/{path}", {"model": "judge"}), 404)["code"] == "path_not_passed"
    assert [asked.path for asked in provider.asked] == ["/v1/score", "/v1/audio/speech"]


def test_a_name_that_fits_a_pattern_is_passed_on_and_any_other_is_the_policys(
    gateway: Running, rollout: Rollout, provider: Provider, base: str
) -> None:
    told(chat(gateway, base, "hi", model="gpt-9-mini"))
    assert (len(provider.asked), len(rollout.orders)) == (1, 0)
    told(chat(gateway, base, "hi", model="anything"))
    assert (len(provider.asked), len(rollout.orders)) == (1, 1)


def test_a_provider_that_knows_it_by_another_name_is_told_that_name_and_nothing_else_changes(
    gateway: Running, provider: Provider, base: str
) -> None:
    gateway.post(f"{base}/v1/chat/completions", b'{"temperature":1.50, "model":"renamed","messages":[ 1 ]}')
    (asked,) = provider.asked
    assert asked.path == "/api/v9/chat/completions"
    assert b'"temperature":1.50' in asked.body
    assert b'"messages":[ 1 ]' in asked.body
    assert b'"model":"Their Name"' in asked.body


def test_a_stream_comes_through_in_its_own_pieces(gateway: Running, provider: Provider, base: str) -> None:
    provider.parts = [b"event: ping\n", b"data: {}\n\n", b": odd \xff bytes\n\n", b"data: last, without an end"]
    answer = gateway.post(f"{base}/v1/messages", BODY)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.content == b"".join(provider.parts)


def test_a_stream_that_breaks_off_is_broken_off(gateway: Running, provider: Provider, base: str) -> None:
    provider.parts, provider.cut = [b"data: 1\n\n"], True
    with pytest.raises(httpx.RemoteProtocolError):
        gateway.post(f"{base}/v1/chat/completions", BODY)


def test_its_errors_and_headers_are_the_providers_own(gateway: Running, provider: Provider, base: str) -> None:
    provider.status, provider.answer = 429, b'{"oh": "no"}'
    provider.headers = {"retry-after": "7", "x-ratelimit-remaining": "0", "location": "/elsewhere"}
    answer = gateway.post(f"{base}/v1/chat/completions", BODY)
    assert (answer.status_code, answer.content) == (429, provider.answer)
    assert {name: answer.headers[name] for name in provider.headers} == provider.headers


def test_a_path_that_nobody_has_is_404_for_a_recorded_model(gateway: Running, provider: Provider, base: str) -> None:
    fault = error_of(gateway.post(f"{base}/v1/embeddings", {"model": "policy", "input": "x"}), 404)
    assert fault["code"] == "no_route"
    assert error_of(gateway.post(f"{base}/v1/embeddings", b"no json"), 404)["code"] == "no_route"
    assert provider.asked == []


def test_a_provider_that_is_not_there_is_an_error_of_the_dialect(
    rollout: Rollout, folder: Path, tmp_path: Path, pool: DataPool
) -> None:
    models = {"judge": {"mode": "pass", "addresses": "http://127.0.0.1:1"}}
    with with_models(pool, rollout.address, folder, tmp_path / "m.json", models) as gateway:
        base = gateway.init()["base_url"]
        fault = error_of(chat(gateway, base, "hi", model="judge"), 502)
        assert "'judge'" in fault["message"]


def test_the_gateways_keys_stay_here_and_the_providers_goes_where_the_agents_was(
    rollout: Rollout, provider: Provider, folder: Path, tmp_path: Path, pool: DataPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_TEST_KEY", SECRET)
    models = {
        "keyed": {"mode": "pass", "addresses": provider.address, "key_env": "HEADRACE_TEST_KEY"},
        "bare": {"mode": "pass", "addresses": provider.address},
    }
    keys = {"api_key": AGENT, "admin_key": ADMIN}
    with with_models(pool, rollout.address, folder, tmp_path / "m.json", models, **keys) as gateway:
        openai, anthropic = {"authorization": f"Bearer {AGENT}"}, {"x-api-key": AGENT}
        base = told(gateway.post("/init_trajectory", headers=openai))["base_url"]

        def sent(model: str, headers: dict[str, str]) -> dict[str, str]:
            told(chat(gateway, base, "hi", model=model, headers={**headers, "x-headrace-session": "s"}))
            found = provider.asked[-1].headers
            assert AGENT not in str(found)
            assert not any(name.startswith("x-headrace") for name in found)
            return {name: found[name] for name in ("authorization", "x-api-key") if name in found}

        assert sent("keyed", openai) == {"authorization": f"Bearer {SECRET}"}
        assert sent("keyed", anthropic) == {"x-api-key": SECRET}
        assert sent("bare", openai) == {}
        error_of(chat(gateway, base, "hi", model="keyed", headers={"x-api-key": "wrong"}), 401)
        assert len(provider.asked) == 3


def test_without_keys_here_the_agents_own_key_is_for_the_provider(
    gateway: Running, provider: Provider, base: str
) -> None:
    gateway.post(f"{base}/v1/chat/completions", BODY, headers={"authorization": "Bearer theirs"})
    assert provider.asked[0].headers["authorization"] == "Bearer theirs"


def test_its_calls_are_in_no_batch_ever(rollout: Rollout, provider: Provider, folder: Path, tmp_path: Path) -> None:
    models: dict[str, Any] = {"judge": {"mode": "pass", "addresses": provider.address}}
    with DataPool() as pool, with_models(pool, rollout.address, folder, tmp_path / "m.json", models) as gateway:
        begun = gateway.init()
        base = begun["base_url"]
        first = told(chat(gateway, base, "hi"))["choices"][0]["message"]
        for stream in (False, True):
            chat(gateway, base, [user("hi"), first, user("how good was that?")], model="judge", stream=stream)
        told(chat(gateway, base, [user("hi"), first, user("more")]))
        gateway.complete(begun["trajectory_uid"], reward=1)
        assert len(provider.asked) == 2
        channels = pool.stats()["channels"]
        assert {name: found["ledger"]["submitted"] for name, found in channels.items()} == {"train": 2}
        (group,) = pool.fetch_batch(1).groups
        assert [len(trajectory) for trajectory in group.trajectories] == [2]
        assert gateway.counted("passed") == {"judge": 2}
