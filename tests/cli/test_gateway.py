"""`headrace gateway` and `headrace serve`: what is refused before anything starts, and what is said."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from tests.cli.command import COMMAND, Command, spawn
from tests.gateway.kit import until

NEEDED = ("--vllm-addresses", "http://127.0.0.1:1", "--tokenizer-path", "nowhere")
#: Nobody answers there, so it waits.
WAITS = ("--vllm-addresses", "http://127.0.0.1:1")
#: One process, and two of them under a third: what those do together is in tests/gateway/test_workers.py too.
WORKERS = ["1", pytest.param("2", marks=pytest.mark.long)]
WRONG = {
    "no address": (
        ("gateway", "--vllm-addresses", "foo", "--tokenizer-path", "x"),
        "--vllm-addresses: 'foo' is no address",
    ),
    "twice": (
        ("gateway", "--vllm-addresses", "http://a:1,http://a:1/", "--tokenizer-path", "x"),
        "names a server twice",
    ),
    "ray without lengths": (
        ("gateway", *NEEDED, "--data-pool-name", "data_pool", "--response-length", "8"),
        "headrace: with --data-pool-name, --prompt-length must be given too",
    ),
    "two pools": (
        (
            *("gateway", *NEEDED, "--data-pool-name", "p", "--prompt-length", "8", "--response-length", "8"),
            *("--pool-address", "http://a:1"),
        ),
        "name two pools",
    ),
    "an outbox for workers": (
        ("gateway", *NEEDED, "--pool-address", "http://a:1", "--workers", "2", "--journal", "j"),
        "with --workers and a pool elsewhere there is no --journal",
    ),
    "serve elsewhere": (("serve", *NEEDED, "--data-pool-name", "p"), "serve has its pool embedded"),
    "sampling": (("serve", *NEEDED, "--sampling", "train"), "should be CHANNEL:name=value"),
    "no servers": (("serve", "--tokenizer-path", "x"), "--vllm-addresses must be given"),
    "empty tokenizer": (
        ("serve", "--vllm-addresses", "http://a:1", "--tokenizer-path", ""),
        "--tokenizer-path: it is empty; name the folder of the served model, or leave it out",
    ),
    "two rollout servers": (("serve", *WAITS, "--engine", "tiny"), "--engine starts a rollout server and"),
    "no such engine": (("serve", "--engine", "no/such/model"), f"there is no folder {Path.cwd() / 'no/such/model'}"),
    "models": (("serve", *NEEDED, "--models", "nowhere.yaml"), "nowhere.yaml cannot be read: No such file"),
    "tenants": (("serve", *NEEDED, "--tenants", "nowhere.toml"), "nowhere.toml cannot be read: No such file"),
    "history": (("serve", *NEEDED, "--history", "glue"), "--history"),
}


@pytest.mark.parametrize(("args", "said"), WRONG.values(), ids=WRONG)
def test_what_could_not_work_is_refused_by_its_flag(headrace: Command, args: tuple[str, ...], said: str) -> None:
    done = headrace(*args)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


@pytest.fixture
def taken() -> Iterator[str]:
    """A port on which somebody else listens: whoever wants it ends at once."""
    with socket.socket() as found:
        found.bind(("0.0.0.0", 0))
        found.listen()
        yield str(found.getsockname()[1])


def test_a_port_that_is_taken_is_named_and_the_journal_let_go(tmp_path: Path, taken: str) -> None:
    done = spawn("serve", *NEEDED, "--host", "127.0.0.1", "--port", taken, "--journal", str(tmp_path / "journal"))
    assert done.code == 1
    assert done.err == f"headrace: cannot listen on 127.0.0.1 port {taken}: Address already in use\n"


@pytest.mark.parametrize(
    ("flags", "powers"),
    [((), "call models, pay trajectories"), (("--admin-key", "k"), "call models without"), (("--api-key", "k"), None)],
    ids=["no key", "no agents' key", "a key"],
)
def test_a_gateway_that_others_reach_without_a_key_says_so(
    taken: str, flags: tuple[str, ...], powers: str | None
) -> None:
    done = spawn("gateway", *NEEDED, "--host", "0.0.0.0", "--port", taken, *flags)
    assert f"cannot listen on 0.0.0.0 port {taken}" in done.err
    warning = f"warning: 0.0.0.0 can be reached from other machines, and whoever reaches it can {powers}"
    assert (warning in done.err) == (powers is not None)
    assert ("warning" in done.err) == (powers is not None)


@contextmanager
def half_asked(address: str) -> Iterator[None]:
    """A call that has come to a gateway and whose body never ends."""
    where = urlsplit(address)
    with socket.create_connection((where.hostname, where.port)) as agent:
        agent.sendall(b"POST /t/p/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{")
        until(lambda: httpx.get(f"{address}/stats", timeout=120, trust_env=False).json()["gateway"]["in_flight"] >= 1)
        yield


def listens(address: str) -> bool:
    where = urlsplit(address)
    try:
        socket.create_connection((where.hostname, where.port)).close()
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:
        pass  # one of its processes closed its end in between; another may still listen
    return True


@pytest.mark.parametrize("workers", WORKERS)
def test_the_first_sigterm_waits_for_calls_under_way_and_the_second_does_not(workers: str) -> None:
    flags = ["gateway", *WAITS, "--host", "127.0.0.1", "--port", "0", "--workers", workers]
    with subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            with half_asked(address):
                process.send_signal(signal.SIGTERM)
                until(lambda: not listens(address))
                assert process.poll() is None
                process.send_signal(signal.SIGTERM)
                assert process.wait(120) == 0
        finally:
            process.kill()


def started(*flags: str) -> subprocess.Popen[str]:
    command = [*COMMAND, *flags, "--host", "127.0.0.1", "--port", "0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("how", "workers"), [(signal.SIGINT, "1"), pytest.param(signal.SIGTERM, "2", marks=pytest.mark.long)]
)
def test_it_says_what_it_waits_for_and_one_signal_ends_the_wait(how: signal.Signals, workers: str) -> None:
    with started("gateway", *WAITS, "--workers", workers) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            listens = process.stdout.readline()
            assert listens.startswith("gateway listening on http://127.0.0.1:")
            for foreign in ({"host": "page.example"}, {"origin": "http://page.example"}):
                answer = httpx.post(f"{listens.split()[-1]}/pause", headers=foreign, timeout=120, trust_env=False)
                assert answer.status_code == 403
                assert "page.example" in answer.json()["detail"]
            waiting = "waiting for rollout server http://127.0.0.1:1: connection refused\n"
            assert waiting in iter(process.stderr.readline, "")
            process.send_signal(how)
            assert process.wait(120) == 0
            assert process.stdout.read() == ""
            assert waiting not in process.stderr.read()
        finally:
            process.kill()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_folder_that_is_no_tokenizer_ends_it_with_the_reason(workers: str, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    done = spawn(
        *("gateway", *WAITS, "--tokenizer-path", str(nowhere), "--workers", workers),
        *("--host", "127.0.0.1", "--port", "0"),
    )
    assert done.code == 1
    assert "gateway ready" not in done.out
    assert done.err.splitlines()[-1] == f"headrace: there is no folder {nowhere}"
    assert "Traceback" not in done.err


@pytest.mark.system
def test_a_server_and_its_engine_start_and_end_together(folder: Path) -> None:
    with started("serve", "--engine", str(folder)) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            listens, ready = process.stdout.readline(), process.stdout.readline()
            address = listens.removeprefix("gateway listening on ").strip()
            assert ready == f"gateway ready on {address}\n"
            assert httpx.get(f"{address}/ready", timeout=120, trust_env=False).status_code == 200
            (server,) = httpx.get(f"{address}/servers", timeout=120, trust_env=False).json()["servers"]
            assert (server["state"], server["log_prob_mode"]) == ("up", "processed")
            (engine,) = psutil.Process(process.pid).children()
            process.kill()
            engine.wait(120)
            said = process.stderr.read()
            assert f"loading the tokenizer {folder} (the root of the model at {server['address']})" in said
        finally:
            process.kill()


@pytest.mark.system
def test_an_engine_that_dies_ends_its_server_with_the_reason(folder: Path) -> None:
    with started("serve", "--engine", str(folder)) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline().startswith("gateway listening on ")
            (engine,) = psutil.Process(process.pid).children()
            engine.kill()
            assert process.wait(120) == 1
            assert "headrace: engine was ended by SIGKILL" in process.stderr.read()
        finally:
            process.kill()
