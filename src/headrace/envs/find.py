"""Finds the environment that a file or a module defines, for `headrace env`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import logging
import sys
import traceback
from pathlib import Path
from types import ModuleType

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.envs.base import BaseEnv
from headrace.envs.cli import log_traceback
from headrace.extras import extra_of, install_command
from headrace.files import import_file, nearest, put_on_path

log = logging.getLogger("headrace.envs")

#: The package of the environments that ship.
SHIPPED = "headrace.envs"


def find(target: str, named: str | None = None) -> type[BaseEnv]:
    """The environment class of a file, of a module by its dotted name, or of one that ships by its name.

    Of several classes it is the one that is `named`, or whose `cli()` the file calls. Raises `InvalidInput` where there
    is none, or no single one, and `HeadraceError` where an import fails.
    """
    return chosen(load(target), named)


def load(target: str) -> ModuleType:
    """Imports a file or a module, without running what is under `if __name__ == "__main__"`.

    Raises `HeadraceError` for a module that it cannot import, which names it and the line that does.
    """
    path = Path(target)
    try:
        if path.suffix == ".py" or path.is_file():
            return _of_file(path)
        return _of_name(target)
    except ModuleNotFoundError as error:
        raise HeadraceError(_needs(target, error)) from error
    except OSError as error:
        log_traceback(error, path.resolve().parent)
        raise
    except ImportError as error:
        raise HeadraceError(f"{target}: {error}") from error
    except SyntaxError as error:
        raise InvalidInput(f"{target} is no Python file: {error}") from error


def chosen(module: ModuleType, named: str | None = None) -> type[BaseEnv]:
    """The environment of a module: the named one, the only one, or the one whose `cli()` it calls."""
    found = candidates(module)
    where = module.__file__ or module.__name__
    unfinished = _unfinished(module)
    if named is not None:
        if named in unfinished:
            raise InvalidInput(f"{where}: {named} cannot be made: it lacks {unfinished[named]}")
        if named not in found:
            there = ", ".join(found) or "none"
            raise InvalidInput(f"{where} has no environment {named!r}{nearest(named, found)}; there are: {there}")
        return found[named]
    if not found:
        lacking = "; ".join(f"{name} lacks {methods}" for name, methods in unfinished.items())
        because = f": {lacking}" if lacking else ": a class that inherits from BaseEnv, with its methods"
        raise InvalidInput(f"{where} has no environment{because}")
    run = [name for name in found if name in _run_by_itself(module)]
    if len(found) == 1 or len(run) == 1:
        return found[run[0] if run else next(iter(found))]
    raise InvalidInput(f"{where} has several environments, say which by --class: {', '.join(found)}")


def candidates(module: ModuleType) -> dict[str, type[BaseEnv]]:
    """Concrete environment classes by name: those that the module defines or, where it defines none, imports."""
    every = {
        name: kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, BaseEnv) and not inspect.isabstract(kind)
    }
    own = {name: kind for name, kind in every.items() if kind.__module__.startswith(module.__name__)}
    return own or every


def _needs(target: str, error: ModuleNotFoundError) -> str:
    """The message for a missing module: which one, where it is imported, and how to install it."""
    missing = error.name or ""
    top = missing.partition(".")[0]
    if not top or top in ("headrace", "atroposlib"):
        return f"{target}: {error}"
    asking = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    where = f" ({asking[-1].filename}, line {asking[-1].lineno})"
    spec = importlib.util.find_spec(top) if top != missing else None
    if spec is not None:
        there = spec.origin or ", ".join(spec.submodule_search_locations or ())
        return f"{target} needs the module {missing!r}{where}, which the {top!r} in {there} does not have"
    extra = extra_of(top)
    how = install_command(extra) if extra is not None else "install it beside headrace"
    return f"{target} needs the module {top!r}{where}: {how}"


def _unfinished(module: ModuleType) -> dict[str, str]:
    """The module's own abstract environments, with the methods that each lacks."""
    return {
        name: ", ".join(sorted(kind.__abstractmethods__))
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, BaseEnv) and inspect.isabstract(kind)
        if kind.__module__.startswith(module.__name__)
    }


def _of_file(path: Path) -> ModuleType:
    """Imports a file with its folder on the path, as `python FILE` does, under its own name where that is free, so that
    its child processes can import it."""
    if not path.is_file():
        raise InvalidInput(f"there is no file {path}")
    put_on_path(path.parent)
    name = path.stem if _is_free(path) else f"headrace_env_{path.stem.replace('.', '_')}"
    return import_file(path.resolve(), name)


def _is_free(path: Path) -> bool:
    """Whether importing the file's name would import this file, and has not imported anything yet."""
    if path.stem in sys.modules or not path.stem.isidentifier():
        return False
    spec = importlib.util.find_spec(path.stem)
    return spec is not None and spec.origin == str(path.resolve())


def _of_name(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    for full in (f"{SHIPPED}.{name}", name):
        if all(part.isidentifier() for part in full.split(".")) and _exists(full):
            return importlib.import_module(full)
    raise InvalidInput(f"there is no file {name!r}, no module of that name, and no environment that ships by it")


def _exists(name: str) -> bool:
    """Whether there is a module of that name. Raises where a package around it exists, but fails to import another."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
            raise
        return False


def _run_by_itself(module: ModuleType) -> set[str]:
    """The names whose `cli()` the module's file calls."""
    if module.__file__ is None:
        return set()
    calls = (node for node in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(node, ast.Call))
    functions = (call.func for call in calls)
    return {
        function.value.id
        for function in functions
        if isinstance(function, ast.Attribute) and function.attr == "cli" and isinstance(function.value, ast.Name)
    }
