"""Whatever the OpenAPI allows, and what it does not, is answered as it says: no 5xx that is not documented."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from tests.gateway.kit import Running, told
from tests.gateway.rollout import PATIENCE_S, Rollout, in_front

#: What a gateway may answer when it cannot, rather than will not.
PASSING = (502, 503)
EXAMPLES = settings(
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def gateway(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder, open=True) as found:
        yield found


@pytest.fixture(scope="module")
def api(gateway: Running) -> Any:
    return schemathesis.openapi.from_url(f"{gateway.address}/openapi.json", timeout=PATIENCE_S)


def every(api: Any, *, controls: bool) -> Iterator[Any]:
    """The operations that change what the gateway stands in front of, or all the others."""
    for found in api.get_all_operations():
        operation = found.ok()
        if operation.path.startswith(("/pause", "/servers")) == controls:
            yield operation


def tried(operation: Any, address: str, examples: int, after: Callable[[], None] = lambda: None) -> None:
    """Sends what the operation's schema allows, and what it does not, so many examples in all."""
    documented = operation.definition.raw["responses"]

    cases = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if "requestBody" in operation.definition.raw:  # without one there is nothing to get wrong
        cases |= operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    @settings(EXAMPLES, max_examples=examples)
    @given(case=cases)
    def holds(case: Any) -> None:
        try:
            answer = case.call(base_url=address, timeout=PATIENCE_S)
        finally:
            after()
        said = f"{operation.label}: {answer.status_code} {answer.text[:500]}\n{case.as_curl_command()}"
        assert answer.status_code < 500 or answer.status_code in PASSING, said
        assert answer.status_code < 500 or str(answer.status_code) in documented, said
        assert "Traceback" not in answer.text, said

    holds()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("examples", [4, pytest.param(64, marks=pytest.mark.long)])
def test_no_route_fails_in_a_way_that_is_not_documented(api: Any, gateway: Running, examples: int) -> None:
    tried_all = [tried(operation, gateway.address, examples) for operation in every(api, controls=False)]
    assert len(tried_all) > 15


@pytest.mark.timeout(900)
def test_controls_refuse_what_they_do_not_know(api: Any, gateway: Running, rollout: Rollout) -> None:
    def restored() -> None:
        told(gateway.post("/resume"))
        for server in told(gateway.get("/servers"))["servers"]:
            if server["address"] != rollout.address:
                gateway.http.request("DELETE", "/servers", json={"address": server["address"]})
        told(gateway.post("/servers", {"address": rollout.address}))

    assert len([tried(operation, gateway.address, 24, restored) for operation in every(api, controls=True)]) == 4


def test_the_gateway_is_well_after_all_of_it(gateway: Running, rollout: Rollout) -> None:
    base = gateway.init()["base_url"]
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert told(gateway.post(f"{base}/v1/chat/completions", body))["choices"][0]["message"]["content"] == "ok"
    assert told(gateway.get("/health")) == {"status": "ok"}


def test_every_route_is_described(gateway: Running) -> None:
    paths = told(gateway.get("/openapi.json"))["paths"]
    base = "/{trajectory_uid}/{prompt_uid}/v1"
    for method, path in (
        *(("post", f"{base}/{name}") for name in ("chat/completions", "completions", "responses")),
        *(("post", f"{base}/{name}") for name in ("reward", "complete_trajectory")),
        *(("post", f"{base}/{name}") for name in ("messages", "messages/count_tokens")),
        *(("post", path) for path in ("/generate", "/submit_steps", "/compute_reward", "/init_trajectory")),
        *(("get", path) for path in ("/health", "/ready", "/stats", "/metrics", "/policy_version", f"{base}/models")),
        *((method, "/trajectories/{trajectory_uid}") for method in ("get", "delete")),
        ("get", "/trajectories"),
        ("post", "/complete_trajectory/{trajectory_uid}"),
    ):
        assert paths[path][method]["summary"]
    assert gateway.get("/docs").status_code == 200
