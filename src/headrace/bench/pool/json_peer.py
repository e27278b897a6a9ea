"""The plain way to serve steps over HTTP: a Starlette route, a list, and orjson. A child process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import TracebackType

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.bench.pool.load import Load
from headrace.bench.pool.sizes import Sizes

#: What a step is to a consumer; the rest of its fields are empty here.
FIELDS = (
    "prompt_ids",
    "response_ids",
    "rollout_log_probs",
    "trajectory_uid",
    "prompt_uid",
    "step_index",
    "reward",
    "policy_version",
    "is_last",
)


class Peer:
    """The child. `address` is where it answers `GET /fetch?count=N`."""

    def __init__(self, sizes: Sizes, fetches: int) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            shape = [sizes.prompt, sizes.response, fetches * sizes.submit]
            command = [sys.executable, "-m", "headrace.bench.pool.json_peer", str(listener.fileno()), *map(str, shape)]
            self._process = subprocess.Popen(command, pass_fds=[listener.fileno()])

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()


def _serve(fd: int, prompt: int, response: int, count: int) -> None:
    steps = Load(Sizes("peer", prompt=prompt, response=response)).steps(count)

    async def fetch(request: Request) -> Response:
        wanted = int(request.query_params["count"])
        taken, steps[:wanted] = steps[:wanted], []
        found = [{name: getattr(step, name) for name in FIELDS} for step in taken]
        return Response(orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")

    config = uvicorn.Config(
        Starlette(routes=[Route("/fetch", fetch)]), log_level="warning", access_log=False, timeout_keep_alive=600
    )
    with socket.socket(fileno=fd) as listener:
        uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
