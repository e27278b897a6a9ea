"""`headrace dashboard`: see `headrace.dashboard`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from pydantic import Field

from headrace.cli.common import (
    TargetCommand,
    connected,
    folder_of,
    listening_on,
    megabytes,
    remark,
    warn_unprotected,
)
from headrace.commands import Usage, command
from headrace.data.keys import configured_key
from headrace.data.visible import log_to_stderr
from headrace.extras import install_command, missing
from headrace.files import Key, check_place, read, write_whole

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from headrace.dashboard.dashboard import Dashboard
    from headrace.dashboard.source import PoolSource

#: The environment variable of `--admin-key`.
KEY_OF_DASHBOARD = "HEADRACE_DASHBOARD_KEY"


class SourceCommand(TargetCommand):
    """A command that reads a pool, or a journal's folder, also one that a process has open, or that of a run."""

    @property
    def folder(self) -> Path | None:
        """The journal's folder that TARGET names, itself or by the folder of its run; None where a pool runs there."""
        from headrace.run.services import JOURNAL

        named = folder_of(self.target)
        if named is None or not (named / JOURNAL).is_dir():
            return named
        return named / JOURNAL

    @contextmanager
    def source(self, *, editable: bool = False) -> Iterator[PoolSource]:
        """What TARGET names; `editable`: steps of a pool that runs may be curated. A folder is only ever read."""
        from headrace.dashboard.source import JournalFolder, RunningPool

        folder = self.folder
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

    @classmethod
    def model_of_run(cls, folder: Path | None) -> Path | None:
        """The folder of the model of the run whose journal a folder is: its own, or the one that its trainer began
        with; None where neither has a tokenizer."""
        from headrace.run.services import TRAINER_FILE

        own, file = cls.of_run(folder, "model", "tokenizer.json"), cls.of_run(folder, TRAINER_FILE)
        if own is not None or file is None:
            return own
        named = read(file).get("model")
        found = Path(named) if isinstance(named, str) else None
        return found if found is not None and (found / "tokenizer.json").exists() else None


