"""Where in a Ray cluster an actor stands, how long it lives, and the process that it lives as long as.

Nothing here imports Ray before an actor is placed: configurations that name a placement are read without it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headrace.data.errors import HeadraceError, InvalidInput

#: Seconds between two questions whether an actor lives.
LOOK_S = 1.0
#: Answers in a row that must say that an actor is dead: the call that it died under says so too where Ray restarts it.
DEAD_ANSWERS = 3


class Placement(BaseModel):
    """What an actor's node must have, which one it should be, and how often Ray begins the actor again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_cpus: float | None = Field(None, ge=0, description="CPUs that Ray sets aside for it")
    resources: dict[str, float] = Field({}, description="what else its node must have, such as {scoring: 1}")
    node: str | None = Field(
        None, min_length=1, description="address or id of the node to prefer; where that is gone, Ray takes another"
    )
    spread: bool = Field(False, description="prefer the node that has the least to do")
    max_restarts: int = Field(-1, ge=-1, description="times that Ray begins it again where it dies; -1: always")

    def options(self, default_cpus: float) -> dict[str, Any]:
        """The same as options of an actor. Raises `InvalidInput` where no node has that address or id; the cluster
        must be joined."""
        found: dict[str, Any] = {
            "num_cpus": default_cpus if self.num_cpus is None else self.num_cpus,
            "max_restarts": self.max_restarts,
        }
        if self.resources:
            found["resources"] = dict(self.resources)
        if self.node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            found["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id(self.node), soft=True)
        elif self.spread:
            found["scheduling_strategy"] = "SPREAD"
        return found

    def flags(self) -> list[str]:
        """The same as flags of a command that starts an actor."""
        found = [] if self.num_cpus is None else ["--num-cpus", f"{self.num_cpus:g}"]
        for name, amount in self.resources.items():
            found += ["--resource", f"{name}={amount:g}"]
        if self.node is not None:
            found += ["--node", self.node]
        if self.spread:
            found.append("--spread")
        if self.max_restarts != -1:
            found += ["--max-restarts", str(self.max_restarts)]
        return found


def resource_of(text: str) -> tuple[str, float]:
    """The name and the amount in `NAME=AMOUNT`; raises `ValueError`."""
    name, equals, amount = text.partition("=")
    try:
        if not name or not equals or not float(amount) >= 0:
            raise ValueError
        return name, float(amount)
    except ValueError:
        raise ValueError(f"{text!r} should be NAME=AMOUNT, as in scoring=1") from None


def node_id(node: str) -> str:
    """The id of the living node of that address, name or id. Raises `InvalidInput`, naming those that there are."""
    import ray

    living = [known for known in ray.nodes() if known["Alive"]]
    for known in living:
        if node in (known["NodeID"], known["NodeManagerAddress"], known["NodeManagerHostname"]):
            return str(known["NodeID"])
    there = ", ".join(sorted({str(known["NodeManagerAddress"]) for known in living}))
    raise InvalidInput(f"the cluster has no node {node!r}; its nodes are {there}")


class ActorGone(HeadraceError):
    """An actor ended for good that should have lived on."""

    code = "actor_gone"


@contextmanager
def ending_signal() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set while the context lasts, in place of what Ray has them do. In the main
    thread, once the cluster is joined."""
    told = threading.Event()
    before = {number: signal.signal(number, lambda *_: told.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def attend(name: str, handle: Any, probe: str, told: threading.Event) -> None:
    """Waits until `told` is set. Raises `ActorGone` where the actor ended for good before; one that Ray begins again is
    waited for. `probe` is a method of the actor's that answers at once."""
    import ray
    import ray.exceptions as rayerr

    dead = 0
    while not told.wait(LOOK_S):
        asked = getattr(handle, probe).remote()
        while not told.is_set() and not ray.wait([asked], timeout=LOOK_S)[0]:
            pass
        if told.is_set():
            return
        try:
            ray.get(asked)
            dead = 0
        except rayerr.ActorUnavailableError:
            dead = 0
        except rayerr.RayActorError as error:
            dead += 1
            if dead == DEAD_ANSWERS:
                raise ActorGone(f"the actor {name!r} ended for good: {' '.join(str(error).split())}") from None
