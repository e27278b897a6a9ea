"""The two servers: ours, and the original where it is installed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from headrace.bench.gateway.child import Child
from headrace.files import cache_folder

#: Names the Python of an environment with atroposlib, where it is not the one that the tests made.
VARIABLE = "HEADRACE_ATROPOS_PYTHON"
ABSENT = (
    f"the original is not installed: ours is measured alone; `make test-atropos` installs it, or {VARIABLE} names the "
    "Python that has atroposlib 0.4.0"
)


def original_python() -> Path | None:
    """The Python that has atroposlib: the one that is named, or the newest that the tests made in the user's cache."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    found = [path for path in (cache_folder() / "venvs").glob("atropos-*/bin/python") if ".part" not in str(path)]
    return max(found, key=lambda path: path.parent.stat().st_mtime, default=None)


def start_original(python: Path) -> Child:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    where = ("--host", "127.0.0.1", "--port", port)
    return Child("atroposlib.cli.run_api", *where, python=python, address=f"http://127.0.0.1:{port}")


def start_ours(journal: Path) -> Child:
    return Child("headrace", "api", "--host", "127.0.0.1", "--port", 0, "--journal", journal)
