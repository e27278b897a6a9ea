"""The registry of rewards by name. Those that ship are loaded from their files when they are first asked for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import Any, cast

from headrace.files import nearest
from headrace.rewards.reward_function import RewardFunction, asks_for_truth

SUFFIX = "reward"
#: Fields of a data set's configuration, and of an environment's, that name rewards.
DATASET_FIELDS, CONFIG_FIELDS = ("dataset_reward_funcs", "reward_funcs"), ("reward_functions", "reward_funcs")

Registered = type[RewardFunction] | Callable[..., Any]


class RewardRegistry:
    """Rewards by name. A class is registered under its name in lower case without "reward", or under a given name."""

    def __init__(self) -> None:
        self._registry: dict[str, Registered] = {}

    def register(self, cls: Any = None, name: str | None = None) -> Any:
        """Registers a class, as a decorator: `@registry.register`, or `@registry.register(name="mine")`. Raises
        `TypeError` for anything but a `RewardFunction`."""

        def registered(cls: Any) -> Any:
            if not inspect.isclass(cls) or not issubclass(cls, RewardFunction):
                raise TypeError(f"{cls!r} is no subclass of RewardFunction")
            called = name or cls.__name__.lower()
            self._registry[called.removesuffix(SUFFIX).lower() if called.endswith(SUFFIX) else called] = cls
            return cls

        return registered if cls is None else registered(cls)

    def register_function(self, name: str, function: Registered) -> None:
        """Registers a function of completions, which may return one number for all of them."""
        self._registry[name] = function

    def create(self, name_or_config: str | Mapping[str, Any], **kwargs: Any) -> RewardFunction:
        """Makes a reward by name, or by `{"type": NAME, "weight": ..., "params": {...}}`, which overrides kwargs.
        Raises as `get`."""
        if isinstance(name_or_config, str):
            name, options = name_or_config, kwargs
        else:
            given = dict(name_or_config)
            name = given.pop("type")
            inner = given.pop("params", {})
            options = {**kwargs, **given, **inner}
        found: Any = self.get(name)
        if not inspect.isclass(found):
            return LegacyFunctionWrapper(found, **options)
        made: Any = found(**options)
        return cast(RewardFunction, made)

    def get(self, name: str) -> Registered:
        """The class or function of a name. Raises `ImportError`, with the nearest known name, where there is none."""
        if name not in self._registry:
            self._load(name)
        return self._registry[name]

    def list_registered(self) -> list[str]:
        """The names that are registered or were loaded; not all that ship."""
        return list(self._registry)

    def load_required_functions(self, config: Any) -> set[str]:
        """Loads the rewards that a configuration and its data sets name; returns their names."""
        named: set[str] = set()
        for dataset in getattr(config, "datasets", ()):
            for field in DATASET_FIELDS:
                named.update(getattr(dataset, field, None) or ())
            for kind in getattr(dataset, "types", None) or ():
                named.update(kind.get("reward_funcs", ()))
        for field in CONFIG_FIELDS:
            for one in getattr(config, field, None) or ():
                if isinstance(one, str):
                    named.add(one)
                elif isinstance(one, dict) and "type" in one:
                    named.add(one["type"])
        for name in named:
            self.get(name)
        return named

    def _load(self, name: str) -> None:
        """Loads the file of a reward that ships: `NAME_reward.py`, with a class or a function of that name."""
        stem = name.removesuffix(f"_{SUFFIX}")
        if stem not in shipped():
            known = sorted({*self._registry, *shipped()})
            raise ImportError(
                f"no reward is called {name!r}{nearest(name, known) or ': there are ' + ', '.join(known)}"
            )
        module = importlib.import_module(f"headrace.rewards.{stem}_{SUFFIX}")
        wanted = f"{stem}_{SUFFIX}".replace("_", "")
        classes = {key.lower(): kind for key, kind in vars(module).items() if inspect.isclass(kind)}
        self._registry[name] = classes.get(wanted) or getattr(module, f"{stem}_{SUFFIX}")


class LegacyFunctionWrapper(RewardFunction):
    """A plain function as a `RewardFunction`."""

    def __init__(self, func: Callable[..., Any], weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight=weight, **kwargs)
        self.func = func

    @property
    def name(self) -> str:
        return str(getattr(self.func, "__name__", type(self.func).__name__))

    @property
    def needs_truth(self) -> bool:
        """Whether the function does, whatever else may be passed to it."""
        return asks_for_truth(self.func)

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        found = self.func(completions, **kwargs)
        return found if isinstance(found, list) else [found] * len(completions)


def options_of(registered: Registered) -> set[str] | None:
    """The options that a reward takes; None for a class that does not ship: what it has no parameter for stands in its
    `config`, and it may read that."""
    common = _parameters(RewardFunction)
    if not inspect.isclass(registered):
        return common  # a function is handed none of its own
    return common | _parameters(registered) if registered.__module__.startswith(f"{__package__}.") else None


def _parameters(kind: type[Any]) -> set[str]:
    """The parameters that a class is made with, by their names."""
    found = inspect.signature(kind).parameters.items()
    return {name for name, parameter in found if parameter.kind is not parameter.VAR_KEYWORD}


def shipped() -> Iterable[str]:
    """The names of the rewards that ship, each with a file here."""
    ending = f"_{SUFFIX}.py"
    return sorted(
        file.name.removesuffix(ending)
        for file in resources.files("headrace.rewards").iterdir()
        if file.name.endswith(ending)
    )


registry = RewardRegistry()
