"""`headrace pool serve`, `start` and `stop`, and the options of every command that makes a pool."""

from __future__ import annotations

import urllib.parse
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, Field

from headrace.cli.actors import ActorOptions, attended
from headrace.cli.common import announce, listening_on, pool_key, warn_unprotected
from headrace.commands import CommandModel, Positional, Usage, command
from headrace.dashboard import DASHBOARD_HELP, DashboardMode
from headrace.data.visible import log_to_stderr
from headrace.extras import require_for
from headrace.files import Key, read
from headrace.pool import KEY_VARIABLE
from headrace.pool.config import ChannelConfig, Limits

#: What a file of `--config` may hold.
CONFIG_KEYS = ("channels", "defaults", "limits")


class PoolOptions(BaseModel):
    """The options of a pool that a command makes."""

    journal: Path | None = Field(
        None, description="folder in which what was acknowledged is found again; without one the pool lives in memory"
    )
    durability: Literal["os", "fsync"] | None = Field(
        None,
        description="what an acknowledgement outlives: the process (os) or the machine (fsync, the default)",
    )
    segment_mb: float = Field(64, gt=0, description="size at which the journal begins a new file")
    quota_mb: float | None = Field(None, gt=0, description="most that the journal may take on disk")
    pool_memory_mb: float | None = Field(
        None,
        ge=0,
        description="steps' arrays and images that a pool with a journal keeps in memory, 1024 MB unless given; those "
        "beyond are read from the journal when they are handed out",
    )
    channel: list[str] = Field(
        [], description="a channel's options, as NAME:option=value,...; may be given several times"
    )
    config: Path | None = Field(
        None, description=f"YAML or JSON file with {', '.join(CONFIG_KEYS)}; --channel overrides it"
    )

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `DataPool` but for its journal."""
        found = read_config(self.config) if self.config is not None else {}
        channels = found.get("channels", {})
        for spec in self.channel:
            name, options = channel_spec(spec)
            channels[name] = {**channels.get(name, {}), **options}
        given: dict[str, Any] = {
            "durability": self.durability,
            "segment_mb": self.segment_mb,
            "quota_mb": self.quota_mb,
        }
        if channels:
            given["channels"] = channels
        if found.get("defaults"):
            given["defaults"] = found["defaults"]
        limits = dict(found.get("limits", {}))
        if self.pool_memory_mb is not None:
            limits["memory_mb"] = self.pool_memory_mb
        if limits:
            given["limits"] = Limits(**limits)
        return given


class PoolServeCommand(PoolOptions, CommandModel):
    """Run a pool as an HTTP service, until SIGTERM or Ctrl-C. Prints one line with its address once it is ready."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8200, ge=0, le=65535, description="port to listen on; 0: a free one")
    key: Key = Field(None, description=f"key that callers must present (or set {KEY_VARIABLE})")
    max_body_mb: float = Field(512, gt=0, description="largest request that is taken")
    backups: Path | None = Field(
        None, description="folder below which `pool backup` may copy the journal; without one it is refused"
    )
    dashboard: DashboardMode = Field("edit", description=DASHBOARD_HELP)

    def execute(self) -> None:
        from headrace.dashboard.dashboard import Dashboard
        from headrace.dashboard.login import DashboardLogin
        from headrace.dashboard.routes import add_dashboard
        from headrace.dashboard.source import RunningPool
        from headrace.pool.embedded import DataPool
        from headrace.pool.http import PoolServer, create_app

        log_to_stderr()
        key = pool_key(self.key)
        if key is None:
            warn_unprotected(self.host, "read and change this pool", f"{KEY_VARIABLE} or --key")
        with DataPool(self.journal, **self.options()) as pool:
            app = create_app(pool, key=key, max_body_mb=self.max_body_mb, backups=self.backups)
            source = RunningPool(pool, "pool", editable=self.dashboard == "edit")
            add_dashboard(app, Dashboard(source), DashboardLogin(key))
            with listening_on(self.host, self.port):
                server = PoolServer(pool, self.host, self.port, app=app, key=key)
            server.run(lambda address: announce("pool", address))


