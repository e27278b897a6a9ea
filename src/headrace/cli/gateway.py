"""`headrace gateway` and `headrace serve`: see `headrace.gateway`."""

from __future__ import annotations

import logging
import os
from typing import Any

from pydantic import Field, model_validator

from headrace.cli.common import pool_key, say
from headrace.cli.pool.run import PoolOptions
from headrace.data.errors import HeadraceError
from headrace.extras import require_for
from headrace.gateway.settings import Settings
from headrace.pool import KEY_VARIABLE
from headrace.serving import loopback

#: Where a key may come from beside its flag, so that it is in no process list.
VARIABLES = {
    "api_key": "HEADRACE_API_KEY",
    "reward_key": "HEADRACE_REWARD_KEY",
    "admin_key": "HEADRACE_ADMIN_KEY",
    "upstream_key": "HEADRACE_UPSTREAM_KEY",
}
#: What a gateway on a Ray pool needs to be told.
RAY_FORM = ("prompt_length", "response_length")


class GatewayCommand(Settings, PoolOptions):
    """Forward agents' LLM calls to rollout servers and record every call as one step, until SIGTERM or Ctrl-C. Prints
    one line with its address as soon as it serves; `GET /ready` tells when calls are taken.

    With --data-pool-name the pool is the named Ray actor, and --journal is a folder in which steps wait while it is out
    of reach; with --pool-address it is a `headrace pool serve`. Otherwise it is embedded, and --journal makes it
    durable.
    """

    host: str = Field("0.0.0.0", description="address to listen on")
    port: int = Field(8100, ge=0, le=65535, description="port to listen on; 0: a free one")
    workers: int = Field(1, ge=1, le=64, description="processes that serve the port")
    data_pool_name: str | None = Field(None, description="the pool's Ray actor")
    ray_address: str = Field("auto", description="the cluster: auto, or its HOST:PORT")
    ray_namespace: str = Field("default", description="the actor's namespace")
    pool_address: str | None = Field(
        None, description=f"a pool that is served over HTTP, as http://HOST:8200; its key is in {KEY_VARIABLE}"
    )
    drain_s: float = Field(30, ge=0, description="at the end, how long to wait for a pool that is out of reach")

    @model_validator(mode="after")
    def _ray_form(self) -> GatewayCommand:
        if self.data_pool_name is not None:
            missing = [name for name in RAY_FORM if getattr(self, name) is None]
            if missing:
                flags = ", ".join("--" + name.replace("_", "-") for name in missing)
                raise ValueError(f"with --data-pool-name, {flags} must be given too")
            if self.pool_address is not None:
                raise ValueError("--data-pool-name and --pool-address name two pools; give one")
        return self

    def cli_cmd(self) -> None:
        require_for("gateway")
        from headrace.gateway.process import Process

        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        settings = self.settings()
        if not settings.keyed and not loopback(self.host):
            say(
                f"warning: {self.host} can be reached from other machines and there is no key: whoever reaches it can "
                "call models, pay trajectories and read the pool. Set --api-key, --reward-key and --admin-key"
            )
        process = Process(
            settings,
            host=self.host,
            port=self.port,
            workers=self.workers,
            journal=self.journal,
            pool_options=self.options(),
            pool_address=self._pool(),
            pool_key=pool_key(None),
            drain_s=self.drain_s,
        )
        try:
            process.run(lambda address: print(f"gateway ready on {address}", flush=True))
        except OSError as error:
            raise HeadraceError(f"cannot listen on {self.host} port {self.port}: {error.strerror or error}") from error

    def settings(self) -> Settings:
        """What the gateway itself needs; keys from the environment where no flag gave them."""
        given: dict[str, Any] = {name: getattr(self, name) for name in Settings.model_fields}
        given |= {name: os.environ.get(variable) for name, variable in VARIABLES.items() if not given[name]}
        return Settings(**given)

    def _pool(self) -> str | None:
        """The address of a pool elsewhere."""
        if self.data_pool_name is not None:
            from headrace.pool.ray import actor_address

            return actor_address(self.data_pool_name, self.ray_address, self.ray_namespace)
        return self.pool_address


class ServeCommand(GatewayCommand):
    """Gateway and pool in one process on one port, until SIGTERM or Ctrl-C: a gateway with its pool embedded."""

    @model_validator(mode="after")
    def _ray_form(self) -> ServeCommand:
        if self.data_pool_name is not None or self.pool_address is not None:
            raise ValueError("serve has its pool embedded; for one that runs elsewhere, use `headrace gateway`")
        return self
