"""`Place`: where a call belongs. Its path names a trajectory, or its conversation is found among those of a live
service; whoever carries the call out need not know which."""

from __future__ import annotations

from typing import Protocol

from headrace.gateway.access import Caller
from headrace.gateway.ask import Ask
from headrace.gateway.gateway import Gateway
from headrace.gateway.models.served_model import ServedModel
from headrace.gateway.session import Session
from headrace.gateway.turn import Turn


class Place(Protocol):
    """Made for one call."""

    #: How many segments of the path are in front of what the dialect's vendor calls it.
    depth: int

    async def session(self, ask: Ask, policy: ServedModel, digest: str, *, recorded: bool) -> Session:
        """What is known of the trajectory's calls to the model; `Refusal` where there is none to be had."""
        ...

    def call_id(self, given: str) -> str:
        """What the call is to be known by, once its session is found; `given` is unique."""
        ...

    def answered(self, turns: list[Turn]) -> None:
        """The call's steps are handed over, and its agent is about to see the end of its answer."""
        ...

    async def left(self) -> None:
        """The call is over, however it ended."""
        ...

    def unheard(self) -> None:
        """Its answer did not reach its client."""
        ...


class Named:
    """The trajectory that a path names."""

    depth = 2

    def __init__(self, gateway: Gateway, caller: Caller, uid: str, prompt: str) -> None:
        self._gateway = gateway
        self._caller = caller
        self._uid = uid
        self._prompt = prompt

    async def session(self, ask: Ask, policy: ServedModel, digest: str, *, recorded: bool) -> Session:
        return await self._gateway.session(self._caller, self._uid, self._prompt, policy, recorded=recorded)

    def call_id(self, given: str) -> str:
        return given

    def answered(self, turns: list[Turn]) -> None:
        """Nobody has to know."""

    async def left(self) -> None:
        """Nothing has to be put away."""

    def unheard(self) -> None:
        """Whoever asks again names the trajectory again."""
