"""`headrace replay`: see `headrace.replay`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from headrace.cli.common import listening_on, remark
from headrace.cli.dashboard import SourceCommand
from headrace.commands import Usage, command
from headrace.extras import require_for

if TYPE_CHECKING:
    from headrace.net.server import Server

#: Seconds within which the recorded server listens: it binds a port of this machine.
LISTENING_S = 60.0


class ReplayCommand(SourceCommand):
    """Serve recorded trajectories as a model, until SIGTERM or Ctrl-C, in every dialect: the recorded answer where a
    call is one that was recorded, and 409 with the first difference where it is not. No model is loaded, and the
    recording is not changed.
    """

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8100, ge=0, le=65535, description="port to listen on; 0: a free one")
    channel: str | None = Field(None, description="trajectories of this channel only")
    trajectory_uid: str | None = Field(None, description="this trajectory only")
    tokenizer_path: Path | None = Field(
        None, description="the model's folder; found by itself where TARGET is the journal of a run"
    )

    def execute(self) -> None:
        require_for("replay")
        from headrace.gateway.process import GatewayProcess
        from headrace.gateway.settings import GatewaySettings
        from headrace.net.server import Server
        from headrace.replay.recorded import RecordedAnswers, trajectories_of
        from headrace.replay.server import RecordedServer
        from headrace.tokens import do_without_torch
        from headrace.tokens.vocabulary import load_vocabulary

        do_without_torch()
        tokenizer = self.tokenizer_path or self.model_of_run(self.folder)
        if tokenizer is None:
            raise Usage("no tokenizer was found beside TARGET; name the model's folder: --tokenizer-path FOLDER")
        vocabulary = load_vocabulary(tokenizer)
        with self.source() as source:
            answers = RecordedAnswers(trajectories_of(source, self.channel, self.trajectory_uid), vocabulary)
        if not len(answers):
            fits = " that fits" if self.channel or self.trajectory_uid else ""
            raise Usage(f"{self.target} holds no trajectory{fits}")
        remark(f"{len(answers)} trajectories of {answers.steps} steps are replayed")
        recorded = Server(RecordedServer(answers, vocabulary).app, "127.0.0.1", 0)
        with _running(recorded) as address, listening_on(self.host, self.port):
            settings = GatewaySettings(vllm_addresses=address, tokenizer_path=str(tokenizer), open=True)
            GatewayProcess(settings, host=self.host, port=self.port, drain_s=0).run(_StartOutput())


class _StartOutput:
    """Prints one line on stdout once calls are answered."""

    def listening(self, address: str) -> None:
        """Calls are not answered yet."""

    def waiting(self, reason: str) -> None:
        remark(reason)

    def ready(self, address: str) -> None:
        print(f"replay ready on {address} (base URL {address}/v1)", flush=True)


@contextmanager
def _running(server: Server) -> Iterator[str]:
    """A server in a thread of its own; yields its address."""
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(lambda address: ready.set(),), name="recorded", daemon=True)
    thread.start()
    if not ready.wait(LISTENING_S):
        raise RuntimeError("the recorded server does not listen")
    try:
        yield server.address
    finally:
        server.stop()
        thread.join(LISTENING_S)


replay_command = command("replay", ReplayCommand)
