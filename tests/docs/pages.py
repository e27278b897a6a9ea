"""The fenced blocks of a page of documentation, and a reader who pastes them one after the other.

What a block is, its language says:

- ```` ``` ````, `sh`, `bash`: pasted into the page's one shell. What it starts with `&` runs until the page's end.
- `python`: pasted into the page's one Python session, which keeps the names of earlier blocks.
- `python` or `yaml` whose first line is a comment with a file's name (`# first.yaml`): saved under that name.
- `json`, `yaml`: read.
- `text`: output, a layout, a signature; nothing to run.

A block that cannot run here has `<!-- not run: REASON -->` on the line before it, which no reader sees; REASON is one
of `REASONS`.

A reader has ports 8000 to 8200 free, a test may not: every port that a page names stands for a free one, the same in
all of its blocks and in the examples that it runs. A server without `--port` gets what stands for its default.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = ("", "sh", "bash")
#: Why a block may be left out. Each names what a reader has and a test has not.
REASONS = {
    "installs",  # what CI's first step does
    "needs vLLM",
    "needs verl",
    "needs atroposlib",
    "needs npm",  # Claude Code, Codex
    "needs several machines",
    "takes minutes",
}
#: The ports that servers take when none is named.
DEFAULT_PORTS = {"serve": 8100, "gateway": 8100, "engine": 8001, "api": 8000, "pool serve": 8200}
#: Seconds for one block. A block takes ten at most on a quiet machine with two cores.
PATIENCE_S = 240.0

_BLOCK = re.compile(r"^(?:<!-- (?P<mark>.*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w-]+\.(?:py|yaml))\b")
_PORT = re.compile(r"((?:localhost|127\.0\.0\.1):|--port[ =])(\d{4,5})\b")
_SERVER = re.compile(r"^headrace (serve|gateway|engine|api|pool serve)\b((?:\\\n|[^\n&])*)", re.MULTILINE)

#: Both run the blocks whose paths come in on stdin, and answer each on the descriptor that they are given. The first
#: command that fails ends them; one that failed in the background ends the shell after the next block.
_SHELL_SESSION = """
set -eo pipefail
done=$1 running=
while read -r path; do
    . "$path" < /dev/null
    for job in $running; do kill -0 "$job" 2> /dev/null || wait "$job"; done
    running=$(jobs -p)
    echo done >&"$done"
done
"""
_PYTHON_SESSION = """
import os, sys
done, names = int(sys.argv.pop()), {"__name__": "__main__"}
for path in map(str.strip, sys.stdin):
    exec(compile(open(path).read(), path, "exec"), names)
    sys.stdout.flush()
    os.write(done, b"done\\n")
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language, and why it is not run where it is not."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name under which a reader saves it, where it tells one."""
        named = _FILE.match(self.text) if self.language in ("python", "yaml") else None
        return named[1] if named else None


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            page.name,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            found["text"],
            found["mark"].removeprefix("not run: ") if (found["mark"] or "").startswith("not run: ") else None,
        )
        for found in _BLOCK.finditer(text)
    ]


class BlockFailed(AssertionError):
    """A block did not run to its end; the message has what was printed."""


class Reader:
    """Who follows one page: a folder with the examples in it, a shell, a Python session. A context manager, whose end
    ends whatever the blocks started."""

    def __init__(self, folder: Path, *, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self._ports: dict[str, socket.socket] = {}
        self._sessions: dict[str, _Session] = {}
        self._env = {**os.environ, "NO_PROXY": "127.0.0.1,localhost", "PYTHONUNBUFFERED": "1", **(env or {})}
        (folder / ".venv").symlink_to(sys.prefix)
        shutil.copytree(ROOT / "examples", folder / "examples")
        for example in (folder / "examples").glob("*.*"):
            example.write_text(self._with_free_ports(example.read_text()))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for session in self._sessions.values():
            session.end()
        for held in self._ports.values():
            held.close()

    def paste(self, block: Block) -> None:
        """Runs a block to its end, as its language says. Raises BlockFailed."""
        text = self._with_free_ports(block.text)
        if block.language == "yaml":
            yaml.safe_load(text)
        if block.file is not None:
            (self.folder / block.file).write_text(text)
        elif block.language in SHELL:
            self._session("shell").run(block, _SERVER.sub(self._with_port, text))
        elif block.language == "python":
            self._session("python").run(block, text)
        elif block.language == "json":
            json.loads(text)
        elif block.language not in ("text", "yaml"):
            raise BlockFailed(f"{block.place}: a block of {block.language!r} is neither run nor saved nor text")

    def finish(self) -> None:
        """Raises BlockFailed where something that a block started in the background has failed since."""
        if "shell" in self._sessions:
            self.paste(Block(self.folder.name, 0, "sh", "true\n", None))

    def said(self) -> str:
        """All that shell and Python printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def _session(self, kind: str) -> _Session:
        if kind not in self._sessions:
            self._sessions[kind] = _Session(kind, self.folder, self.log, self._env)
        return self._sessions[kind]

    def _with_free_ports(self, text: str) -> str:
        return _PORT.sub(lambda found: found[1] + self._free(found[2]), text)

    def _with_port(self, found: re.Match[str]) -> str:
        if "--port" in found[0]:
            return found[0]
        return f"headrace {found[1]} --port {self._free(str(DEFAULT_PORTS[found[1]]))}{found[2]}"

    def _free(self, port: str) -> str:
        """The free port that stands for one of the page. A socket that does not listen holds it: the system gives it to
        nobody else, and a server may listen on it."""
        if port not in self._ports:
            held = socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            self._ports[port] = held
        return str(self._ports[port].getsockname()[1])


class _Session:
    """A shell or a Python that blocks are pasted into. The first command that fails ends it."""

    def __init__(self, kind: str, folder: Path, log: Path, env: dict[str, str]) -> None:
        self._kind = kind
        self._folder = folder
        self._log = log
        self._answers, answer = os.pipe()
        program = (
            ["bash", "--norc", "-c", _SHELL_SESSION, "bash"]
            if kind == "shell"
            else [sys.executable, "-c", _PYTHON_SESSION]
        )
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*program, str(answer)],
                cwd=folder,
                env=env,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[answer],
                start_new_session=True,
            )
        os.close(answer)

    def run(self, block: Block, text: str) -> None:
        path = self._folder.parent / f"{self._folder.name}-{block.line}.{'sh' if self._kind == 'shell' else 'py'}"
        path.write_text(text)
        begun = self._log.stat().st_size
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the session has ended, which is seen below
            self._process.stdin.write(f"{path}\n".encode())
            self._process.stdin.flush()
        if not self._answered():
            said = self._log.read_bytes()[begun:].decode(errors="replace")
            raise BlockFailed(f"{block.place} did not run to its end\n--- pasted\n{text}--- printed\n{said}")

    def _answered(self) -> bool:
        """Waits for the answer to a block, or for the end of the session: what it left running may hold the pipe."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if select.select([self._answers], [], [], 0.1)[0]:
                return os.read(self._answers, len(b"done\n")) == b"done\n"
            if self._process.poll() is not None:
                return False
        return False

    def end(self) -> None:
        """Ends the session and all that it started, and waits for it."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, how)
            except ProcessLookupError:
                break
            if self._ended(PATIENCE_S / 8):
                break
        self._process.communicate()
        os.close(self._answers)

    def _ended(self, patience_s: float) -> bool:
        """Whether every process that could answer has let go of the pipe: reading from it then tells its end."""
        while select.select([self._answers], [], [], patience_s)[0]:
            if not os.read(self._answers, 64):
                return True
        return False
