"""Trainers and environments register, disconnect, start over."""

from __future__ import annotations

from collections.abc import Iterator

from tests.atropos.calls import Call, get, post
from tests.atropos.groups import full, group, served
from tests.atropos.words import (
    NO_EXAMPLE,
    NOT_READY,
    NOT_REGISTERED,
    WAIT,
    buffered,
    environment,
    joined,
    opening,
    register,
    registration,
    send,
    status,
    status_env,
)


def before_anybody_registered() -> Iterator[Call]:
    yield get("/", {"message": ...})
    yield get("/info", {"batch_size": -1, "max_token_len": -1})
    yield get("/wandb_info", {"group": None, "project": None})
    yield status(0, 0)
    yield get("/batch", NOT_REGISTERED)
    yield get("/latest_example", NO_EXAMPLE)
    yield post("/register-env", environment(4), WAIT)
    yield post("/disconnect-env", {"env_id": 0}, {"status": "failure", "error": ...})
    yield get("/status-env", body={"env_id": 0}, status=500)
    yield get("/nowhere", status=404)
    yield get("/register", status=405)


def trainer_then_environments() -> Iterator[Call]:
    yield register(starting_step=7)
    yield get("/info", {"batch_size": 8, "max_token_len": 512})
    yield get("/wandb_info", {"group": "a group", "project": "a project"})
    yield status(7, 0)
    yield post("/register-env", environment(4), WAIT)
    yield post("/register-env", environment(4), WAIT)
    yield get("/batch", NOT_READY)
    yield post("/register-env", environment(4), joined(0, "env_0", step=7))
    yield post("/register-env", environment(4), joined(1, "env_1", step=7))
    yield post("/register-env", environment(4, desired_name="other"), joined(2, "other_0", step=7))
    yield post("/disconnect-env", {"env_id": 1}, {"status": "success"})
    yield post("/register-env", environment(4), joined(3, "env_2", step=7))
    yield from send(group(1, 4, 0), group(2, 4, 0))
    yield get("/batch", served(group(1, 4, 0), group(2, 4, 0)))
    yield post("/register-env", environment(4, desired_name="late"), joined(4, "late_0", step=8))


def the_same_trainer_again() -> Iterator[Call]:
    yield from opening(8, environment(4))
    yield from send(group(1, 4, 0))
    yield register(batch_size=8)
    yield status(0, 1)


def another_trainer() -> Iterator[Call]:
    """What was set first stays."""
    yield from opening(8, environment(4))
    yield from send(group(1, 4, 0))
    yield post("/register", registration(batch_size=4, wandb_group="another"), {"uuid": ...})
    yield get("/info", {"batch_size": 8, "max_token_len": 512})
    yield get("/wandb_info", {"group": "a group", "project": "a project"})
    yield status(0, 1)


def a_trainer_that_resumes() -> Iterator[Call]:
    yield from opening(8, environment(4))
    yield from send(group(1, 4, 0))
    yield register(batch_size=8, resume=True)
    yield status(0, 1)
    yield from send(group(2, 4, 0))
    yield get("/batch", served(group(1, 4, 0), group(2, 4, 0)))


def required_fields() -> Iterator[Call]:
    for key in registration():
        yield post("/register", {name: value for name, value in registration().items() if name != key}, status=422)
    yield get("/info", {"batch_size": -1, "max_token_len": -1})
    yield from opening(8)
    for key in environment(4):
        yield post("/register-env", {name: value for name, value in environment(4).items() if name != key}, status=422)
    yield post("/register-env", environment(4, weight=None), status=422)
    yield post("/register-env", environment(4, min_batch_allocation=None), joined(0, "env_0"))
    for key in ("tokens", "masks", "scores"):
        yield post("/scored_data", {name: value for name, value in group(1, 4).items() if name != key}, status=422)
    yield post("/disconnect-env", {}, status=422)
    yield get("/status-env", status=422)
    yield get("/status-env?env_id=0", status=422)
    yield post("/scored_data", b'{"tokens": [[1', status=422)
    yield post("/scored_data", b"[]", status=422)
    yield post("/scored_data_list", group(1, 4, 0), status=422)
    yield status(0, 0)


def lenient_registrations() -> Iterator[Call]:
    yield post("/register", registration(batch_size="8", max_token_len=512.0, starting_step=True), {"uuid": ...})
    yield get("/info", {"batch_size": 8, "max_token_len": 512})
    yield status(1, 0)
    yield get("/batch", NOT_READY)
    yield post("/register-env", environment("4", weight="1.5", max_token_length="512"), joined(0, "env_0", step=1))  # type: ignore[arg-type]
    yield get("/status-env", body={"env_id": "0"})
    yield post("/disconnect-env", {"env_id": 0.0}, {"status": "success"})


def data_before_the_trainer() -> Iterator[Call]:
    """The server takes it, and takes no trainer from then on."""
    yield from send(group(1, 4), group(2, 4))
    yield get("/latest_example", full(group(2, 4)))
    yield register(batch_size=8)
    yield get("/info", {"batch_size": -1, "max_token_len": -1})
    yield get("/batch", NOT_REGISTERED)
    yield post("/register-env", environment(4), WAIT)


def a_negative_environment() -> Iterator[Call]:
    """It is the last one: Python counts from the end."""
    yield from opening(8, environment(4), environment(4))
    yield post("/disconnect-env", {"env_id": -1}, {"status": "success"})
    yield status_env(0, weight=1.0, queued=0, own=0, largest=1)


def reset() -> Iterator[Call]:
    yield get("/reset_data", "Reset successful")  # with nothing to reset
    yield from opening(8, environment(4))
    yield from send(group(1, 4, 0), group(2, 4, 0), group(3, 4, 0))
    yield buffered(group(4, 2, 0), 2)
    yield get("/batch", served(group(1, 4, 0), group(2, 4, 0)))
    yield get("/reset_data", "Reset successful")
    yield get("/info", {"batch_size": -1, "max_token_len": 512})
    yield get("/wandb_info", {"group": None, "project": None})
    yield status(0, 0)
    yield get("/latest_example", full(group(3, 4, 0)))
    yield post("/register-env", environment(4), WAIT)
    yield from opening(4, environment(4))
    yield from send(group(5, 4, 0))
    yield buffered(group(6, 2, 0), 2)
    yield get("/batch", served(group(5, 4, 0)))
    yield status(1, 0)


def a_batch_after_a_reset() -> Iterator[Call]:
    yield from opening(8)
    yield get("/reset_data", "Reset successful")
    yield get("/batch", status=500)


def reset_by_post() -> Iterator[Call]:
    yield from opening(8)
    yield Call("POST", "/reset_data", status=405)
    yield get("/info", {"batch_size": 8, "max_token_len": 512})
