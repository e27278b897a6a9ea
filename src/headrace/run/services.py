"""What a run is made of: processes with their command lines (`Service`), their ports, and the files in its folder.

Every kind of run plans these and hands them to `headrace.run.stack`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from headrace.data.keys import configured_key
from headrace.pool import KEY_VARIABLE

#: Where everything of a run listens.
HOST = "127.0.0.1"
#: Files and folders of a run.
JOURNAL, OUTBOX, LOGS, TRAINER, EVALUATIONS = "journal", "outbox", "logs", "trainer", "evaluations"
TRAINER_FILE, ROLLOUT_FILE, REWARD_FILE, ENVIRONMENT_FILE = "trainer.yaml", "rollout.yaml", "reward.yaml", "env.yaml"
ROLLOUT_STATE = "rollout.json"
#: Where the gateway's admin key is, for the gateway and for those who pause it and read the pool behind it.
ADMIN_KEY_VARIABLE = "HEADRACE_ADMIN_KEY"

State = Literal["listening", "ready"]


def gateway_does(address: str) -> str:
    """What a run says of its gateway once it is ready: where agents call, and where people look."""
    return f"records every call, on {address}; look at {address}/dashboard"


@dataclass(frozen=True, slots=True)
class Service:
    """One process of a run.

    It begins once each service of `after` has got to the state that is named there. `again` is added to its command
    line where it was started before. Where it dies, those of `takes_with` are ended and begun again too.
    """

    name: str
    command: tuple[str, ...]
    does: str
    #: The words of the line `WORDS listening on ADDRESS` and `WORDS ready on ADDRESS`; None: it says nothing, and is
    #: ready once `health` answers, or at once.
    announces: str | None = None
    #: The address of a server whose `/health` tells whether it is ready.
    health: str | None = None
    after: Mapping[str, State] = field(default_factory=dict)
    again: tuple[str, ...] = ()
    takes_with: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    #: Whether it ends by itself, which is then its success.
    ends: bool = False
    #: Whether it tries everything itself, so that a failure which it ends with is the last word, and only one that was
    #: killed begins again.
    final: bool = False
    folder: Path | None = None

    def line(self) -> str:
        """The command line as a shell would take it."""
        shown = ["headrace", *self.command[3:]] if self.command[1:3] == ("-m", "headrace") else list(self.command)
        return shlex.join([*(f"{name}={value}" for name, value in self.env.items()), *shown])


@dataclass(frozen=True, slots=True)
class RunPorts:
    """The ports of a run: of each rollout server that it starts, and of the gateway."""

    servers: tuple[int, ...]
    gateway: int


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The services of a run in the order of their start, and their configuration files by name."""

    services: tuple[Service, ...]
    files: Mapping[str, Mapping[str, Any]]
    #: Where agents, trainer and rollouter find the gateway; the pool behind it; and the rollout servers.
    gateway: str
    pool: str
    servers: tuple[str, ...]

    def write(self, run: Path) -> None:
        """Writes the configuration files into the run's folder."""
        for name, content in self.files.items():
            (run / name).write_text(yaml.safe_dump(dict(content), sort_keys=False))

    def named(self, name: str) -> Service:
        """The service of a name."""
        return next(service for service in self.services if service.name == name)


def headrace(*args: Any) -> tuple[str, ...]:
    """The command line of one of Headrace's own commands, by this Python."""
    return (sys.executable, "-m", "headrace", *map(str, args))


def key_variables() -> dict[str, str]:
    """What the processes of a run get beside the environment. A gateway's admin key opens the pool behind it too."""
    key = configured_key(None, KEY_VARIABLE, ADMIN_KEY_VARIABLE)
    return {KEY_VARIABLE: key} if key else {}
