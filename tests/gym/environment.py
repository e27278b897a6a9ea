"""reasoning-gym, in an environment of its own (see `tests.venvs`): some of what it needs comes as source, in part C.

The tests run with Headrace's own Python, which finds the package there. Takes 0.3 GB.

python -m tests.gym.environment    # makes it, or finds it, and prints the path of its Python
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.venvs import Venv

VENV = Venv(
    "gym",
    "reasoning-gym==0.1.25",
    Path(__file__).with_name("requirements.txt"),
    build_tools=("setuptools==84.2.1", "wheel==0.48.0"),
)


def lacking() -> str | None:
    """Why the environment cannot be made here; None where it can, or is there already."""
    compiler = os.environ.get("CC") or "cc"
    if VENV.made() or any(map(shutil.which, (compiler, "gcc", "clang"))):
        return None
    return f"pycosat, which reasoning-gym needs, comes as C, and no compiler is here ({compiler}, gcc, clang)"


def provide() -> None:
    """Makes the package importable in this process: after all that is installed here, which is pinned by itself."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = str(VENV.python().parents[1] / "lib" / version / "site-packages")
    if packages not in sys.path:
        sys.path.append(packages)


if __name__ == "__main__":
    print(VENV.python())
