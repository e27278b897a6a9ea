"""Someone who follows the pages at one sitting, pasting their blocks one after the other.

Every page has a folder of its own, with the examples in it, a shell and a Python namespace; what its blocks started in
the background ends with it. Two things go on from page to page, since a reader would leave them too, and starting them
is what takes time: the Python process with what it has imported, and the gateway that several pages start with the
same line (`SHARED`).

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import yaml
from tests.docs.pages import ROOT, SHELL, Block

#: What several pages begin with: started by the first of them, and left running.
SHARED = "headrace serve --engine tiny --open --host 127.0.0.1 &\n"
#: The ports that servers take when none is named.
DEFAULT_PORTS = {"serve": 8100, "gateway": 8100, "engine": 8001, "api": 8000, "pool serve": 8200}
#: Seconds for one block. A block takes ten at most on a quiet machine with two cores.
PATIENCE_S = 240.0
#: Seconds in which what was told to end does.
END_S = 30.0

_PORT = re.compile(r"((?:localhost|127\.0\.0\.1):|--port[ =])(\d{4,5})\b")
_SERVER = re.compile(r"^headrace (serve|gateway|engine|api|pool serve)\b((?:\\\n|[^\n&])*)", re.MULTILINE)

#: Both run what comes in on stdin (a page's folder, a block's path, the page's log), and answer each block on the
#: descriptor that they are given. The first command that fails ends them; one that failed in the background ends the
#: shell after the next block.
_SHELL_SESSION = """
set -eo pipefail
done=$1 running=
while IFS='\t' read -r folder path log; do
    . "$path" < /dev/null
    for job in $running; do kill -0 "$job" 2> /dev/null || wait "$job"; done
    running=$(jobs -p)
    echo done >&"$done"
done
"""
_PYTHON_SESSION = """
import os, sys
done, names = int(sys.argv.pop()), {}
for line in sys.stdin:
    folder, path, log = line.rstrip("\\n").split("\\t")
    if folder != os.getcwd():
        os.chdir(folder)
        names = {"__name__": "__main__"}
        for printed in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), printed)
    exec(compile(open(path).read(), path, "exec"), names)
    sys.stdout.flush()
    os.write(done, b"done\\n")
"""


class BlockFailed(AssertionError):
    """A block did not run to its end; the message has what was printed."""


class Reader:
    """One sitting: a scratch folder, and what goes on from page to page. A context manager."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch.resolve()
        self._python: _Session | None = None
        self._gateway: _Session | None = None
        self._held = ExitStack()
        self._port = ""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for session in (self._python, self._gateway):
            if session is not None:
                session.end()
        self._held.close()

    @contextmanager
    def page(self, name: str, *, env: dict[str, str] | None = None) -> Iterator[Page]:
        """Opens a page; its end ends what its blocks started. With `env` it shares nothing with the others."""
        folder = self._scratch / name
        folder.mkdir(parents=True)
        page = Page(self, folder, env)
        try:
            yield page
        finally:
            page.end()

    def python(self, log: Path) -> _Session:
        """The Python process of this sitting; a new one where a block ended the last."""
        if self._python is not None and not self._python.alive:
            self._python.end()
            self._python = None
        if self._python is None:
            self._python = _Session("python", self._scratch, log, _environment())
        return self._python

    def gateway(self, log: Path) -> str:
        """The port of the gateway that pages share, which is started where none runs."""
        if self._gateway is None:
            self._port = _hold(self._held)
            self._gateway = _Session("shell", self._scratch, log, _environment())
            self._gateway.run(Block("every page", 0, "sh", SHARED, None), _SERVER.sub(self._with_port, SHARED))
        return self._port

    def _with_port(self, found: re.Match[str]) -> str:
        return f"{found[0]} --port {self._port} "


