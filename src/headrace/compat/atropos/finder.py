"""The import hook that maps `import atroposlib.…` to the modules here.

A module that is covered is the one here, under both names; one of rewards is a copy whose classes return 0 on errors
(see `rewards`). Importing a module that is not covered, or a name that its module does not have, fails with what to do
instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from headrace.compat.atropos import rewards
from headrace.data.errors import HeadraceError
from headrace.files import nearest

ORIGINAL = "atroposlib"
#: The package here that stands for one of atroposlib's; the first prefix that fits counts.
PACKAGES = {f"{ORIGINAL}.envs.reward_fns": rewards.PACKAGE, ORIGINAL: "headrace.compat.atropos"}
#: Modules of `headrace.compat.atropos` that stand for none of atroposlib's.
OWN_MODULES = (".finder", ".lenient", ".rewards")
#: What is not covered, and what there is instead.
INSTEAD = {
    f"{ORIGINAL}.api": "the Trajectory API is `headrace api`",
    f"{ORIGINAL}.cli": "see `headrace env --help` and `headrace api --help`",
    f"{ORIGINAL}.envs.server_handling.managed_server_proxy": "a gateway does this: server_type='gateway'",
    f"{ORIGINAL}.envs.server_handling.proxy_client": "a gateway does this: server_type='gateway'",
    f"{ORIGINAL}.envs.server_handling.tool_call_translator": "a managed server reads tool calls by itself",
}
OTHERWISE = "take what you need of it into your file, or run the file with atroposlib itself: python FILE"


class Shadowing(UserWarning):
    """Warning: an installed atroposlib is not used."""


class Finder(MetaPathFinder):
    """Finds modules under atroposlib's names; raises `ModuleNotFoundError`, with what to do, for one that is not
    covered."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != ORIGINAL:
            return None
        here = covering(fullname)
        if here is None or importlib.util.find_spec(here) is None:
            raise ModuleNotFoundError(_not_covered(fullname), name=fullname)
        return ModuleSpec(fullname, Alias(here), is_package=True)


class Alias(Loader):
    """Loads one of the modules here under another name."""

    def __init__(self, here: str) -> None:
        self._here = here

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Replaces the empty module that the import made by the one here; a module of rewards is filled instead."""
        name = module.__name__
        found = importlib.import_module(self._here)
        if self._here.startswith(rewards.PACKAGE):
            if self._here == rewards.PACKAGE:
                importlib.import_module(f"{name}.registry")  # before the name means the registry itself
            rewards.mirror(found, module)
            found = module
        if "__getattr__" not in vars(found):
            found.__getattr__ = _missing(name, found)  # type: ignore[method-assign]
        sys.modules[name] = found


def covering(fullname: str) -> str | None:
    """The name of the module here for one of atroposlib's; None where there is none."""
    for original, ours in PACKAGES.items():
        if fullname == original or fullname.startswith(f"{original}."):
            rest = fullname.removeprefix(original)
            return None if rest in OWN_MODULES else ours + rest
    return None


def install() -> None:
    """Installs the import hook; a second call changes nothing. Raises `HeadraceError` where an atroposlib is imported
    already; warns where one is installed."""
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    if ORIGINAL in sys.modules:
        raise HeadraceError(
            f"{ORIGINAL} is imported already, from {getattr(sys.modules[ORIGINAL], '__file__', None)}: "
            "import headrace.compat.atropos before it, or leave it out"
        )
    real = importlib.util.find_spec(ORIGINAL)
    if real is not None:
        warnings.warn(
            f"{ORIGINAL} is installed ({real.origin}); here its names stand for Headrace's", Shadowing, stacklevel=3
        )
    sys.meta_path.insert(0, Finder())


def _missing(name: str, module: ModuleType) -> Any:
    """A module's `__getattr__`: raises, with what to do, for a name that the module does not have."""

    def missing(attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        if hasattr(module, "__path__"):
            return importlib.import_module(f"{name}.{attribute}")
        near = nearest(attribute, [known for known in vars(module) if not known.startswith("_")])
        raise ImportError(f"{_not_covered(f'{name}.{attribute}')}{near}", name=name)

    return missing


def _not_covered(fullname: str) -> str:
    instead = next((words for begin, words in INSTEAD.items() if f"{fullname}.".startswith(f"{begin}.")), OTHERWISE)
    return f"{fullname} is not covered by headrace.compat.atropos: {instead}"
