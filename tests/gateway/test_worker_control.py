"""What concerns all workers goes through their parent: to each, to those that start later, for whoever may ask."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from tests.gateway.kit import serving, told

from headrace import DataPool
from headrace.gateway import Settings, create_app, worker_control
from headrace.gateway.worker_control import (
    DROP_SESSION,
    SECRET_HEADER,
    TRUSTED_HEADER,
    ControlRelay,
    WorkerControl,
    control_app,
)

SECRET = "what-they-share"
ADMIN = {"authorization": "Bearer admin-key"}
TRUSTED = {TRUSTED_HEADER: "yes"}
#: Where nobody listens.
GONE = "http://127.0.0.1:9"
ROLLOUT, OTHER = "http://127.0.0.1:1", "http://127.0.0.1:2"
Start = Callable[[], str]


@pytest.fixture
async def control(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerControl]:
    """The parent's side. A worker that is well has all the time to say so: a busy machine makes none a silent one."""
    for limit in ("HEALTH_S", "PARENT_HEALTH_S"):
        monkeypatch.setattr(worker_control, limit, 240)
    found = WorkerControl(SECRET)
    yield found
    await found.close()


@pytest.fixture
async def control_socket(control: WorkerControl) -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path must be short
        path = str(Path(folder) / "control.sock")
        server = uvicorn.Server(uvicorn.Config(control_app(control), uds=path, log_level="warning", lifespan="off"))
        serving_it = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.001)
        yield path
        server.should_exit = True
        await serving_it


@pytest.fixture
def start(control_socket: str, pool: DataPool, tmp_path: Path) -> Iterator[Start]:
    """Starts gateways that ask for an admin key, as workers of one parent; each one's address. None has a tokenizer."""
    settings = Settings(vllm_addresses=ROLLOUT, tokenizer_path=str(tmp_path), admin_key="admin-key")
    with ExitStack() as running:

        def worker() -> str:
            app = ControlRelay(create_app(pool, settings), socket=control_socket, secret=SECRET)
            return running.enter_context(serving(app))

        yield worker


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=240, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("secret", [{}, {SECRET_HEADER: ""}, {SECRET_HEADER: "guessed"}], ids=str)
async def test_a_trusted_header_without_the_secret_opens_nothing(
    control: WorkerControl, start: Start, http: httpx.AsyncClient, secret: dict[str, str]
) -> None:
    worker = start()
    await control.add_worker(0, worker)
    for method, path, body in (
        ("POST", "/pause", None),
        ("POST", "/policy_version", {"version": 7}),
        ("POST", "/servers", {"address": OTHER}),
        ("GET", "/stats", None),
    ):
        answer = await http.request(method, f"{worker}{path}", json=body, headers={**TRUSTED, **secret})
        assert answer.status_code == 401, path
    dropping = {"trajectory_uid": "t"}
    assert (await http.post(f"{worker}{DROP_SESSION}", json=dropping, headers={**TRUSTED, **secret})).status_code == 404
    found = await state(http, worker)
    assert found["paused"] is False
    assert versions(found) == {ROLLOUT: 0}


async def test_what_was_said_before_a_worker_started_reaches_it(
    control: WorkerControl, start: Start, http: httpx.AsyncClient
) -> None:
    first, second = start(), start()
    await control.add_worker(0, first)
    for path, body in (("/servers", {"address": OTHER}), ("/policy_version", {"version": 7}), ("/pause", None)):
        told(await http.post(f"{first}{path}", json=body, headers=ADMIN))
    await control.add_worker(1, second)
    found = await state(http, second)
    assert found["paused"] is True
    assert versions(found) == {ROLLOUT: 7, OTHER: 7}


async def test_a_worker_that_starts_while_servers_differ_learns_the_version_of_each(
    control: WorkerControl, start: Start, http: httpx.AsyncClient
) -> None:
    first, second = start(), start()
    await control.add_worker(0, first)
    for path, body in (
        ("/servers", {"address": OTHER}),
        ("/policy_version", {"version": 3}),
        ("/policy_version", {"version": 7, "server": OTHER}),
    ):
        told(await http.post(f"{first}{path}", json=body, headers=ADMIN))
    await control.add_worker(1, second)
    found = await state(http, second)
    assert versions(found) == {ROLLOUT: 3, OTHER: 7}


