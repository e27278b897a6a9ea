"""What a client may do with its trajectories beside calling in them: list them, delete them, say how they sample."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from tests.gateway.kit import Running, told
from tests.gateway.rollout import RETRY, Rollout, Say, chat, content_of, error_of, in_front, uid_of, user

from headrace import DataPool

TENANTS = {
    "acme": {"keys": ["a"], "reward_keys": ["a-pays"], "channels": ["train"]},
    "beta": {"keys": ["b"], "channels": ["train"]},
}

FORCED = ["cold:temperature=0.5", 'ends:stop="END"', 'shown:stop="END",include_stop_str_in_output=true']


@pytest.fixture(scope="module")
def common(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder, sampling=FORCED, refuse=["warm:temperature=0"]) as found:
        yield found


@pytest.fixture
def gateway(common: Running, rollout: Rollout) -> Running:
    return common


@pytest.fixture(scope="module")
def shared_by_tenants(shared: Rollout, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.json"
    file.write_text(json.dumps({"tenants": TENANTS}))
    with in_front(shared, folder, tenants=str(file), api_key="agent", admin_key="admin") as found:
        yield found


def listed(gateway: Running, query: str = "", key: str = "") -> list[str]:
    """The uids of all pages."""
    found: list[str] = []
    cursor = "0"
    while cursor is not None:
        answer = gateway.get(f"/trajectories?cursor={cursor}&limit=2{query}", headers={"x-api-key": key})
        page = told(answer)
        found += [row["trajectory_uid"] for row in page["items"]]
        cursor = page["next"]
    return found


# -- listing and deleting ----------------------------------------------------------------------------------------------


def test_a_client_lists_its_trajectories(gateway: Running, rollout: Rollout) -> None:
    made = [gateway.init(prompt_uid=f"listed-{n % 2}", channel="listed")["trajectory_uid"] for n in range(5)]
    told(chat(gateway, f"/{made[0]}/listed-0", "hi"))
    gateway.complete(made[0], reward=1.0)
    assert sorted(listed(gateway, "&channel=listed")) == sorted(made)
    assert listed(gateway, "&channel=listed&complete=true") == made[:1]
    assert sorted(listed(gateway, "&channel=listed&prompt_uid=listed-1")) == sorted(made[1::2])
    (row,) = told(gateway.get("/trajectories?channel=listed&complete=true"))["items"]
    assert (row["prompt_uid"], row["steps"], row["reward"]) == ("listed-0", 1, 1.0)


@pytest.mark.parametrize("query", ["limit=x", "limit=-1", "limit=0", "complete=maybe", "cursor=%C2%B2", "limit=100001"])
def test_a_listing_that_cannot_be_made_says_why(gateway: Running, query: str) -> None:
    answer = gateway.get(f"/trajectories?{query}")
    assert answer.status_code == 400
    assert query.partition("=")[0] in answer.json()["detail"]


def test_what_is_deleted_is_gone(gateway: Running, rollout: Rollout, base: str) -> None:
    uid = uid_of(base)
    told(chat(gateway, base, "hi"))
    assert told(gateway.http.delete(f"/trajectories/{uid}")) == {"status": "ok"}
    assert uid not in listed(gateway)
    assert error_of(chat(gateway, base, "hi"), 409)
    assert told(gateway.http.delete(f"/trajectories/{uid}")) == {"status": "ok"}
    assert gateway.http.delete("/trajectories/nobody").status_code == 404


def test_what_a_trainer_has_is_not_deleted(gateway: Running, rollout: Rollout) -> None:
    made = gateway.init(channel="trained")
    told(chat(gateway, made["base_url"], "hi"))
    gateway.complete(made["trajectory_uid"], reward=1.0)
    assert gateway.pool.fetch_batch(1, channel="trained", timeout=0) is not None
    assert gateway.http.delete(f"/trajectories/{made['trajectory_uid']}").status_code == 409


def test_a_tenant_lists_and_deletes_its_own_and_no_others(shared_by_tenants: Running, rollout: Rollout) -> None:
    gateway = shared_by_tenants
    keys = {"acme": "a-pays", "beta": "b", "": "agent"}
    for key in keys.values():
        told(gateway.post("/init_trajectory", {"trajectory_uid": "same/name"}, headers={"x-api-key": key}))
    for key in keys.values():
        assert listed(gateway, key=key) == ["same/name"]
    assert sorted(listed(gateway, key="admin")) == ["acme/same/name", "beta/same/name", "same/name"]
    path = f"/trajectories/{quote('same/name', safe='')}"
    assert gateway.http.delete(path, headers={"x-api-key": "a"}).status_code == 401  # an agent's, where others pay
    assert gateway.get("/trajectories", headers={"x-api-key": "a"}).status_code == 401
    told(gateway.http.delete(path, headers={"x-api-key": "b"}))
    assert [listed(gateway, key=key) for key in keys.values()] == [["same/name"], [], ["same/name"]]


# -- sampling by trajectory --------------------------------------------------------------------------------------------


def test_a_trajectory_says_how_its_calls_are_sampled(gateway: Running, rollout: Rollout, folder: Path) -> None:
    made = gateway.init(sampling={"temperature": 0.25, "max_tokens": 7})
    told(chat(gateway, made["base_url"], "hi", temperature=0.9, top_p=0.5))
    assert isinstance(gateway.pool, DataPool)
    with in_front(rollout, folder, gateway.pool) as other:  # which only has the pool to ask
        told(chat(other, f"/{made['trajectory_uid']}/{made['prompt_uid']}", "ho", max_tokens=1))
    for order in rollout.orders:
        assert (order["temperature"], order["max_tokens"]) == (0.25, 7)
    assert [order["top_p"] for order in rollout.orders] == [0.5, 1.0]
    told(chat(gateway, gateway.init()["base_url"], "hi", temperature=0.9))
    assert rollout.orders[-1]["temperature"] == 0.9
    steps = gateway.steps(made["trajectory_uid"])
    assert [step.sampling["temperature"] for step in steps if step.sampling is not None] == [0.25, 0.25]


def test_one_that_is_there_learns_it_too(gateway: Running, rollout: Rollout) -> None:
    made = gateway.init()
    told(chat(gateway, made["base_url"], "hi"))
    gateway.init(trajectory_uid=made["trajectory_uid"], prompt_uid=made["prompt_uid"], sampling={"temperature": 0.25})
    told(chat(gateway, made["base_url"], "ho"))
    assert [order["temperature"] for order in rollout.orders] == [1.0, 0.25]


def test_its_channel_has_the_last_word(gateway: Running, rollout: Rollout) -> None:
    cold = gateway.init(channel="cold", sampling={"temperature": 0.25, "top_k": 3})
    told(chat(gateway, cold["base_url"], "hi"))
    assert (rollout.orders[0]["temperature"], rollout.orders[0]["top_k"]) == (0.5, 3)
    warm = gateway.init(channel="warm", sampling={"temperature": 0})
    assert error_of(chat(gateway, warm["base_url"], "hi"), 400)["code"] == "parameter_refused"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("begun", "asked", "said"),
    [
        ({"sampling": {"stop": ["END"]}}, {}, "one two "),
        ({"sampling": {"stop": ["END"]}}, {"stop": "two"}, "one two "),
        ({"channel": "ends"}, {"stop": "two"}, "one two "),
        ({"channel": "shown"}, {"stop": "two"}, "one two END"),
        ({"sampling": {"include_stop_str_in_output": True}}, {"stop": "END"}, "one two END"),
    ],
    ids=["trajectory", "before the agent", "channel", "channel shows it", "trajectory shows it"],
)
def test_an_answer_ends_where_whoever_has_the_last_word_says(
    gateway: Running, rollout: Rollout, begun: dict[str, Any], asked: dict[str, Any], said: str, stream: bool
) -> None:
    made = gateway.init(**begun)
    rollout.script.append(Say("one two END", shown=said, ended=False, stop_reason="END"))
    for headers in (None, RETRY):  # what is given again ends there too
        answer = chat(gateway, made["base_url"], "hi", stream=stream, headers=headers, **asked)
        shown = content_of(answer.text) if stream else told(answer)["choices"][0]["message"]["content"]
        assert shown == said
    (order,) = rollout.orders
    assert order["stop"] == ["END"]
    (step,) = gateway.steps(made["trajectory_uid"])
    assert step.quarantined is None


def test_an_agent_of_anthropic_is_told_the_stop_that_was_forced(gateway: Running, rollout: Rollout) -> None:
    base = gateway.init(channel="ends")["base_url"]
    rollout.script.append(Say("one END", shown="one ", ended=False, stop_reason="END"))
    body = {"model": "m", "max_tokens": 9, "messages": [user("hi")]}
    found = told(gateway.post(f"{base}/v1/messages", body))
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")
    assert [block["text"] for block in found["content"]] == ["one "]


@pytest.mark.parametrize("sampling", [{"temperature": "hot"}, {"temperature": -1}, {"colour": 1}, {"max_tokens": 0}])
def test_what_is_no_parameter_is_refused(gateway: Running, sampling: dict[str, Any]) -> None:
    answer = gateway.post("/init_trajectory", {"sampling": sampling})
    assert answer.status_code == 400
    assert next(iter(sampling)) in answer.json()["detail"]


# -- names -------------------------------------------------------------------------------------------------------------


def test_names_that_init_trajectory_refuses_begin_nothing_with_open_either(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder, open=True) as gateway:
        for uid, prompt in (("health", "p"), ("pool", "p"), ("%2e%2e", "p"), ("u", "%2e%2e"), ("u", "%2e")):
            path = f"{gateway.address}/{uid}/{prompt}/v1/chat/completions"
            assert raw_post(path).startswith(b"HTTP/1.1 400 ")
        assert listed(gateway) == []
        told(chat(gateway, "/u/p", "hi"))
        assert listed(gateway) == ["u"]


def raw_post(url: str) -> bytes:
    """The answer's first line to a call whose path no client tidies up."""
    parts, data = urlsplit(url), b'{"messages": [{"role": "user", "content": "hi"}]}'
    with socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=240) as connection:
        head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection.makefile("rb").readline()
