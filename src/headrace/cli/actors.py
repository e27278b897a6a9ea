"""The options of commands that start a Ray actor, and the life of one that ends with its command."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, field_validator

if TYPE_CHECKING:
    from headrace.net.ray_placement import Placement


def check_resources(given: list[str]) -> list[str]:
    """What `--resource` was given. Raises `ValueError` where one is no NAME=AMOUNT."""
    from headrace.net.ray_placement import resource_of

    for text in given:
        resource_of(text)
    return given


class ActorOptions(BaseModel):
    """Where an actor stands, and how long it lives."""

    num_cpus: float | None = Field(None, ge=0, description="CPUs that Ray sets aside for the actor")
    resource: list[str] = Field(
        [], description="what else its node must have, as NAME=AMOUNT; may be given several times"
    )
    node: str | None = Field(
        None, description="address or id of the node to prefer; where it is gone, another is taken"
    )
    spread: bool = Field(False, description="prefer the node that has the least to do")
    max_restarts: int = Field(-1, ge=-1, description="times that Ray restarts the actor; -1: always")
    attach: bool = Field(
        False, description="stay, and have the actor end with this command; without it the command ends, the actor not"
    )

    _amounts = field_validator("resource")(check_resources)

    def placement(self) -> Placement:
        """What the flags say of its place."""
        from headrace.net.ray_placement import Placement, resource_of

        return Placement(
            num_cpus=self.num_cpus,
            resources=dict(map(resource_of, self.resource)),
            node=self.node,
            spread=self.spread,
            max_restarts=self.max_restarts,
        )


def attended(name: str, start: Callable[[], Any], probe: str, announce: Callable[[], None]) -> None:
    """Starts an actor, announces it, and stays until SIGTERM or Ctrl-C; the actor then ends with this process. Raises
    `ActorGone` where it ends for good before."""
    from headrace.net.ray_placement import attend, ending_signal

    handle = start()
    with ending_signal() as told:
        announce()
        attend(name, handle, probe, told)