async def test_a_pause_that_is_over_is_not_said_to_a_worker_that_starts(
    control: WorkerControl, start: Start, http: httpx.AsyncClient
) -> None:
    first, second = start(), start()
    await control.add_worker(0, first)
    for path in ("/pause", "/resume"):
        told(await http.post(f"{first}{path}", headers=ADMIN))
    await control.add_worker(1, second)
    assert (await state(http, second))["paused"] is False


async def test_the_end_of_the_defaults_pause_leaves_another_models_pause_to_a_worker_that_starts(
    control: WorkerControl, control_socket: str, pool: DataPool, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    models = tmp_path / "models.json"
    models.write_text(json.dumps({"models": {"smol": {"addresses": OTHER}}}))
    settings = Settings(vllm_addresses=ROLLOUT, tokenizer_path=str(tmp_path), admin_key="admin-key", models=str(models))
    apps = [ControlRelay(create_app(pool, settings), socket=control_socket, secret=SECRET) for _ in range(2)]
    with serving(apps[0]) as first, serving(apps[1]) as second:
        await control.add_worker(0, first)
        for path in ("/pause?model=smol", "/pause?model=", "/resume?model="):
            told(await http.post(f"{first}{path}", headers=ADMIN))
        await control.add_worker(1, second)
        assert [(await state(http, worker))["paused"] for worker in (first, second)] == [True, True]
        told(await http.post(f"{first}/resume", headers=ADMIN))
        assert [(await state(http, worker))["paused"] for worker in (first, second)] == [False, False]


async def test_a_resume_that_comes_while_a_worker_hears_of_the_pause_reaches_it(
    control: WorkerControl, start: Start, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(), start()
    await control.add_worker(0, first)
    told(await http.post(f"{first}/pause", headers=ADMIN))
    ask = control._ask

    async def resumed_meanwhile(worker: str, method: str, path: str, *rest: Any) -> tuple[int, str, bytes]:
        answer = await ask(worker, method, path, *rest)
        if (worker, path) == (second, "/pause"):
            told(await http.post(f"{first}/resume", headers=ADMIN))
        return answer

    monkeypatch.setattr(control, "_ask", resumed_meanwhile)
    await control.add_worker(1, second)
    assert (await state(http, second))["paused"] is False


async def test_a_pause_that_comes_while_a_worker_is_gone_reaches_the_one_in_its_place(
    control: WorkerControl, start: Start, http: httpx.AsyncClient
) -> None:
    first, second = start(), start()
    await control.add_worker(0, first)
    await control.add_worker(1, GONE)
    control.remove_worker(1)
    told(await http.post(f"{first}/pause", headers=ADMIN))
    assert (await state(http, first))["paused"] is True
    await control.add_worker(1, second)
    assert (await state(http, second))["paused"] is True


async def test_a_change_that_a_worker_does_not_hear_though_it_is_there_is_not_done(
    control: WorkerControl, start: Start, http: httpx.AsyncClient
) -> None:
    first = start()
    await control.add_worker(0, first)
    await control.add_worker(1, GONE)  # it lives, and takes no connection
    answer = await http.post(f"{first}/policy_version", json={"version": 3}, headers=ADMIN)
    assert (answer.status_code, answer.json()["code"]) == (503, "worker_starting")


@pytest.mark.parametrize("before", [False, True], ids=["for the first time", "again"])
async def test_where_one_worker_cannot_be_paused_none_is(
    control: WorkerControl, start: Start, http: httpx.AsyncClient, before: bool
) -> None:
    first, second = start(), start()
    await control.add_worker(0, first)
    if before:
        told(await http.post(f"{first}/pause", headers=ADMIN))
    control._workers[1] = GONE  # it lives, and takes no connection
    answer = await http.post(f"{first}/pause", headers=ADMIN)
    assert answer.status_code == 503
    assert (await state(http, first))["paused"] is False
    await control.add_worker(1, second)
    assert (await state(http, second))["paused"] is False


async def test_a_pause_that_no_worker_takes_leaves_the_one_before_in_force(
    control: WorkerControl, start: Start, http: httpx.AsyncClient
) -> None:
    first = start()
    await control.add_worker(0, first)
    told(await http.post(f"{first}/pause", headers=ADMIN))
    assert (await http.post(f"{first}/pause?mode=none", headers=ADMIN)).status_code == 400
    assert (await state(http, first))["paused"] is True


async def test_a_worker_that_cannot_be_told_what_changed_is_not_taken_in(
    control: WorkerControl, start: Start, http: httpx.AsyncClient
) -> None:
    first = start()
    assert await control.add_worker(0, first)
    told(await http.post(f"{first}/policy_version", json={"version": 3}, headers=ADMIN))
    assert not await control.add_worker(1, GONE)


async def test_health_says_that_a_worker_is_being_started_again(
    control: WorkerControl, start: Start, http: httpx.AsyncClient
) -> None:
    first, second = start(), start()
    await control.add_worker(0, first)
    await control.add_worker(1, second)
    assert (await http.get(f"{first}/health")).json()["status"] == "ok"
    control.remove_worker(1)
    found = (await http.get(f"{first}/health")).json()
    assert (found["status"], "worker 1" in found["detail"]) == ("degraded", True)
    await control.add_worker(1, second)
    assert (await http.get(f"{first}/health")).json()["status"] == "ok"


async def test_a_worker_that_starts_while_the_others_drain_is_paused_with_them(
    control: WorkerControl, start: Start, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(), start()
    await control.add_worker(0, first)
    ask = control._ask

    async def joined_meanwhile(worker: str, method: str, path: str, *rest: Any) -> Any:
        if (worker, path) == (first, "/pause"):
            await control.add_worker(1, second)
        return await ask(worker, method, path, *rest)

    monkeypatch.setattr(control, "_ask", joined_meanwhile)
    told(await http.post(f"{first}/pause", headers=ADMIN))
    assert [(await state(http, worker))["paused"] for worker in (first, second)] == [True, True]


async def test_health_is_answered_though_a_worker_is_silent_or_gone(
    control: WorkerControl, start: Start, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    await control.add_worker(0, first)
    before = told(await http.get(f"{first}/health"))
    assert "worker" not in before.get("detail", "")
    await control.add_worker(1, GONE)
    assert told(await http.get(f"{first}/health"))["detail"].startswith("worker 1 does not answer")

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    ask = control._ask

    async def patient_with_the_first(worker: str, *given: Any) -> Any:
        return await ask(worker, *((*given[:4], 240) if worker == first else given))

    monkeypatch.setattr(control, "_ask", patient_with_the_first)
    monkeypatch.setattr(worker_control, "HEALTH_S", 0.05)
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        await control.add_worker(1, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert told(await http.get(f"{first}/health"))["detail"].startswith("worker 1 does not answer")


async def state(http: httpx.AsyncClient, worker: str) -> dict[str, Any]:
    """What one worker knows of itself; with the secret, the parent is not asked."""
    found = told(await http.get(f"{worker}/stats", headers={**ADMIN, SECRET_HEADER: SECRET}))
    return dict(found["gateway"])


def versions(found: dict[str, Any]) -> dict[str, int]:
    """Of a worker's stats, what each of its servers samples with."""
    return {server["address"]: server["version"] for server in found["servers"]}


@pytest.mark.parametrize(("change", "status"), [("a worker ends", "degraded"), ("a worker comes", "ok")])
async def test_health_is_answered_also_where_workers_change_meanwhile(
    control: WorkerControl,
    start: Start,
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    status: str,
) -> None:
    one, two = start(), start()
    assert await control.add_worker(0, one)
    if change == "a worker ends":
        assert await control.add_worker(1, two)
    ask = control._ask

    async def changed_meanwhile(worker: str, *given: Any) -> Any:
        if worker == one:
            if change == "a worker ends":
                control.remove_worker(1)
            else:
                control._workers[1] = two
        return await ask(worker, *given)

    monkeypatch.setattr(control, "_ask", changed_meanwhile)
    answer = await http.get(f"{one}/health")
    assert (answer.status_code, answer.json()["status"]) == (200, status)
