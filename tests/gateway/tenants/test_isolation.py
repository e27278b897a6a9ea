"""What a tenant learns of another's trajectories, by any route that can name one: nothing, and it changes nothing.

The routes come from the table of `tests/gateway/test_route_keys.py`, which has every route that a gateway has: one that
takes a trajectory's name and has no body here fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.kit import Running, told
from tests.gateway.rollout import Rollout, chat, user
from tests.gateway.tenants.test_tenants import begin, by, serving
from tests.gateway.test_route_keys import BASE, ROUTES

Json = dict[str, Any]
#: Both write to one channel, so that nothing but their names keeps them apart.
TENANTS: Json = {"alpha": {"keys": ["alpha-key"]}, "beta": {"keys": ["beta-key"], "reward_keys": ["beta-reward"]}}
SECRET, TRUTH = "what alpha's model said", "the truth of alpha's task"
MESSAGES = [user("what alpha's agent asked")]

#: What is sent to a route that names a trajectory, by the route's last part.
BODIES: dict[str, Json] = {
    "chat/completions": {"messages": MESSAGES},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": MESSAGES, "max_tokens": 8},
    "messages/count_tokens": {"messages": MESSAGES},
    "{rest:path}": {"model": "m", "input": "hi"},
    "register_trajectory": {},
    "models": {},
    "reward": {"reward": 9.0},
    "complete_trajectory": {"reward": 9.0},
    "fail_trajectory": {"reason": "because"},
    "": {},  # a trajectory itself, shown or deleted
}
#: Those whose answer is 200 all the same: they say nothing of any trajectory, or of one that is the caller's own.
OF_ITS_OWN = {"register_trajectory", "models", "fail_trajectory"}


@pytest.fixture(scope="module")
def gateway(shared: Rollout, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(shared, folder, tmp_path_factory.mktemp("tenants"), TENANTS) as found:
        yield found


@pytest.fixture
def alphas(gateway: Running, rollout: Rollout) -> Json:
    """A call of alpha's, its trajectory and its answer."""
    rollout.reply = lambda asked: SECRET
    begun = begin(gateway, "alpha-key", prompt_uid="p", metadata={"truth": TRUTH})
    body = {"messages": MESSAGES, "model": "m"}
    headers = {**by("alpha-key"), "idempotency-key": "once"}
    answer = gateway.post(f"{begun['base_url']}/v1/chat/completions", body, headers=headers)
    assert told(answer)["choices"][0]["message"]["content"] == SECRET
    rollout.reply = lambda asked: "what anybody may hear"
    return {"uid": begun["trajectory_uid"], "base": begun["base_url"], "body": body, "headers": headers}


def named(uid: str) -> list[tuple[str, str, str]]:
    """Every route that names a trajectory: method, last part, and the path to this one."""
    found = []
    for method, path in ROUTES:
        if "{trajectory_uid}" not in path:
            continue
        below = path.removeprefix(f"{BASE}/v1/").removeprefix(f"{BASE}/")
        last = below if path.startswith(BASE) else path.split("/")[1] if path.count("/") > 1 else ""
        last = "" if last == "trajectories" else last
        url = path.replace("{trajectory_uid}", uid).replace("{prompt_uid}", "p").replace("{rest:path}", "embeddings")
        found.append((method, last, url))
    return found


def unseen(answer: httpx.Response) -> None:
    for secret in (SECRET, TRUTH, "alpha"):
        assert secret not in answer.text.replace(str(answer.request.url.path), ""), answer.text


@pytest.mark.parametrize("name", ["{uid}", "alpha%2F{uid}", "..%2Falpha%2F{uid}", "alpha%2F..%2Falpha%2F{uid}"])
def test_no_route_that_names_a_trajectory_finds_anothers(gateway: Running, alphas: Json, name: str) -> None:
    before = gateway.pool.trajectory(f"alpha/{alphas['uid']}").to_dict()
    uid = name.format(uid=alphas["uid"])
    tried = sorted(named(uid), key=lambda each: each[1] == "register_trajectory")  # which makes one of that name
    assert {last for _, last, _ in tried} == BODIES.keys(), "say above what is sent to each"
    for method, last, path in tried:
        for key in ("beta-key", "beta-reward", "wrong", ""):
            body = None if method == "GET" else BODIES[last]
            headers = {**(by(key) if key else {}), "idempotency-key": "once"}
            answer = gateway.http.request(method, path, json=body, headers=headers)
            where = f"{method} {path} with {key!r}: {answer.status_code} {answer.text[:200]}"
            allowed = {401} if key in ("wrong", "") else {400, 401, 403, 404} | ({200} if last in OF_ITS_OWN else set())
            allowed |= {404} if last == "{rest:path}" else set()  # there is no provider to pass it on to
            assert answer.status_code in allowed, where
            if "alpha" not in path:
                unseen(answer)
    assert gateway.pool.trajectory(f"alpha/{alphas['uid']}").to_dict() == before


def test_no_listing_and_no_number_tells_of_anothers(gateway: Running, alphas: Json) -> None:
    for key in ("beta-key", "beta-reward"):
        for query in ("", "?channel=train", "?prompt_uid=p", "?prompt_uid=alpha%2Fp", "?cursor=0-0&limit=1000"):
            answer = gateway.get(f"/trajectories{query}", headers=by(key))
            assert answer.status_code in (200, 401)
            assert alphas["uid"] not in answer.text
        for path in ("/stats", "/metrics", "/pool/stats", "/pool/trajectories", "/pool/events", "/latest_example"):
            assert gateway.get(path, headers=by(key)).status_code == 401, path
        page = gateway.get("/", headers={**by(key), "accept": "text/html"})
        assert page.status_code == 200
        unseen(page)
    uids = [alphas["uid"], f"alpha/{alphas['uid']}", f"../alpha/{alphas['uid']}"]
    answer = gateway.post("/trajectories", {"trajectory_uids": uids}, headers=by("beta-reward"))
    assert [(row["state"], len(row)) for row in told(answer)["items"]] == [("unknown", 2)] * 3


def test_a_call_made_again_under_anothers_key_is_a_call_of_its_own(
    gateway: Running, rollout: Rollout, alphas: Json
) -> None:
    mine = begin(gateway, "beta-key", trajectory_uid=alphas["uid"], prompt_uid="p")["base_url"]
    sent = len(rollout.orders)
    headers = {**alphas["headers"], **by("beta-key"), "x-stainless-retry-count": "1"}
    answer = told(gateway.post(f"{mine}/v1/chat/completions", alphas["body"], headers=headers))
    assert answer["choices"][0]["message"]["content"] == "what anybody may hear"
    assert len(rollout.orders) == sent + 1
    again = told(gateway.post(f"{alphas['base']}/v1/chat/completions", alphas["body"], headers=alphas["headers"]))
    assert again["choices"][0]["message"]["content"] == SECRET, "alpha's own is still answered as before"
    assert len(rollout.orders) == sent + 1


def test_a_stored_response_of_anothers_is_not_found(gateway: Running, rollout: Rollout, alphas: Json) -> None:
    body = {"model": "m", "input": "hi", "store": True}
    stored = told(gateway.post(f"{alphas['base']}/v1/responses", body, headers=by("alpha-key")))
    mine = begin(gateway, "beta-key")["base_url"]
    refused = gateway.post(
        f"{mine}/v1/responses", {**body, "previous_response_id": stored["id"]}, headers=by("beta-key")
    )
    assert refused.status_code in (400, 404), refused.text
    unseen(refused)
    told(chat(gateway, mine, "hi", headers=by("beta-key")))
