"""The extras of Headrace: which libraries each brings, which are missing here, and the command that installs one.

An extra is a set of libraries that only some commands need (`[project.optional-dependencies]` in pyproject.toml). How
one is added depends on where this Headrace came from (a clone, a wheel, an index), so every message that asks for one
takes its command from `install_command`.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from headrace.data.errors import HeadraceError

#: The libraries of each extra, by the names that they are imported by.
EXTRAS: dict[str, tuple[str, ...]] = {
    "ray": ("ray",),
    "ray-train": ("ray", "pandas", "pyarrow"),
    "export": ("pyarrow",),
    "tokens": ("renderers", "httpx", "tokenizers", "transformers", "jinja2", "PIL"),
    "train": ("torch", "transformers", "tokenizers", "safetensors", "jinja2", "PIL"),
    "lora": ("peft",),
    "demo": ("torch", "transformers", "tokenizers", "safetensors", "jinja2", "PIL", "renderers", "httpx"),
    "envs": ("math_verify",),
    "rewards": ("math_verify", "jsonschema"),
    "gym": ("reasoning_gym",),
    "datasets": ("datasets",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}

#: The extras that each command needs to do all it can, where it needs any.
NEEDS: dict[str, tuple[str, ...]] = {
    "gateway": ("tokens",),
    "gateway --reward-worker-name": ("ray",),
    "serve": ("tokens",),
    "env": ("tokens",),
    "check-model": ("tokens",),
    "replay": ("tokens",),
    "storm": ("tokens",),
    "storm --learner": ("tokens", "train"),
    "engine": ("train",),
    "train": ("train",),
    "train --workers": ("train", "ray-train"),
    "run": ("demo",),
    "run on Ray": ("demo", "ray"),
    "rollout on Ray": ("ray",),
    "new": ("train",),
    "demo": ("demo",),
    "demo --ray": ("demo", "ray"),
    "pool start": ("ray",),
    "pool stop": ("ray",),
    "pool export --to FILE.parquet": ("export",),
    "reward start": ("tokens",),
    "reward start --name": ("tokens", "ray"),
    "reward stop": ("ray",),
    "reward try": ("tokens",),
    "bench pool": ("ray",),
    "bench gateway": ("ray", "tokens"),
    "bench trainer": ("demo",),
    "bench run": ("demo",),
}


class MissingExtra(HeadraceError):
    """A library is not installed that comes with an extra."""

    code = "missing_extra"


def missing(extras: Iterable[str]) -> tuple[str, ...]:
    """The libraries of these extras that are not installed, each once. Nothing is imported."""
    return tuple(dict.fromkeys(name for extra in extras for name in EXTRAS[extra] if not installed(name)))


def installed(module: str) -> bool:
    """Whether a top-level module can be found; it is not imported."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def require_for(command: str) -> None:
    """Raises `MissingExtra`, with all that a command lacks and how to install it."""
    require(*NEEDS[command])


def require(*extras: str) -> None:
    """Raises `MissingExtra`, with all that is missing of these extras and how to install it."""
    if lacking := missing(extras):
        needed = [extra for extra in extras if missing([extra])]
        raise MissingExtra(f"this needs {_listed(lacking)}: {install_command(*needed)}")


def extra_of(module: str) -> str | None:
    """The smallest extra that has a module, given by its name or that of a submodule; None where none has."""
    top = module.partition(".")[0]
    found = [extra for extra, modules in EXTRAS.items() if top in modules]
    return min(found, key=lambda extra: len(EXTRAS[extra]), default=None)


def install_command(*extras: str) -> str:
    """The shell command that adds extras to this installation of Headrace."""
    return f"{_pip()} install {_source(','.join(extras))}"


def clone() -> Path | None:
    """The folder of the clone that this Headrace runs from; None where it was installed otherwise."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "pyproject.toml").is_file() else None


def _pip() -> str:
    """`pip`, where a shell would find this Python's; otherwise `PYTHON -m pip`."""
    found = shutil.which("pip")
    if found is not None and Path(found).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


def _source(extras: str) -> str:
    """What pip is to install: the clone or the wheel that this Headrace came from, or its name."""
    if (folder := clone()) is not None:
        return f"--editable {shlex.quote(f'{folder}[{extras}]')}"
    try:
        origin = distribution("headrace").read_text("direct_url.json")
    except PackageNotFoundError:
        origin = None
    if origin is None:
        return shlex.quote(f"headrace[{extras}]")
    came_from = Path(unquote(urlsplit(json.loads(origin)["url"]).path))
    if came_from.exists():
        return shlex.quote(f"{came_from}[{extras}]")
    return f"{shlex.quote(f'{came_from.name}[{extras}]')} (where that wheel is; or '.[{extras}]' in a clone)"


def _listed(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
