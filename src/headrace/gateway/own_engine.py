"""A rollout server of a gateway's own: `headrace engine` as a child process, on a free port of this machine.

It ends with the gateway, also where that is killed, and a gateway whose engine has ended ends too: nobody else would
bring it back.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol

from headrace.data.errors import HeadraceError
from headrace.processes import ChildDied, Processes

#: What its process and its log are called.
ENGINE_NAME = "engine"


class Stoppable(Protocol):
    """A process that can be ended from any thread."""

    def stop(self, error: Exception) -> None: ...


class OwnEngine:
    """The engine while the context lasts. Made and left in the main thread; SIGTERM leaves it as Ctrl-C does."""

    def __init__(self, model: str, *, raw: bool = False) -> None:
        """`raw`: its log-probs are the model's at temperature 1, and not of what was sampled from."""
        self._model = model
        self._mode = "raw_logprobs" if raw else "processed_logprobs"
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-serve-"))
        self._processes = Processes(self._folder)
        self._ending = False
        self._failed = False

    @property
    def log(self) -> Path:
        """What it prints. The file goes with it, unless it ended by itself."""
        return self._folder / f"{ENGINE_NAME}.log"

    def __enter__(self) -> OwnEngine:
        self._before = signal.signal(signal.SIGTERM, _leave)
        self._child = self._processes.start(
            *(ENGINE_NAME, "headrace", "engine", "--model", self._model),
            *("--host", "127.0.0.1", "--port", 0, "--logprobs-mode", self._mode),
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ending = True
        signal.signal(signal.SIGTERM, self._before)
        self._processes.__exit__(kind, error, at)
        if not self._failed:
            shutil.rmtree(self._folder, ignore_errors=True)

    def listening(self) -> str:
        """Its address, as soon as it listens; its model may still be loading."""
        try:
            return self._child.listening(ENGINE_NAME)
        except ChildDied as error:
            raise self._died(error) from None

    def watch(self, process: Stoppable) -> None:
        """Stops a gateway's process when the engine ends."""

        def wait() -> None:
            self._child.process.wait()
            if self._ending:
                return
            try:
                self._child.check()
            except ChildDied as error:
                process.stop(self._died(error))

        threading.Thread(target=wait, name="headrace-engine", daemon=True).start()

    def _died(self, error: ChildDied) -> HeadraceError:
        self._failed = True
        said = error.tail.splitlines()[-1:] or ["nothing"]
        return HeadraceError(f"{error}; it said: {said[0].removeprefix('headrace: ')} (its log is {self.log})")


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