class Page:
    """A page under way."""

    def __init__(self, reader: Reader, folder: Path, env: dict[str, str] | None) -> None:
        self.folder = folder
        self._reader = reader
        self._log = folder.with_suffix(".log")
        self._log.touch()
        self._env = _environment(env)
        self._alone = env is not None
        self._held = ExitStack()
        self._ports: dict[str, str] = {}
        self._own: dict[str, _Session] = {}
        (folder / ".venv").symlink_to(sys.prefix)

    def read(self, blocks: list[Block]) -> None:
        """Pastes the blocks that are to be run, in order. Raises BlockFailed."""
        found = [block for block in blocks if block.not_run is None]
        if not self._alone and any(SHARED in block.text for block in found if block.language in SHELL):
            self._ports[str(DEFAULT_PORTS["serve"])] = self._reader.gateway(self._log)
        shutil.copytree(ROOT / "examples", self.folder / "examples")
        for example in (self.folder / "examples").glob("*.*"):
            example.write_text(self._with_free_ports(example.read_text()))
        for block in found:
            self._paste(block)
        if "shell" in self._own:  # what runs in the background has not failed either
            self._own["shell"].run(Block(self.folder.name, 0, "sh", "true\n", None), "true\n")

    def said(self) -> str:
        """What was printed during this page, by what it started."""
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        for session in self._own.values():
            session.end()
        self._held.close()

    def _paste(self, block: Block) -> None:
        text = self._with_free_ports(block.text)
        if block.language == "yaml":
            yaml.safe_load(text)
        if block.file is not None:
            (self.folder / block.file).write_text(text)
        elif block.language in SHELL:
            left = text if self._alone else text.replace(SHARED, "")
            self._session("shell").run(block, _SERVER.sub(self._with_port, left))
        elif block.language == "python":
            self._session("python").run(block, text)
        elif block.language == "json":
            json.loads(text)
        elif block.language not in ("text", "yaml"):
            raise BlockFailed(f"{block.place}: a block of {block.language!r} is neither run nor saved nor text")

    def _session(self, kind: str) -> _Session:
        if kind == "python" and not self._alone:
            shared = self._reader.python(self._log)
            shared.folder, shared.log = self.folder, self._log
            return shared
        if kind not in self._own:
            self._own[kind] = _Session(kind, self.folder, self._log, self._env)
        return self._own[kind]

    def _with_free_ports(self, text: str) -> str:
        return _PORT.sub(lambda found: found[1] + self._free(found[2]), text)

    def _with_port(self, found: re.Match[str]) -> str:
        if "--port" in found[0]:
            return found[0]
        return f"headrace {found[1]} --port {self._free(str(DEFAULT_PORTS[found[1]]))}{found[2]}"

    def _free(self, port: str) -> str:
        if port not in self._ports:
            self._ports[port] = _hold(self._held)
        return self._ports[port]


def _environment(env: dict[str, str] | None = None) -> dict[str, str]:
    """Of a shell in which `.venv` is activated, unless `env` has another path."""
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
    return {**os.environ, "NO_PROXY": "127.0.0.1,localhost", "PYTHONUNBUFFERED": "1", "PATH": path, **(env or {})}


def _hold(until: ExitStack) -> str:
    """A free port. A socket that does not listen holds it: nobody else is given it, and a server may listen there."""
    held = until.enter_context(socket.socket())
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return str(held.getsockname()[1])


class _Session:
    """A shell or a Python that blocks are pasted into. The first command that fails ends it."""

    def __init__(self, kind: str, folder: Path, log: Path, env: dict[str, str]) -> None:
        self.folder, self.log = folder, log
        self._kind = kind
        self._answers, answer = os.pipe()
        shell = ["bash", "--norc", "-c", _SHELL_SESSION, "bash"]
        program = shell if kind == "shell" else [sys.executable, "-c", _PYTHON_SESSION]
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

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, block: Block, text: str) -> None:
        path = self.folder.parent / f"{self.folder.name}-{block.line}.{'sh' if self._kind == 'shell' else 'py'}"
        path.write_text(text)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the session has ended, which is seen below
            self._process.stdin.write(f"{self.folder}\t{path}\t{self.log}\n".encode())
            self._process.stdin.flush()
        if not self._answered():
            said = self.log.read_text(errors="replace")
            raise BlockFailed(f"{block.place} did not run to its end\n--- pasted\n{text}--- printed\n{said}")

    def _answered(self) -> bool:
        """Waits for the answer to a block, or for the end of the session: what it left running may hold the pipe."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if select.select([self._answers], [], [], 0.1)[0]:
                return os.read(self._answers, len(b"done\n")) == b"done\n"
            if not self.alive:
                return False
        return False

    def end(self) -> None:
        """Ends the session and all that it started, and waits for it."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, how)
            except ProcessLookupError:
                break
            if self._ended():
                break
        self._process.communicate()
        os.close(self._answers)

    def _ended(self) -> bool:
        """Whether every process that could answer has let go of the pipe: reading from it then tells its end."""
        while select.select([self._answers], [], [], END_S)[0]:
            if not os.read(self._answers, 64):
                return True
        return False
