"""Agents that know nothing of training: each rollout is played by code that has nothing but a `base_url`.

The black box is a coroutine, which runs in this process's event loop; a function, which runs in a process of its own;
or a command line. What it returns or prints is not used: its calls are its trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from headrace.data.errors import InvalidInput
from headrace.flows.agent_job import AgentJob, is_coroutine, load_agent_function
from headrace.flows.agent_process import CommandAgent, FunctionAgent
from headrace.flows.flow import AgentFailed, AgentFlowBase
from headrace.flows.gateway_client import GatewayClient, Handle
from headrace.flows.task import Task


class BlackBoxAgent(Protocol):
    """What runs an agent, any number of rollouts at once."""

    async def play(self, job: AgentJob) -> None:
        """Plays one rollout to its end; raises `AgentFailed`. Cancelled, it leaves nothing running."""

    async def aclose(self) -> None:
        """Ends what is kept running between rollouts."""


class CoroutineAgent:
    """A coroutine function, awaited in this process: the cheapest, for agents that wait for the model and do little
    else. One that blocks holds up all others."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._function = function

    async def play(self, job: AgentJob) -> None:
        """Awaits the agent."""
        try:
            await self._function(job.task, job.base_url, **job.arguments(self._function))
        except SystemExit as error:
            if error.code not in (None, 0):
                raise AgentFailed("exit_code", f"it ended with code {error.code}") from error

    async def aclose(self) -> None:
        """Nothing runs between rollouts."""


class BlackBoxAgentFlow(AgentFlowBase):
    """Begins a trajectory, has the agent play it with nothing but its address, and completes it. The reward is the
    reward loop's, or that of whoever scores the trajectory."""

    def __init__(self, gateway: GatewayClient, agent: BlackBoxAgent, **options: Any) -> None:
        super().__init__(gateway, **options)
        self.agent = agent

    async def play(self, task: Task, handle: Handle) -> None:
        """Runs the agent."""
        await self.agent.play(AgentJob(task.shown_row, handle.base_url, self.gateway.key, self.model))

    async def aclose(self) -> None:
        """Ends the agent's processes."""
        await self.agent.aclose()


def black_box_agent(base: Path, *, run: str | None, command: str | list[str] | None, process: bool | None) -> Any:
    """The agent that a configuration names. Raises `InvalidInput` where there is none such."""
    if command is not None:
        return CommandAgent(command, base)
    if run is None:
        raise InvalidInput("agent: give run, as file.py:function, or command")
    function = load_agent_function(run, base)
    if process is False and not is_coroutine(function):
        raise InvalidInput(
            f"agent.process is false, and {run} is no coroutine: a function runs in a process of its own"
        )
    if is_coroutine(function) and not process:
        return CoroutineAgent(function)
    return FunctionAgent(run, base)