class DashboardCommand(SourceCommand):
    """Serve a page on what a pool holds, until SIGTERM or Ctrl-C: figures, trajectories with their tokens, groups.
    Prints one line with its address as soon as it serves. Without --edit nothing is changed. With --export nothing is
    served: the page is written to a file.

    TARGET may also be the folder of a run, or a .jsonl file of groups as environments write it.
    """

    host: str | None = Field(None, description="address to listen on; 0.0.0.0 where a key is set, else 127.0.0.1")
    port: int = Field(8300, ge=0, le=65535, description="port to listen on; 0: a free one")
    admin_key: Key = Field(None, description=f"the key that the page asks for (or set {KEY_OF_DASHBOARD})")
    metrics: Path | None = Field(
        None, description="a trainer's metrics.jsonl; found by itself where TARGET is the journal of a run"
    )
    tokenizer_path: Path | None = Field(
        None, description="the model's folder, to show texts; found by itself where TARGET is the journal of a run"
    )
    beside: str | None = Field(None, description="another TARGET, such as an earlier run's journal, to compare it with")
    edit: bool = Field(False, description="let people curate the steps of a pool that runs; else the page only reads")
    title: str | None = Field(None, description="what the page calls itself; TARGET unless given")
    export: Path | None = Field(None, description="write the page with all that it shows into one .html file, and end")

    def execute(self) -> None:
        from headrace.dashboard.login import DashboardLogin
        from headrace.dashboard.routes import PATH, dashboard_app
        from headrace.net.server import LocalOnly, Server, loopback, settle_memory, usual_host
        from headrace.tokens import do_without_torch

        if self.export is not None:
            if self.export.suffix.lower() not in (".html", ".htm"):
                raise Usage(f"--export is {str(self.export)!r}; it is a page, so end it with .html")
            check_place(self.export)
        log_to_stderr()
        do_without_torch()
        key = configured_key(self.admin_key, KEY_OF_DASHBOARD)
        host = self.host or usual_host(keyed=key is not None)
        if key is None:
            warn_unprotected(host, "read everything", f"{KEY_OF_DASHBOARD} or --admin-key")
        with ExitStack() as stack:
            dashboard = self._dashboard(stack)
            if self.export is not None:
                asyncio.run(_export(dashboard, self.export, all_whole=self._groups_file is not None))
                return
            with listening_on(host, self.port):
                app: ASGIApp = dashboard_app(dashboard, DashboardLogin(key))
                if key is None and loopback(host):
                    app = LocalOnly(app)
                server = Server(app, host, self.port, lifespan=True)
            settle_memory()
            server.run(lambda address: print(f"dashboard ready on {address}{PATH}", flush=True))

    def _dashboard(self, stack: ExitStack) -> Dashboard:
        """The dashboard of TARGET, with what is found beside it; what it reads is closed with `stack`."""
        from headrace.dashboard.about import ABOUT_FILE, read_about
        from headrace.dashboard.dashboard import Dashboard
        from headrace.dashboard.groups_file import GroupsFile
        from headrace.dashboard.source import RunningPool
        from headrace.pool.embedded import DataPool
        from headrace.tokens import load_renderer

        folder, groups_file = self.folder, self._groups_file
        found = None if groups_file is not None else self.model_of_run(folder)
        if found is not None and self.tokenizer_path is None and missing(["tokens"]):
            lacking = ", ".join(missing(["tokens"]))
            remark(f"tokens are shown by their ids; their texts need {lacking}: {install_command('tokens')}")
            found = None
        tokenizer = self.tokenizer_path or found
        renderer = load_renderer(tokenizer) if tokenizer is not None else None
        other = None
        if self.beside is not None:
            named = SourceCommand(target=self.beside, key=self.key)
            its = self.of_run(named.folder, "trainer/metrics.jsonl")
            other = Dashboard(stack.enter_context(named.source()), metrics=its, renderer=lambda: renderer)
        if groups_file is not None:
            groups = GroupsFile(groups_file)
            source: PoolSource = RunningPool(stack.enter_context(groups.pool), self.title or groups_file.name)
            about = groups.about()
            if self.title is not None:
                about = msgspec.structs.replace(about, title=self.title)
            return Dashboard(source, about=lambda: about, renderer=lambda: renderer, beside=other)
        about_file = self.of_run(folder, ABOUT_FILE)
        if folder is not None and (folder / ABOUT_FILE).exists():  # a run whose journal is elsewhere, as on a cluster
            about_file = folder / ABOUT_FILE
            source = RunningPool(stack.enter_context(DataPool()), str(folder))
        else:
            source = stack.enter_context(self.source(editable=self.edit))
        if self.title is not None:
            source.title = self.title
        metrics = self.metrics or self.of_run(folder, "trainer/metrics.jsonl")
        return Dashboard(
            source,
            metrics=metrics,
            about=lambda: None if about_file is None else read_about(about_file),
            renderer=lambda: renderer,
            beside=other,
        )

    @property
    def _groups_file(self) -> Path | None:
        """The file of groups that TARGET is; None where it is something else."""
        from headrace.dashboard.groups_file import SUFFIX

        named = folder_of(self.target)
        return named if named is not None and named.suffix == SUFFIX else None


async def _export(dashboard: Dashboard, path: Path, *, all_whole: bool) -> None:
    from headrace.dashboard.single_file import collect, single_file

    async with dashboard:
        answers = await collect(dashboard, all_whole=all_whole)
    written = single_file(answers)
    write_whole(path, written)
    listed, whole = len(answers["trajectories"]), len(answers["whole"])
    print(f"{listed} trajectories, {whole} of them whole, in {path} ({megabytes(len(written))})")


dashboard_command = command("dashboard", DashboardCommand)
