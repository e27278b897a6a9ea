"""atroposlib, in an environment of its own (see `tests.venvs`). Takes half a gigabyte.

python -m tests.atropos.environment    # makes it, or finds it, and prints the path of its Python
"""

from __future__ import annotations

from pathlib import Path

from tests.venvs import Venv

#: Installed without its requirements: most of them serve what is not tested here.
VENV = Venv("atropos", "atroposlib==0.4.0", Path(__file__).with_name("requirements.txt"))


def python() -> Path:
    return VENV.python()


if __name__ == "__main__":
    print(python())
