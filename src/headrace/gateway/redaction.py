"""`Redaction`: a user's own function that looks at every step before it is kept, and may drop it.

It is shown the whole step and cannot change it: tokens are what was sampled, or they are not kept at all. A function
that fails drops the step, never the agent's call.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.data.errors import InvalidInput, shown
from headrace.data.step import Step
from headrace.files import import_file
from headrace.gateway.counters import GatewayCounters

log = logging.getLogger("headrace.gateway")

RedactionHook = Callable[[Step], Any]
#: Why the step that stands in the place of a dropped one is quarantined.
REDACTED = "redacted"


class Redaction:
    """The function that `--redact` names, as `module:function` or `file.py:function`."""

    def __init__(self, spec: str, counters: GatewayCounters) -> None:
        """Loads the function; raises `InvalidInput` where there is none."""
        self._hook = load_hook(spec)
        self._counters = counters

    async def keeps(self, step: Step, channel: str) -> bool:
        """Whether a step is to be kept. It must be whole: its prompt's ids all there, and not `builds_on` another."""
        try:
            said = self._hook(_shown(step))
            if inspect.isawaitable(said):
                said = await said
            if said is not None and not isinstance(said, bool):  # nor one that equals it: a False of numpy's is none
                raise TypeError(f"it returned {shown(said)}; False drops a step, True or None keeps it")
        except Exception as error:
            log.error("--redact failed at a step of channel %r, which is dropped: %r", channel, error)
            self._counters.add("redacted", channel, "error")
            return False
        if said is False:
            self._counters.add("redacted", channel, "dropped")
        return said is not False


def redacted_step(step: Step) -> Step:
    """What stands in a dropped step's place: its index, its reward and its end, and nothing of what was said."""
    return Step(
        prompt_ids=[0],
        response_ids=[0],
        trajectory_uid=step.trajectory_uid,
        prompt_uid=step.prompt_uid,
        step_index=step.step_index,
        reward=step.reward,
        policy_version=step.policy_version,
        is_last=step.is_last,
        call_id=step.call_id,
        quarantined=REDACTED,
    )


def load_hook(spec: str) -> RedactionHook:
    """The function that `module:function` or `file.py:function` names."""
    module, _, name = spec.rpartition(":")
    path = Path(module)
    try:
        if module.endswith(".py"):
            found = import_file(path, f"headrace_redact_{path.stem}")
        else:
            found = importlib.import_module(module)
    except Exception as error:  # whatever the user's module does when it is imported
        raise InvalidInput(f"--redact {spec}: {module} cannot be imported: {error!r}") from error
    hook = getattr(found, name, None)
    if not callable(hook):
        raise InvalidInput(f"--redact {spec}: {module} has no function {name!r}")
    return hook  # type: ignore[no-any-return]


def _shown(step: Step) -> Step:
    """The step as a function may see it: whatever it does with it, the step itself stays as it is."""
    arrays = {
        name: _read_only(value)
        for name in ("prompt_ids", "response_ids", "rollout_log_probs", "routed_experts")
        if (value := getattr(step, name)) is not None
    }
    return msgspec.structs.replace(
        step, **arrays, metadata=copy.deepcopy(step.metadata), sampling=copy.deepcopy(step.sampling)
    )


def _read_only(array: Any) -> Any:
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view