class PoolStartCommand(PoolOptions, ActorOptions, CommandModel):
    """Run a pool as a named actor of a Ray cluster, detached unless --attach is given. Ray restarts it when it dies;
    with a journal it then comes back with everything that was acknowledged.

    The journal lies on this node, and the actor is pinned to it, unless --shared-journal says that every node sees
    that folder.
    """

    name: str = Field("data_pool", description="the actor's name")
    ray_address: str = Field("auto", description="the cluster: auto, or its HOST:PORT")
    namespace: str = Field("default", description="the actor's namespace")
    shared_journal: bool = Field(False, description="every node sees the journal's folder: the actor may move")

    def execute(self) -> None:
        require_for("pool start")
        from headrace.pool.ray import actor_address, start_pool

        def start() -> Any:
            return start_pool(
                self.name,
                address=self.ray_address,
                namespace=self.namespace,
                journal=self.journal,
                shared_journal=self.shared_journal,
                placement=self.placement(),
                attached=self.attach,
                **self.options(),
            )

        def ready() -> None:
            print(f"pool ready on {actor_address(self.name, self.ray_address, self.namespace)}", flush=True)

        if self.attach:
            attended(self.name, start, "process_id", ready)
        else:
            start()
            ready()


class PoolStopCommand(CommandModel):
    """End a pool that runs as a Ray actor, for good. Its journal stays."""

    target: Positional[str] = Field(description="ray-actor://NAME?namespace=NAMESPACE")

    def execute(self) -> None:
        parts = urllib.parse.urlsplit(self.target)
        if parts.scheme != "ray-actor" or not parts.netloc:
            raise Usage(
                f"TARGET is {self.target!r}; stop ends ray-actor://NAME?namespace=NAMESPACE. A `headrace pool serve` "
                "ends with SIGTERM or Ctrl-C"
            )
        from headrace.pool.ray import DEFAULT_NAMESPACE, stop_pool

        query = dict(urllib.parse.parse_qsl(parts.query))
        stop_pool(
            urllib.parse.unquote(parts.netloc),
            address=query.get("address", "auto"),
            namespace=query.get("namespace", DEFAULT_NAMESPACE),
        )
        print(f"stopped {self.target}")


def channel_spec(text: str) -> tuple[str, dict[str, Any]]:
    """The channel's name and options in a text such as `train:n_rollouts=8,overflow=reject`. Raises `Usage` or
    `InvalidInput` for another form, or an unknown or wrong option."""
    name, _, rest = text.partition(":")
    if not name:
        raise Usage(f"--channel {text!r}: it begins with the channel's name, as in train:n_rollouts=8")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        option, equals, value = part.partition("=")
        if not equals:
            raise Usage(f"--channel {text!r}: {part!r} should be option=value, as in train:n_rollouts=8")
        options[option.strip().replace("-", "_")] = _value(value.strip())
    ChannelConfig().changed(options)
    return name, options


def _value(text: str) -> Any:
    """An option's value: a number, true, false or none where the text is one, else the text."""
    if text.lower() in ("none", "null"):
        return None
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return found if isinstance(found, bool | int | float) else text


def read_config(path: Path) -> dict[str, Any]:
    """The channels, defaults and limits of a configuration file. Raises `Usage` or `InvalidInput` for an unknown key or
    a value that cannot be.
    """
    found = read(path)
    if not all(isinstance(value, dict) for value in found.values()):
        raise Usage(f"--config {path}: it may hold {', '.join(CONFIG_KEYS)}, each an object")
    for name in found:
        if name not in CONFIG_KEYS:
            raise Usage(f"--config {path}: unknown key {name!r}; known: {', '.join(CONFIG_KEYS)}")
    base = ChannelConfig().changed(found.get("defaults", {}))
    for name, options in found.get("channels", {}).items():
        if not isinstance(options, dict):
            raise Usage(f"--config {path}: channel {name!r} must be an object of options, not {options!r}")
        base.changed(options)
    unknown = set(found.get("limits", {})) - set(Limits.__struct_fields__)
    if unknown:
        raise Usage(f"--config {path}: unknown limit {min(unknown)!r}; known: {', '.join(Limits.__struct_fields__)}")
    return found


serve_app = command("serve", PoolServeCommand)
start_app = command("start", PoolStartCommand)
stop_app = command("stop", PoolStopCommand)
