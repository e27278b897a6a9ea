"""Registering at the Trajectory API, which takes environments once the trainer has begun."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from headrace.envs.api_client import ApiAway, ApiClient, ApiRefused

log = logging.getLogger("headrace.envs")


class Registered(msgspec.Struct, frozen=True):
    """The API's answer: who we are, and where the trainer stands."""

    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int = -1


async def register(api: ApiClient, asked: dict[str, Any], every_s: float) -> Registered:
    """Asks until the API is there and the trainer has begun. What it waits for is logged when it changes."""
    said = ""
    while True:
        try:
            found = await api.post("/register-env", asked)
        except ApiAway as error:
            why = str(error)
        else:
            if found.get("status") == "success":
                return _read(api, found)
            why = f"{api.address} says: {found.get('status')}"
        if why != said:
            log.info("waiting to register: %s", why)
        said = why
        await asyncio.sleep(every_s)


def _read(api: ApiClient, found: dict[str, Any]) -> Registered:
    try:
        return msgspec.convert(found, Registered, strict=False)
    except msgspec.ValidationError as error:
        raise ApiRefused(f"{api.address} answered /register-env with {found}: {error}") from error
