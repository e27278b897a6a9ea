"""`headrace api`, and `run-api` as Atropos calls it: see `headrace.api`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from headrace.api.settings import TrajectoryApiSettings
from headrace.cli.common import announce, listening_on, pool_key, warn_unprotected
from headrace.cli.pool.run import PoolOptions
from headrace.commands import CommandModel, command
from headrace.data.keys import configured_key
from headrace.data.visible import log_to_stderr
from headrace.net.server import loopback
from headrace.pool import KEY_VARIABLE

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from headrace.pool.embedded import DataPool
    from headrace.pool.remote import RemotePool

#: What `--pool` takes for the actor that `headrace pool start` makes by default.
DEFAULT_ACTOR = "ray"
#: The environment variable of `--api-key`.
KEY_OF_API = "HEADRACE_API_KEY"


class ApiCommand(TrajectoryApiSettings, PoolOptions, CommandModel):
    """Serve Atropos' Trajectory API, until SIGTERM or Ctrl-C: environments post scored groups, trainers take batches.
    Prints one line with its address as soon as it serves; the dashboard's is on stderr.

    The pool is embedded, and --journal makes it durable; with --pool it is one that runs elsewhere.
    """

    host: str | None = Field(None, description="address to listen on; 0.0.0.0 where a key is set, else 127.0.0.1")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: a free one")
    pool: str | None = Field(
        None,
        description=f"a pool that runs elsewhere: http://HOST:8200 (its key is in {KEY_VARIABLE}), "
        f"ray-actor://NAME?namespace=NAMESPACE, or {DEFAULT_ACTOR}: the actor of `headrace pool start`",
    )

    @model_validator(mode="after")
    def _one_pool(self) -> ApiCommand:
        if self.pool is not None and self.journal is not None:
            raise ValueError("--journal is for a pool in this process, and --pool names one elsewhere; give one")
        return self

    def execute(self) -> None:
        from headrace.api.app import create_app
        from headrace.net.server import (
            LocalOnly,
            Server,
            settle_memory,
            usual_host,
        )

        log_to_stderr()
        settings = TrajectoryApiSettings(**{name: getattr(self, name) for name in TrajectoryApiSettings.model_fields})
        settings.api_key = configured_key(settings.api_key, KEY_OF_API)
        host = self.host or usual_host(keyed=settings.api_key is not None)
        if settings.api_key is None:
            warn_unprotected(host, "post, take and reset", f"{KEY_OF_API} or --api-key")
        with self._opened() as pool:
            with listening_on(host, self.port):
                app: ASGIApp = create_app(pool, settings)
                if settings.api_key is None and loopback(host):
                    app = LocalOnly(app, settings.allow_origin)
                server = Server(app, host, self.port, lifespan=True)
            settle_memory()
            server.run(lambda address: announce("api", address))

    @contextmanager
    def _opened(self) -> Iterator[DataPool | RemotePool]:
        """The pool that is served: its own, or the one of `--pool`. Raises where that does not answer."""
        if self.pool is None:
            from headrace.pool.embedded import DataPool

            with DataPool(self.journal, **self.options()) as pool:
                yield pool
            return
        from headrace.pool.connect import connect

        with connect(_address(self.pool), key=pool_key(None)) as remote:
            remote.desk_status()  # so that a pool that is not there is told now, not at the first call
            yield remote


def _address(pool: str) -> str:
    if pool != DEFAULT_ACTOR:
        return pool
    from headrace.pool.ray import actor_address

    return actor_address("data_pool")


api_app = command("api", ApiCommand)
