"""`headrace dashboard`: see `headrace.dashboard`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from headrace.cli.common import (
    TargetCommand,
    connected,
    folder_of,
    listening_on,
    log_to_stderr,
    megabytes,
    warn_unprotected,
)
from headrace.commands import Usage, command
from headrace.files import write_whole

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from headrace.dashboard.dashboard import Dashboard
    from headrace.dashboard.source import PoolSource

#: The environment variable of `--admin-key`.
KEY_OF_DASHBOARD = "HEADRACE_DASHBOARD_KEY"


class SourceCommand(TargetCommand):
    """A command that reads a pool, or a journal's folder, also one that a process has open."""

    @contextmanager
    def source(self, *, editable: bool = False) -> Iterator[PoolSource]:
        """What TARGET names; `editable`: steps of a pool that runs may be curated. A folder is only ever read."""
        from headrace.dashboard.source import JournalFolder, RunningPool

        folder = folder_of(self.target)
        if folder is not None:
            journal = JournalFolder(folder)
            try:
                yield journal
            finally:
                journal.close()
            return
        with connected(self) as pool:
            pool.stats()  # so that a pool that is not there is told now
            yield RunningPool(pool, self.target, editable=editable)

    @staticmethod
    def of_run(folder: Path | None, name: str, holding: str = "") -> Path | None:
        """A file or folder of the run whose journal a folder is; None where there is none."""
        if folder is None:
            return None
        found = folder.resolve().parent / name
        return found if (found / holding if holding else found).exists() else None


class DashboardCommand(SourceCommand):
    """Serve a page on what a pool holds, until SIGTERM or Ctrl-C: figures, trajectories with their tokens, groups.
    Prints one line with its address as soon as it serves. Without --edit nothing is changed. With --export nothing is
    served: the page is written to a file.
    """

    host: str | None = Field(None, description="address to listen on; 0.0.0.0 where a key is set, else 127.0.0.1")
    port: int = Field(8300, ge=0, le=65535, description="port to listen on; 0: a free one")
    admin_key: str | None = Field(None, description=f"the key that the page asks for (or set {KEY_OF_DASHBOARD})")
    metrics: Path | None = Field(
        None, description="a trainer's metrics.jsonl; found by itself where TARGET is the journal of a run"
    )
    tokenizer_path: Path | None = Field(
        None, description="the model's folder, to show texts; found by itself where TARGET is the journal of a run"
    )
    beside: str | None = Field(None, description="another TARGET, such as an earlier run's journal, to compare it with")
    edit: bool = Field(False, description="let people curate the steps of a pool that runs; else the page only reads")
    export: Path | None = Field(None, description="write the page with all that it shows into one .html file, and end")

    def execute(self) -> None:
        from headrace.dashboard.dashboard import Dashboard
        from headrace.dashboard.login import DashboardLogin
        from headrace.dashboard.routes import PATH, dashboard_app
        from headrace.net.server import LocalOnly, Server, loopback, settle_memory, usual_host
        from headrace.tokens import do_without_torch, load_renderer

        if self.export is not None and self.export.suffix.lower() not in (".html", ".htm"):
            raise Usage(f"--export is {str(self.export)!r}; it is a page, so end it with .html")
        log_to_stderr()
        do_without_torch()
        key = self.admin_key or os.environ.get(KEY_OF_DASHBOARD) or None
        host = self.host or usual_host(keyed=key is not None)
        if key is None:
            warn_unprotected(host, "read everything", f"{KEY_OF_DASHBOARD} or --admin-key")
        folder = folder_of(self.target)
        metrics = self.metrics or self.of_run(folder, "trainer/metrics.jsonl")
        tokenizer = self.tokenizer_path or self.of_run(folder, "model", "tokenizer.json")
        renderer = load_renderer(tokenizer) if tokenizer is not None else None
        with self.source(editable=self.edit) as source, ExitStack() as stack:
            other = None
            if self.beside is not None:
                there = folder_of(self.beside)
                its = self.of_run(there, "trainer/metrics.jsonl")
                named = SourceCommand(target=self.beside, key=self.key)
                other = Dashboard(stack.enter_context(named.source()), metrics=its, renderer=lambda: renderer)
            dashboard = Dashboard(source, metrics=metrics, renderer=lambda: renderer, beside=other)
            if self.export is not None:
                asyncio.run(_export(dashboard, self.export))
                return
            with listening_on(host, self.port):
                app: ASGIApp = dashboard_app(dashboard, DashboardLogin(key))
                if key is None and loopback(host):
                    app = LocalOnly(app)
                server = Server(app, host, self.port, lifespan=True)
            settle_memory()
            server.run(lambda address: print(f"dashboard ready on {address}{PATH}", flush=True))


async def _export(dashboard: Dashboard, path: Path) -> None:
    from headrace.dashboard.single_file import collect, single_file

    async with dashboard:
        answers = await collect(dashboard)
    written = single_file(answers)
    write_whole(path, written)
    listed, whole = len(answers["trajectories"]), len(answers["whole"])
    print(f"{listed} trajectories, {whole} of them whole, in {path} ({megabytes(len(written))})")


dashboard_command = command("dashboard", DashboardCommand)
