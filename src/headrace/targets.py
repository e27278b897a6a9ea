"""What a configuration names by `file.py:name`, `module:name` or `package.module.Name`, imported."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.data.errors import InvalidInput
from headrace.files import expanded, import_file, nearest, put_on_path


def load_target(target: str, base: Path) -> Any:
    """The object that a target names. A file is looked for below `base`, and imported with its folder on the path, as
    `python FILE` does; a module, with `base` on the path. Meanwhile `base` is the working directory: this is for the
    start of a process, before it has threads. Raises `InvalidInput` where there is none, or where it fails to import,
    with the place."""
    module_name, colon, name = target.rpartition(":")
    if not colon and not name.endswith(".py"):
        module_name, _, name = target.rpartition(".")
    if not module_name or not name.isidentifier():
        raise InvalidInput(f"{target!r} must be file.py:name, module:name or package.module.Name")
    base = base.resolve()
    with contextlib.chdir(base):
        if module_name.endswith(".py"):
            module = _of_file(base / module_name)
        else:
            put_on_path(base)
            module = _of_name(module_name, target)
    try:
        return getattr(module, name)
    except AttributeError:
        public = [known for known in vars(module) if not known.startswith("_")]
        raise InvalidInput(f"{module_name} has no {name!r}{nearest(name, public)}") from None


def _of_file(path: Path) -> ModuleType:
    path = expanded(path).resolve()
    if not path.is_file():
        raise InvalidInput(f"there is no file {path}")
    put_on_path(path.parent)
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    # Under its own name where that is free, so that what it pickles or registers is found again by it.
    name = path.stem if known is None and path.stem.isidentifier() else f"headrace_target_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    try:
        return import_file(path, name)
    except Exception as error:
        raise InvalidInput(f"{path} cannot be imported: {_told(error)}") from error


def _of_name(name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise InvalidInput(f"{target!r}: there is no module {name!r}") from None
        raise InvalidInput(f"{name} cannot be imported: {_told(error)}") from error
    except Exception as error:
        raise InvalidInput(f"{name} cannot be imported: {_told(error)}") from error


def _told(error: Exception) -> str:
    """An error on one line, with the last place that it came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
