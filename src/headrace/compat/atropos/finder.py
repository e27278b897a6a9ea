"""How `import atroposlib.…` comes to the modules here.

A module that is covered is the one here, under both names; where rewards are asked for by atroposlib's, one that raises
pays 0 to all, as it does there. One that is not, and a name that its module does not have,
fail at import, with what to do instead.
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

from headrace.data.errors import HeadraceError
from headrace.files import nearest

ORIGINAL = "atroposlib"
#: Where a module's name begins like this, it is to be found there; the first that fits counts.
REWARDS = "headrace.rewards"
PLACES = {f"{ORIGINAL}.envs.reward_fns": REWARDS, ORIGINAL: "headrace.compat.atropos"}
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
    """An atroposlib that is installed is not the one that is used."""


class Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != ORIGINAL:
            return None
        here = place(fullname)
        if here is None or importlib.util.find_spec(here) is None:
            raise ModuleNotFoundError(_not_covered(fullname), name=fullname)
        return ModuleSpec(fullname, Alias(here), is_package=True)


class Alias(Loader):
    def __init__(self, here: str) -> None:
        self._here = here

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module here in the place of the empty one that the import made."""
        name = module.__name__
        found = importlib.import_module(self._here)
        if "__getattr__" not in vars(found):
            found.__getattr__ = _missing(name, found)  # type: ignore[method-assign]
        sys.modules[name] = found
        if self._here == REWARDS:
            found.RewardFunction.all_zero_on_error = True


def place(fullname: str) -> str | None:
    """The module here that stands for one of atroposlib's; None for what is ours alone."""
    for original, ours in PLACES.items():
        if fullname == original or fullname.startswith(f"{original}."):
            rest = fullname.removeprefix(original)
            return None if rest in (".finder", ".lenient") else ours + rest
    return None


def install() -> None:
    """Makes the modules here known under atroposlib's names. Once is enough."""
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
    """What a module says of a name that it does not have."""

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
