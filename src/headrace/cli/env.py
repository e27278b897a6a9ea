"""`headrace env FILE COMMAND …`: the command line of an environment in a file, Atropos' included."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn

from pydantic import Field

from headrace.commands import BAD_USAGE, OK, CommandModel, Positional, Usage, command, exit_code

#: How messages and help name this command line.
PROG = "headrace env"
#: Its help page: what follows FILE belongs to the environment, which is not known yet.
HELP = """\
usage: headrace env FILE [--class NAME] COMMAND [--config FILE] [--env.NAME VALUE]... [--openai.NAME VALUE]...

Run an environment: a file written for Headrace or, as it is, for atroposlib 0.4.0; a module by its dotted name; or one
that ships, by its own.

subcommands:
  serve     work for a trainer, through the Trajectory API
  process   write groups to a file and a page, without a trainer
  evaluate  evaluate once, into metrics.json and samples.jsonl
  probe     see what its reward pays for, without a model
  check     import it and read its configuration, and start nothing

`headrace env FILE COMMAND --help` shows the flags of this environment. --class says which one is meant where the file
has several and does not run one of them itself.
"""


class EnvCommand(CommandModel):
    """Run an environment. What follows FILE is its own command line: see `headrace env --help`."""

    # What a shell completes; the rest of the line is read by `run`.
    file: Positional[Path] = Field(description="a file, a module or an environment that ships")
    subcommand: Positional[Literal["serve", "process", "evaluate", "probe", "check"]] = Field(
        description="what to do with it"
    )
    config: Path | None = Field(None, description="YAML or JSON with env:, openai: and the rest")

    def execute(self) -> None:
        raise Usage(f"{PROG} {self.file} what? serve, process, evaluate, probe or check (see {PROG} --help)")


def run(args: Sequence[str]) -> NoReturn:
    """Runs an environment's command line and exits with its code."""
    if not args or args[0] in ("-h", "--help"):
        print(HELP, end="", file=sys.stdout if args else sys.stderr)
        sys.exit(OK if args else BAD_USAGE)
    sys.exit(exit_code(PROG, lambda: _run(args[0], list(args[1:]))))


def _run(target: str, rest: list[str]) -> None:
    """Finds the environment and runs the rest of the command line as its own."""
    from headrace.compat.atropos import finder
    from headrace.envs.cli import main
    from headrace.envs.find import find
    from headrace.envs.probe import ProbeSubcommand
    from headrace.envs.subcommands import CheckSubcommand

    finder.install()
    class_name, rest = _without_class(rest)
    sys.argv = [target, *rest]  # files of environments may read it
    env_cls = find(target, class_name)
    more = {"probe": ProbeSubcommand.of(env_cls), "check": CheckSubcommand.of(env_cls)}
    main(env_cls, rest, prog=f"{PROG} {target}", more=more)


def _without_class(args: list[str]) -> tuple[str | None, list[str]]:
    """The value of `--class`, and the arguments without it."""
    for at, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if flag == "--class":
            if equals:
                return value, args[:at] + args[at + 1 :]
            if at + 1 == len(args):
                raise Usage("--class needs a NAME")
            return args[at + 1], args[:at] + args[at + 2 :]
    return None, args


env_app = command("env", EnvCommand)
