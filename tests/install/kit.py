"""Clean environments, and what is installed into them: wheels at pinned versions, as a stranger would get them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
#: Where pyenv keeps the Pythons that are not on the path.
PYENV = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"


@dataclass(frozen=True)
class Clean:
    """A virtual environment in which nothing was installed before."""

    folder: Path

    @classmethod
    def made(cls, folder: Path, python: str = sys.executable, *, pip: bool = True) -> Clean:
        subprocess.run([python, "-m", "venv", *([] if pip else ["--without-pip"]), str(folder)], check=True)
        return cls(folder)

    def copy(self, folder: Path) -> Clean:
        """The same environment once more, to install into: its Python runs, its programs are still those of this."""
        shutil.copytree(self.folder, folder, symlinks=True, copy_function=os.link)
        return Clean(folder)

    def install(self, uv: Path, *what: str) -> None:
        """Installs wheels at pinned versions by uv, which takes what pip would, in a tenth of the time."""
        options, variables = uv_settings()
        command = [str(uv), "pip", "install", "--quiet", "--python", str(self.folder), *options, *what]
        done = subprocess.run(command, capture_output=True, text=True, env=variables)
        assert done.returncode == 0, done.stderr

    def shell(self, line: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """What a user types with the environment activated; pip takes wheels at pinned versions there."""
        done = subprocess.run(
            line, shell=True, env=self.variables(), cwd=cwd or self.folder, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done

    def headrace(self, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(self.folder / "bin" / "headrace"), *args]
        return subprocess.run(
            command, env=self.variables(), cwd=cwd or self.folder, capture_output=True, text=True, timeout=600
        )

    def python(self, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.folder / "bin" / "python"), *args],
            env=self.variables(),
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
        )

    def variables(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        pip = {"PIP_CONSTRAINT": str(CONSTRAINTS), "PIP_ONLY_BINARY": ":all:", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        pip["PIP_NO_COMPILE"] = "1"  # it compiles all that it installs, of which a test imports little
        found = {**os.environ, **pip, "PATH": path, "VIRTUAL_ENV": str(self.folder), "COLUMNS": "200"}
        found.pop("PYTHONPATH", None)  # what is tried is what was installed
        return found


@cache
def setup_script() -> ModuleType:
    """`tools/setup.py`, which is no module: it runs before anything is installed."""
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "tools" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def uv_settings() -> tuple[list[str], dict[str, str]]:
    """Options and variables with which uv takes wheels at pinned versions from where pip would, but from its cache."""
    script = setup_script()
    options, variables = script.uv_settings(script.pip_settings(sys.executable))
    return [*script.WHEELS, *(option for option in options if option != "--no-cache")], {**os.environ, **variables}


def fetch_uv(folder: Path) -> Path:
    """uv at the version that a set-up takes. It resolves without downloading, and keeps a cache of what it unpacked."""
    found = setup_script().fetch_uv(Path(sys.executable), folder)
    assert isinstance(found, Path), "pip could not fetch uv"
    return found


def build(folder: Path) -> Path:
    """Builds a wheel and an sdist of this tree into a folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def interpreter(version: str) -> str | None:
    """A Python of a version, 3.12, that is on the path or one of pyenv's; None where there is none that starts."""
    named = [shutil.which(f"python{version}"), *map(str, sorted(PYENV.glob(f"{version}.*/bin/python")))]
    for python in filter(None, named):
        asked = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True).stdout.strip() == version:
            return python
    return None
