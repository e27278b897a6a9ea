"""Registering at the Trajectory API, which takes environments once the trainer has begun."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from headrace.envs.api_client import ApiAway, ApiClient, ApiRefused
from headrace.envs.config import BaseEnvConfig

log = logging.getLogger("headrace.envs")

T = TypeVar("T")


class Registered(msgspec.Struct, frozen=True):
    """The API's answer: who we are, and where the trainer stands."""

    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int = -1


class NoTrainer(ApiAway):
    """The API is there, and no trainer is."""

    code = "no_trainer"


async def register(api: ApiClient, config: BaseEnvConfig, name: str) -> Registered:
    """Registers, once the API is there and the trainer has begun."""
    asked = {
        "max_token_length": config.max_token_length,
        "desired_name": name,
        "weight": config.inference_weight,
        "min_batch_allocation": config.min_batch_allocation,
        "group_size": config.group_size,
    }

    async def once() -> Registered:
        found = await api.post("/register-env", asked)
        if found.get("status") != "success":
            raise NoTrainer(
                f"no trainer has registered at {api.address} and asked for its first batch yet; start one, such as "
                f"`python examples/atropos_trainer.py {api.address}`, or yours (docs/environments.md, A trainer for it)"
            )
        if found.get("warning"):
            log.warning("%s registered this environment, and says: %s", api.address, found["warning"])
        return _read(api, found)

    return await patiently(once, config.status_poll_s)


async def patiently(ask: Callable[[], Awaitable[T]], every_s: float) -> T:
    """Asks until the API answers. What it waits for is logged once, and when it changes."""
    said = ""
    while True:
        try:
            return await ask()
        except ApiAway as error:
            if str(error) != said:
                what = "a trainer" if isinstance(error, NoTrainer) else "the Trajectory API (headrace api starts one)"
                log.info("waiting for %s: %s", what, error)
            said = str(error)
        await asyncio.sleep(every_s)


def _read(api: ApiClient, found: dict[str, Any]) -> Registered:
    try:
        return msgspec.convert(found, Registered, strict=False)
    except msgspec.ValidationError as error:
        raise ApiRefused(f"{api.address} answered /register-env with {found}: {error}") from error
