"""`where: {ray: ...}` of a run's file: which parts of the run are actors of a Ray cluster, and where they stand.

    pool               an actor with its journal in the run's folder
    reward             an actor that scores what is complete, and keeps nothing
    rollout workers    actors that play rollouts, and keep nothing
    trainer            with `train`, workers of Ray Train that share the model; checkpoints are in the run's folder

Each belongs to a process of the run: `headrace pool start --attach`, `headrace reward start --attach`, the rollouter.
Ray restarts an actor that dies, on another node where its own is gone; the runner restarts the process that it belongs
to, which makes it anew. So nothing of a run is left in the cluster, however it ends. Rollout servers, gateway,
rollouter and, without `train`, the trainer are plain processes on the machine of `headrace run`, which is a node of the
cluster or reaches it.
"""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from headrace.net.ray_placement import Placement
from headrace.trainer.config import Section, TrainWorkers

#: A node that any route leads to, to ask which address this machine is known by; nothing is sent to it.
ANYWHERE = "192.0.2.1"
#: How the address of a cluster begins that is joined by Ray's client.
CLIENT_SCHEME = "ray://"


class RolloutPlace(Placement):
    """The rollout workers: how many, and where."""

    workers: int = Field(1, ge=1, le=4096, description="actors that play rollouts, so many at once as rollout says")


class RayPlace(Section):
    """A Ray cluster on which pool, reward worker and rollout workers are actors."""

    ray: str = Field(description="auto, HOST:PORT or ray://HOST:10001")
    namespace: str = Field("default", min_length=1)
    host: str | None = Field(
        None, min_length=1, description="this machine's address, as nodes reach the gateway; default: found out"
    )
    shared_folder: bool = Field(
        False, description="every node sees the run's folder at the same path: the pool may move; else it stays here"
    )
    pool: Placement = Placement()
    reward: Placement = Placement()
    rollout: RolloutPlace = RolloutPlace()
    train: TrainWorkers | None = Field(
        None, description="workers that train together; default: the trainer is one process on this machine"
    )

    @field_validator("ray")
    @classmethod
    def _cluster(cls, given: str) -> str:
        named = given.removeprefix(CLIENT_SCHEME)
        host, _, port = named.rpartition(":")
        if given != "auto" and not (host and port.isdigit()):
            raise ValueError(
                f"{given!r} is no cluster; it is auto, HOST:PORT such as 10.0.0.1:6379, or ray://HOST:10001"
            )
        return given

    @model_validator(mode="after")
    def _movable(self) -> RayPlace:
        placed, train = self.pool, self.train
        if train is not None and not (self.shared_folder or train.here):
            raise ValueError(
                "where.train has workers that write their parts of checkpoints into the run's folder; set "
                "where.shared_folder: true where every node sees that folder, or where.train.here: true to keep them "
                "on this machine"
            )
        if not self.shared_folder and self.ray.startswith(CLIENT_SCHEME):
            raise ValueError(
                f"where.ray {self.ray} is joined by Ray's client: this machine is no node, and the pool, whose journal "
                "lies in the run's folder, cannot stay here; set where.shared_folder: true where every node sees that "
                "folder, or run on a node and name HOST:6379 or auto"
            )
        if not self.shared_folder and (placed.resources or placed.node is not None or placed.spread):
            raise ValueError(
                "where.pool says where the pool is to be, and its journal lies in the run's folder; set "
                "where.shared_folder: true where every node sees that folder, or leave where.pool out"
            )
        return self

    @property
    def reached_at(self) -> str:
        """The address at which nodes reach this machine: `host`, or the one that this machine reaches them from."""
        return self.host or _own_address(self.ray_address[0] if self.ray_address is not None else ANYWHERE)

    @property
    def ray_address(self) -> tuple[str, int] | None:
        """The cluster's host and port; None where Ray finds it by itself."""
        if self.ray == "auto":
            return None
        host, _, port = self.ray.removeprefix(CLIENT_SCHEME).rpartition(":")
        return host.strip("[]"), int(port)

    def beside(self) -> RayPlace:
        """The same with the pool on this machine, for a folder that no other node sees."""
        return self.model_copy(update={"shared_folder": False, "pool": Placement()})

    def pool_address(self, run: Path) -> str:
        """The pool of the run in a folder, as `connect` takes it."""
        from headrace.net.ray_cluster import ActorAddress

        return str(ActorAddress(actor_name("pool", run), self.namespace, self.ray))

    def train_flags(self, *, here: bool) -> list[str]:
        """Flags of `headrace train`; `here` keeps its workers on this machine. None without `train`."""
        if self.train is None:
            return []
        workers = self.train.model_copy(update={"here": self.train.here or here})
        return [*workers.flags(), "--ray-address", self.ray, "--namespace", self.namespace]

    def workers(self) -> dict[str, Any]:
        """The section `workers` of a rollouter's file."""
        placement = self.rollout.model_dump(mode="json", exclude_defaults=True, exclude={"workers"})
        return {
            "ray": self.ray,
            "namespace": self.namespace,
            "count": self.rollout.workers,
            "placement": placement,
        }


def actor_name(part: str, run: Path) -> str:
    """The name of a part's actor: its own for each run's folder, the same when the run goes on."""
    tag = hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:8]
    return f"headrace-{part}-{tag}"


def _own_address(towards: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((towards, 9))  # UDP: it chooses a route, and sends nothing
        except OSError:
            return "127.0.0.1"
        address: str = asked.getsockname()[0]
        return address
