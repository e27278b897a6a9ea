"""What the scenarios are made of: registrations, groups that are sent, answers that come again and again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.atropos.calls import Call, get, post

WAIT = {"status": "wait for trainer to start"}
NOT_READY: dict[str, Any] = {"batch": None}
NOT_REGISTERED = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
RECEIVED = {"status": "received"}
NO_EXAMPLE: dict[str, Any] = {
    key: []
    for key in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs"),
        *("messages", "images"),
    )
}
GZIP = (("accept-encoding", "gzip"),)
#: What Python writes for them, which is not JSON; `1e999` is.
NOT_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999")


def registration(**more: Any) -> dict[str, Any]:
    return {
        "wandb_group": "a group",
        "wandb_project": "a project",
        "batch_size": 8,
        "max_token_len": 512,
        "checkpoint_dir": "checkpoints",
        "save_checkpoint_interval": 5,
        "starting_step": 0,
        "num_steps": 100,
        **more,
    }


def environment(group_size: int, **more: Any) -> dict[str, Any]:
    return {"max_token_length": 512, "desired_name": "env", "weight": 1.0, "group_size": group_size, **more}


def register(**more: Any) -> Call:
    return post("/register", registration(**more), {"uuid": ...})


def opening(batch_size: int, *environments: dict[str, Any]) -> Iterator[Call]:
    """A trainer that has asked for its first batch, and these environments, whose ids are 0, 1, …"""
    yield register(batch_size=batch_size)
    yield get("/batch", NOT_READY)
    for n, one in enumerate(environments):
        yield post("/register-env", one, joined(n, f"{one['desired_name']}_{n}"))


def joined(env_id: int, name: str, step: int = 0) -> dict[str, Any]:
    registered = {"checkpoint_dir": "checkpoints", "checkpoint_interval": 5, "num_steps": 100}
    return {"status": "success", "env_id": env_id, "wandb_name": name, "starting_step": step, **registered}


def send(*groups: dict[str, Any]) -> Iterator[Call]:
    return (post("/scored_data", one, RECEIVED) for one in groups)


def buffered(one: dict[str, Any], size: int) -> Call:
    return post("/scored_data", one, {"status": "buffered", "buffer_size": size})


def status(step: int, queued: int) -> Call:
    return get("/status", {"current_step": step, "queue_size": queued})


def status_env(env_id: int, *, step: int = 0, weight: float = 1.0, free: float = 1.0, **more: int) -> Call:
    """`queued`, `own` and `largest` are its queue_size, self_queue_size and max_group_size."""
    answer = {"current_step": step, "env_weight": weight, "unallocated_fraction": free}
    names = {"queued": "queue_size", "own": "self_queue_size", "largest": "max_group_size"}
    return get("/status-env", {**answer, **{names[key]: value for key, value in more.items()}}, body={"env_id": env_id})
