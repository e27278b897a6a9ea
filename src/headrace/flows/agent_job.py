"""What an agent that knows nothing of training is given for one rollout, and how a Python function is called with it.

This module is imported by the processes that agents run in: it stays small.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import orjson

from headrace.data.errors import InvalidInput
from headrace.targets import load_target

#: What stands for a key where the gateway wants none: SDKs refuse to begin without one.
NO_KEY = "not-needed"
#: Bytes of a task that fit into an environment: Linux takes no variable above 128 KiB. A larger one is on stdin alone.
MAX_VARIABLE = 120_000
#: What a function may take beside `task` and `base_url`, by name.
OPTIONAL = ("api_key", "model")

AgentFunction = Callable[..., Any]


class AgentJob(msgspec.Struct, frozen=True):
    """One rollout, as its agent knows it: the row without its hidden fields, the address of its calls, and the agent's
    own key."""

    task: dict[str, Any]
    base_url: str
    api_key: str | None = None
    model: str | None = None

    def environment(self) -> dict[str, str]:
        """The variables from which SDKs and scripts take the address, the key and the task."""
        key = self.api_key or NO_KEY
        found = {
            "OPENAI_BASE_URL": f"{self.base_url}/v1",
            "ANTHROPIC_BASE_URL": self.base_url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_API_KEY": key,
            "HEADRACE_BASE_URL": self.base_url,
        }
        if self.model is not None:
            found["HEADRACE_MODEL"] = self.model
        text = self.task_json()
        if len(text) <= MAX_VARIABLE:
            found["HEADRACE_TASK"] = text.decode()
        return found

    def task_json(self) -> bytes:
        """The task as JSON, on one line."""
        return orjson.dumps(self.task)

    def arguments(self, function: AgentFunction) -> dict[str, Any]:
        """What a function is called with beside the task and the address: of `OPTIONAL`, those that it names."""
        named = inspect.signature(function).parameters
        given = {"api_key": self.api_key or NO_KEY, "model": self.model}
        return {name: given[name] for name in OPTIONAL if name in named}


def load_agent_function(target: str, base: Path) -> AgentFunction:
    """The function that `agent.run` names. Raises `InvalidInput` where it is none, or cannot be called with a task and
    a base_url."""
    function: AgentFunction = load_target(target, base)
    if not callable(function):
        raise InvalidInput(f"{target} is {type(function).__name__}, and must be a function of (task, base_url)")
    job = AgentJob({}, "")
    try:
        inspect.signature(function).bind(job.task, job.base_url, **job.arguments(function))
    except TypeError as error:
        raise InvalidInput(f"{target} must take (task, base_url): {error}") from None
    return function


def is_coroutine(function: AgentFunction) -> bool:
    """Whether calling it gives something to await."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
