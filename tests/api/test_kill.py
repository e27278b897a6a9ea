"""kill -9 in the middle of a run: trainer and environments carry on, every group is served, and served once to a
trainer that names the last batch that it has."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.api.kit import Api
from tests.atropos.groups import group

GROUPS = 40
ENVIRONMENTS = 2
#: Batches after which the server is killed.
KILLS = (4, 11)


class Killable:
    """`headrace api` as a process that is killed and started again, on the same port and journal."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.up = threading.Event()
        self._start(0)

    def _start(self, port: int) -> None:
        command = [sys.executable, "-m", "headrace", "api", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--journal", str(self._folder / "journal")]
        with (self._folder / "log").open("a") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.fullmatch(r"api ready on (http://\S+:(\d+))\n", line)
        assert found is not None, (line, (self._folder / "log").read_text())
        self.address, self._port = found[1], int(found[2])
        self.up.set()

    def kill_and_start(self) -> None:
        self.up.clear()
        self.end()
        self._start(self._port)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Killable]:
    found = Killable(tmp_path)
    try:
        yield found
    finally:
        found.end()


def post_all(server: Killable, env: int) -> None:
    """Sends an environment's groups one by one, each again until it is answered, as BaseEnv does."""
    api = Api(server.address)
    for n in range(GROUPS):
        while True:
            assert server.up.wait(120)
            try:
                api.send(group(1000 * env + n, 4, env))
                break
            except httpx.TransportError:
                continue
    api.close()


@pytest.mark.timeout(900)
def test_no_group_is_lost_and_none_is_served_twice(server: Killable) -> None:
    api = Api(server.address)
    envs = api.opened(8, *[4] * ENVIRONMENTS)
    served: list[int] = []
    with ThreadPoolExecutor(ENVIRONMENTS) as threads:
        posting = [threads.submit(post_all, server, env) for env in envs]
        last: dict[str, str] = {}
        for taken in range(GROUPS * ENVIRONMENTS // 2):
            if taken in KILLS:
                server.kill_and_start()
                api.close()
                api = Api(server.address)
            while (batch := (answer := api.client.get("/batch", headers=last)).json()["batch"]) is None:
                assert not any(done.exception() for done in posting if done.done())
            last = {"Headrace-Received": answer.headers["headrace-batch"]}
            served += [one["tokens"][0][0] for one in batch]
        for done in posting:
            done.result()
    assert sorted(served) == [1000 * env + n for env in envs for n in range(GROUPS)]
    assert api.get("/status") == {"current_step": len(served) // 2, "queue_size": 0}
    api.close()
