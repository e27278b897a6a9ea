"""`headrace pool`: run one (`run`), read one (`read`), look after its journal (`care`)."""

from __future__ import annotations

from pydantic import BaseModel, Field
from pydantic_settings import CliApp, CliSubCommand

from headrace.cli.pool.care import Backup, Compact, Repair, Verify
from headrace.cli.pool.read import Export, Ls, Show, Stats
from headrace.cli.pool.run import Serve, Start, Stop

__all__ = ["Pool"]


class Pool(BaseModel):
    """Start, read and look after a pool.

    TARGET is a journal's folder (read as it lies there; no pool may have it open), http://HOST:PORT or
    ray-actor://NAME?namespace=NAMESPACE.
    """

    serve: CliSubCommand[Serve] = Field(description="run a pool as an HTTP service")
    start: CliSubCommand[Start] = Field(description="run a pool as a detached Ray actor")
    stop: CliSubCommand[Stop] = Field(description="end a Ray actor's pool; its journal stays")
    stats: CliSubCommand[Stats] = Field(description="the ledger and the queues")
    ls: CliSubCommand[Ls] = Field(description="list groups, trajectories or steps")
    show: CliSubCommand[Show] = Field(description="one trajectory: its tree, steps and rewards")
    export: CliSubCommand[Export] = Field(description="write steps or sequences to Parquet or JSONL")
    verify: CliSubCommand[Verify] = Field(description="check a journal and say what was found")
    repair: CliSubCommand[Repair] = Field(description="put what reads back of a damaged journal in its place")
    compact: CliSubCommand[Compact] = Field(description="rewrite a journal as what lives")
    backup: CliSubCommand[Backup] = Field(description="copy a journal to an empty folder")

    def cli_cmd(self) -> None:
        CliApp.run_subcommand(self)
