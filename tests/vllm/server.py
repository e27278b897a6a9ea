"""A real vLLM on the CPU, as a process of its own: started, awaited, and ended with its children."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.venvs import VLLM

#: It is ready in a minute on an idle machine; a busy one gets its time, within that of the test that waits for it
#: (`INSTALLING_S` of `tests/tiers.py`).
READY_S = 1500
STOP_S = 30
NAME = "tiny"
#: Calls that are answered at once; more wait.
MAX_NUM_SEQS = 16

#: The control routes are open, nothing is asked of a hub, and the machine's other tests keep their cores. The model is
#: run by the engine's process, as it is on one GPU: a process of its own takes a third more to start.
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
FLAGS = (
    *("--host", "127.0.0.1", "--dtype", "float32", "--max-num-seqs", str(MAX_NUM_SEQS)),
    # Every prompt in one step: on a CPU, the prefill of a request with a seed that is split over two ends the engine.
    *("--max-num-batched-tokens", str(MAX_NUM_SEQS * 2048)),
    *("--enforce-eager", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


@contextmanager
def vllm(
    model: Path,
    log: Path,
    *,
    max_model_len: int = 2048,
    variables: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Iterator[str]:
    """The address of a server of this checkpoint under the name `tiny`; what it says goes to `log`."""
    port = _free_port()
    command = [str(VLLM.python()), "-m", "vllm.entrypoints.openai.api_server"]
    given = ("--model", str(model), "--served-model-name", NAME, "--port", str(port))
    given += ("--max-model-len", str(max_model_len))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *given, *FLAGS, *flags],
            env={**os.environ, **VARIABLES, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its children are ended with it
        )
    try:
        _await_ready(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        _end(process)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _await_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + READY_S
    while not _healthy(port):
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {process.returncode} before it was ready.\n{_tail(log)}")
        if time.monotonic() > end:
            raise RuntimeError(f"vLLM was not ready after {READY_S} s.\n{_tail(log)}")
        time.sleep(0.5)  # there is no event of another process's to await


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its whole session: the engine runs in a child, which would outlive a killed parent."""
    for what in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, what)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
