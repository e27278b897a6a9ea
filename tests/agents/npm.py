"""Command-line agents as npm installs them: made once for a user, by a name that changes with any pin.

They lie under `~/.cache/headrace/npm` (or `$HEADRACE_CACHE/npm`), made under another name and renamed when whole.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cached import locked

from headrace.files import cache_folder

PINS = Path(__file__).with_name("package.json")
#: Some npm run no package's own script unless they are told to; this one puts the program into its place.
CLAUDE_SCRIPT = Path("node_modules", "@anthropic-ai", "claude-code", "install.cjs")


def programs() -> Path:
    """The folder of the agents' programs, which are installed where they are not there yet."""
    key = hashlib.sha256(PINS.read_bytes() + platform.machine().encode()).hexdigest()[:12]
    folder = cache_folder() / "npm" / f"agents-{key}"
    if not folder.exists():
        with locked(folder.with_name(folder.name + ".lock")):
            if not folder.exists():  # another process may have made it while this one waited
                _make(folder)
    return folder / "node_modules" / ".bin"


def _make(folder: Path) -> None:
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    shutil.copy(PINS, part)
    _run(part, "npm", "install", "--no-audit", "--no-fund", "--loglevel=error")
    _run(part, "node", str(CLAUDE_SCRIPT))
    part.rename(folder)


def _run(folder: Path, *command: str) -> None:
    subprocess.run(command, check=True, cwd=folder, stdout=sys.stderr)
