"""The two sides of a real run: atroposlib's environment as a process, and a trainer that does as its guide says."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.venvs import ATROPOS

ENVIRONMENT = Path(__file__).parent / "inside" / "number_env.py"
#: An environment waits five seconds before it begins; a busy machine gets its time.
RUN_S = 900
POLL_S = 0.1


class Trainer:
    """Registers, then asks for batches and waits a little where there is none."""

    def __init__(self, address: str, batch_size: int, checkpoints: Path, **more: Any) -> None:
        # A connection a call: the original closes one after a 500, and the next call would meet it closing.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=address, timeout=240, trust_env=False, limits=limits)
        settings = {"wandb_group": "g", "wandb_project": "p", "batch_size": batch_size, "max_token_len": 512}
        settings |= {"checkpoint_dir": str(checkpoints), "save_checkpoint_interval": 5, "starting_step": 0}
        self.uuid = self._client.post("/register", json={**settings, "num_steps": 10, **more}).json()["uuid"]
        assert self.ask() is None, "the first question for a batch lets the environments in"

    def ask(self) -> list[dict[str, Any]] | None:
        answer = self._client.get("/batch")
        answer.raise_for_status()
        batch: list[dict[str, Any]] | None = answer.json()["batch"]
        return batch

    def batch(self) -> list[dict[str, Any]]:
        end = time.monotonic() + RUN_S
        while (found := self.ask()) is None:
            assert time.monotonic() < end, f"no batch in {RUN_S} s: {self.status()}"
            time.sleep(POLL_S)  # as trainers do: the API has nothing to wait on
        return found

    def status(self) -> dict[str, int]:
        found: dict[str, int] = self._client.get("/status").json()
        return found

    def await_queue(self, groups: int) -> None:
        """Until so many wait: an environment that fills up has seen the step that made room."""
        end = time.monotonic() + RUN_S
        while self.status()["queue_size"] < groups:
            assert time.monotonic() < end, f"not {groups} groups in {RUN_S} s: {self.status()}"
            time.sleep(POLL_S)

    def await_still(self, looks: int = 10) -> int:
        """The size of the queue when it has not changed for so many looks: the environments have paused."""
        end = time.monotonic() + RUN_S
        seen = [self.status()["queue_size"]]
        while len(seen) < looks or len(set(seen[-looks:])) > 1:
            assert time.monotonic() < end, f"the queue did not rest in {RUN_S} s: {seen}"
            time.sleep(POLL_S)
            seen.append(self.status()["queue_size"])
        return seen[-1]

    def await_environment(self, env_id: int) -> None:
        """Until it has registered."""
        end = time.monotonic() + RUN_S
        while self._status_env(env_id).status_code != 200:
            assert time.monotonic() < end, f"no environment {env_id} in {RUN_S} s"
            time.sleep(POLL_S)

    def batches_until_the_end_of(
        self, *environments: Environment, steps: int, full: int
    ) -> list[tuple[list[dict[str, Any]], list[int]]]:
        """All batches that there are while one of them runs, each with the groups that each had queued before. So many
        are asked for only once each has two groups queued, or so many wait that one may have paused: on a busy machine
        one is long without the processor."""
        found = []
        end = time.monotonic() + RUN_S
        while any(one.running for one in environments):
            assert time.monotonic() < end, f"the environments did not end in {RUN_S} s: {self.status()}"
            queued = [self._queued(n) for n in range(len(environments))]
            waits = len(found) < steps and all(one.running for one in environments)
            asks = not waits or min(queued) >= 2 or sum(queued) >= full
            if asks and (batch := self.ask()) is not None:
                found.append((batch, queued))
            else:
                time.sleep(POLL_S)
        return found

    def _queued(self, env_id: int) -> int:
        answer = self._status_env(env_id)
        return answer.json()["self_queue_size"] if answer.status_code == 200 else 0  # the original's, once all left

    def _status_env(self, env_id: int) -> httpx.Response:
        return self._client.request("GET", "/status-env", json={"env_id": env_id})

    def close(self) -> None:
        self._client.close()


class Environment:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def report(self) -> dict[str, Any]:
        """What it did; waits for its end."""
        out, _ = self._process.communicate(timeout=RUN_S)
        assert self._process.returncode == 0, self._log.read_text()[-4000:]
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found


@contextmanager
def environment_of(address: str, tokenizer: Path, log: Path, **config: Any) -> Iterator[Environment]:
    """An environment that sends to this API, as a process; `config` is BaseEnvConfig's."""
    given = json.dumps({"api": address, "tokenizer": str(tokenizer), **config})
    with log.open("w") as err:
        process = subprocess.Popen(
            [str(ATROPOS.python()), str(ENVIRONMENT), given],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
    try:
        yield Environment(process, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
