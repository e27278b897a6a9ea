"""`headrace gateway` and `headrace serve`: see `headrace.gateway`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from headrace.cli.common import announce, listening_on, pool_key, remark, warn_unprotected
from headrace.cli.engine import check_model
from headrace.cli.pool.run import PoolOptions
from headrace.commands import CommandModel, command
from headrace.data.keys import configured_key
from headrace.data.visible import log_to_stderr
from headrace.extras import require_for
from headrace.gateway.settings import GatewaySettings
from headrace.net.server import usual_host
from headrace.pool import KEY_VARIABLE

if TYPE_CHECKING:
    from headrace.gateway.process import GatewayProcess

#: The environment variables of keys: what is given there is in no process list.
KEY_VARIABLES = {
    "api_key": "HEADRACE_API_KEY",
    "reward_key": "HEADRACE_REWARD_KEY",
    "admin_key": "HEADRACE_ADMIN_KEY",
    "upstream_key": "HEADRACE_UPSTREAM_KEY",
}
#: The settings that must be given with `--data-pool-name`.
NEEDED_WITH_RAY = ("tokenizer_path", "prompt_length", "response_length")


class GatewayCommand(GatewaySettings, PoolOptions, CommandModel):
    """Forward agents' LLM calls to rollout servers and record every call as one step, until SIGTERM or Ctrl-C. Says
    where it listens, what it waits for (a rollout server that is not up yet, the tokenizer), and when it is ready.

    With --data-pool-name the pool is the named Ray actor, and --journal is a folder in which steps wait while it is out
    of reach; with --pool-address it is a `headrace pool serve`. Otherwise it is embedded, and --journal makes it
    durable.
    """

    host: str | None = Field(None, description="address to listen on; 0.0.0.0 where a key is set, else 127.0.0.1")
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
            own = ("tokenizer_path",) if self.models is not None else ()  # each model of a file may have its own
            missing = [name for name in NEEDED_WITH_RAY if getattr(self, name) is None and name not in own]
            if missing:
                flags = ", ".join("--" + name.replace("_", "-") for name in missing)
                raise ValueError(f"with --data-pool-name, {flags} must be given too")
            if self.pool_address is not None:
                raise ValueError("--data-pool-name and --pool-address name two pools; give one")
        if self.journal is not None and self.workers > 1 and (self.data_pool_name or self.pool_address):
            raise ValueError(
                "with --workers and a pool elsewhere there is no --journal: workers answer once the pool has a step; "
                "leave --journal out, or --workers"
            )
        return self

    def execute(self) -> None:
        self._run(self.settings())

    def _run(self, settings: GatewaySettings, watch: Callable[[GatewayProcess], None] = lambda process: None) -> None:
        """Serves until it is told to end; `watch` is called with the process before it starts."""
        from headrace.gateway.process import GatewayProcess

        log_to_stderr()
        require_for("gateway")
        host = self.host or usual_host(keyed=settings.keyed)
        if not settings.keyed:
            powers = "call models, pay trajectories and read the pool"
            warn_unprotected(host, powers, "--api-key, --reward-key and --admin-key")
        elif not (settings.api_key or settings.tenants):
            warn_unprotected(host, "call models", "--api-key")
        process = GatewayProcess(
            settings,
            host=host,
            port=self.port,
            workers=self.workers,
            journal=self.journal,
            pool_options=self.options(),
            pool_address=self._pool(),
            pool_key=pool_key(None),
            drain_s=self.drain_s,
        )
        watch(process)
        with listening_on(host, self.port):
            process.run(_StartOutput())

    def settings(self, **own: Any) -> GatewaySettings:
        """The gateway's settings, with keys from the environment where no flag gave them. `own` overrides flags."""
        given: dict[str, Any] = {name: getattr(self, name) for name in GatewaySettings.model_fields} | own
        if self.reward_worker_name is not None:
            require_for("gateway --reward-worker-name")
            from headrace.net.ray_cluster import ActorAddress

            given["reward_worker_name"] = str(
                ActorAddress(self.reward_worker_name, self.ray_namespace, self.ray_address)
            )
        given |= {name: configured_key(given[name], variable) for name, variable in KEY_VARIABLES.items()}
        return GatewaySettings(**given)

    def _pool(self) -> str | None:
        """The address of a pool that runs elsewhere; None where it is embedded."""
        if self.data_pool_name is not None:
            from headrace.pool.ray import actor_address

            return actor_address(self.data_pool_name, self.ray_address, self.ray_namespace)
        return self.pool_address


class ServeCommand(GatewayCommand):
    """Gateway and pool in one process on one port, until SIGTERM or Ctrl-C: a gateway with its pool embedded.

    With --engine it starts the rollout server too, as a process of its own (`headrace engine`) that ends with it.
    """

    engine: str | None = Field(
        None,
        min_length=1,
        description="start a rollout server too: a checkpoint's folder, its name on the hub, or tiny; in place of "
        "--vllm-addresses",
    )

    @model_validator(mode="after")
    def _ray_form(self) -> ServeCommand:
        if self.data_pool_name is not None or self.pool_address is not None:
            raise ValueError("serve has its pool embedded; for one that runs elsewhere, use `headrace gateway`")
        return self

    @model_validator(mode="after")
    def _served(self) -> ServeCommand:
        wanting = self._unserved()
        if self.engine is None and self.vllm_addresses is None and wanting:
            raise ValueError("; ".join(f"--engine or --vllm-addresses must be given{instead}" for instead in wanting))
        if self.engine is not None and self.vllm_addresses is not None:
            raise ValueError("--engine starts a rollout server and --vllm-addresses names those that run; give one")
        if self.engine is not None and not wanting:
            raise ValueError("--engine starts a rollout server, but every model of --models has addresses of its own")
        return self

    def execute(self) -> None:
        if self.engine is None:
            super().execute()
            return
        from headrace.gateway.own_engine import OwnEngine

        check_model(self.engine)
        with OwnEngine(self.engine, raw=self.logprobs_mode == "raw") as engine:
            remark(f"starting an engine with {self.engine}; its log is {engine.log}")
            self._run(self.settings(vllm_addresses=engine.listening()), engine.watch)


class _StartOutput:
    """Prints the progress of the start: what programs read on stdout, what is waited for on stderr."""

    def listening(self, address: str) -> None:
        print(f"gateway listening on {address}", flush=True)

    def waiting(self, reason: str) -> None:
        remark(reason)

    def ready(self, address: str) -> None:
        announce("gateway", address)


gateway_app = command("gateway", GatewayCommand)
serve_app = command("serve", ServeCommand)
