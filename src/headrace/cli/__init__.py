"""The `headrace` command. One noun a file: each holds its commands as models, and what they do."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import CliSubCommand

from headrace.cli.api import ApiCommand
from headrace.cli.bench import Bench
from headrace.cli.check_gateway import CheckGateway
from headrace.cli.demo import Demo
from headrace.cli.doctor import Doctor
from headrace.cli.engine import EngineCommand
from headrace.cli.env import EnvCommand
from headrace.cli.env import run as run_env
from headrace.cli.gateway import GatewayCommand, ServeCommand
from headrace.cli.parser import Commands, run
from headrace.cli.pool import Pool
from headrace.cli.train import Train
from headrace.command_line import exit_code
from headrace.version import __version__

__all__ = ["main", "run_api"]


class Headrace(Commands):
    """Headrace: the bridge between agents that run and the trainer that learns from them."""

    gateway: CliSubCommand[GatewayCommand] = Field(description="forward agents' calls and record them")
    serve: CliSubCommand[ServeCommand] = Field(description="gateway and pool in one process")
    api: CliSubCommand[ApiCommand] = Field(description="Atropos' Trajectory API: environments post, trainers take")
    pool: CliSubCommand[Pool] = Field(description="start, read and look after a pool")
    env: CliSubCommand[EnvCommand] = Field(description="run an environment: serve, process, evaluate, probe")
    bench: CliSubCommand[Bench] = Field(description="measure, against named limits and peers")
    engine: CliSubCommand[EngineCommand] = Field(description="serve a small model as vLLM would")
    check_gateway: CliSubCommand[CheckGateway] = Field(description="can what a server samples be trained on?")
    train: CliSubCommand[Train] = Field(description="train a model from a pool")
    demo: CliSubCommand[Demo] = Field(description="watch an agent learn a game from scratch")
    doctor: CliSubCommand[Doctor] = Field(description="look at this machine: what works here, and what is missing")


def main(args: Sequence[str] | None = None) -> None:
    """Runs a command line and exits with its code."""
    given = sys.argv[1:] if args is None else args
    if given[:1] == ["env"]:
        run_env(given[1:])  # what follows is the environment's command line
    sys.exit(exit_code("headrace", lambda: run(Headrace, given, prog="headrace", version=f"headrace {__version__}")))


def run_api() -> None:
    """`run-api`, as Atropos has it: `headrace api`."""
    main(["api", *sys.argv[1:]])
