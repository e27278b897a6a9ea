"""verl, in an environment of its own (see `tests.venvs`): it wants another transformers than we do. Takes a gigabyte.

python -m tests.verl.environment    # makes it, or finds it, and prints the path of its Python
"""

from __future__ import annotations

from pathlib import Path

from tests.venvs import Venv

#: Installed without its requirements: most of them serve what is not tested here.
VENV = Venv("verl", "verl==0.9.1", Path(__file__).with_name("requirements.txt"))


def python() -> Path:
    return VENV.python()


if __name__ == "__main__":
    print(python())
