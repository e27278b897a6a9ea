"""Rewards under atroposlib's names: Headrace's, but where one raises, every completion gets 0, as in atroposlib.

Classes are subclasses of Headrace's, made when a module is imported by atroposlib's name, and the registry is a view of
Headrace's. Nothing in `headrace.rewards` changes, so both names can be used in one process.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any, cast

from headrace import rewards
from headrace.rewards.registry import Registered, RewardRegistry

PACKAGE = rewards.__name__


class RewardFunction(rewards.RewardFunction):
    """Headrace's, but a call that raises returns 0 for all completions."""

    all_zero_on_error = True


@cache
def paying_zero(cls: type[rewards.RewardFunction]) -> type[rewards.RewardFunction]:
    """The subclass of a reward that returns 0 on errors; the reward itself where it does already."""
    if issubclass(cls, RewardFunction):
        return cls
    if cls is rewards.RewardFunction:
        return RewardFunction
    made = ABCMeta(cls.__name__, (cls, RewardFunction), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    return cast(type[rewards.RewardFunction], made)


class AtroposRegistry(RewardRegistry):
    """A view of Headrace's registry whose rewards return 0 on errors."""

    def __init__(self) -> None:
        self._registry = rewards.registry._registry

    def get(self, name: str) -> Registered:
        """As Headrace's, with classes as `paying_zero`."""
        found = super().get(name)
        return paying_zero(found) if inspect.isclass(found) and issubclass(found, rewards.RewardFunction) else found

    def create(self, name_or_config: str | Mapping[str, Any], **kwargs: Any) -> rewards.RewardFunction:
        """As Headrace's, with a reward that returns 0 on errors."""
        made = super().create(name_or_config, **kwargs)
        made.all_zero_on_error = True  # also for a plain function, which has no class of its own
        return made


registry = AtroposRegistry()


def mirror(module: ModuleType, into: ModuleType) -> None:
    """Copies the names of one of Headrace's modules into another: reward classes as `paying_zero`, the registry as its
    view."""
    for name, value in vars(module).items():
        if name.startswith("__"):
            continue
        if inspect.isclass(value) and issubclass(value, rewards.RewardFunction):
            value = paying_zero(value)
        elif value is rewards.registry:
            value = registry
        setattr(into, name, value)
