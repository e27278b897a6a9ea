"""A Trajectory API that accepts every group at once and keeps none.

python -m headrace.bench.envs.stub
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from headrace.net.server import Server

#: So large that no environment ever holds.
BATCH_SIZE = 1 << 30

STATUS = {"current_step": 0, "queue_size": 0, "env_weight": 1.0, "unallocated_fraction": 1.0, "self_queue_size": 0}
REGISTERED = {"status": "success", "env_id": 0, "wandb_name": "bench_0", "checkpoint_dir": "", "starting_step": 0}


def create_app() -> Starlette:
    """The routes that an environment calls, with constant answers."""
    answers = {
        ("POST", "/register-env"): {**REGISTERED, "checkpoint_interval": -1, "num_steps": 1},
        ("POST", "/disconnect-env"): {"status": "success"},
        ("GET", "/info"): {"batch_size": BATCH_SIZE, "max_token_len": -1},
        ("GET", "/wandb_info"): {"group": None, "project": None},
        ("GET", "/status-env"): {**STATUS, "max_group_size": 1},
        ("POST", "/scored_data"): {"status": "received"},
    }

    async def answer(request: Request) -> JSONResponse:
        await request.body()
        return JSONResponse(answers[request.method, request.url.path])

    return Starlette(routes=[Route(path, answer, methods=[method]) for method, path in answers])


if __name__ == "__main__":
    Server(create_app(), "127.0.0.1", 0).run(lambda address: print(f"api ready on {address}", flush=True))
