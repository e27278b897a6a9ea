"""The command line of an environment: `python my_env.py serve|process|evaluate [--config FILE] [--env.x ...] ...`."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import logging
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.logging import RichHandler

from headrace.command_line import Formatter, Parser, Usage, exit_code
from headrace.envs.core import EnvCore
from headrace.envs.progress import watched
from headrace.envs.server.config import ServerManagerConfig
from headrace.envs.settings import (
    ENV,
    OPENAI,
    SWITCHES,
    EnvSettings,
    GivenSettings,
    Servers,
    add_flags,
    changed_server,
    given_flags,
    merge_settings,
)
from headrace.envs.types import BaseEnvConfig
from headrace.files import read

log = logging.getLogger("headrace.envs")

#: Headrace's own files, which are no author's code.
PACKAGE = Path(__file__).resolve().parents[1]
PORT, URL = "--port", f"--{ENV}.rollout_server_url"
EXAMPLES = """\
precedence: flags, then the file of --config, then the environment's own defaults

examples:
  {prog} serve --port 8000 --openai.base_url http://localhost:9001/v1 --openai.model_name MODEL
  {prog} process --env.total_steps 20 --env.group_size 4 --openai.base_url http://localhost:9001/v1
  {prog} evaluate --config FILE.yaml
"""


@cache
def console() -> Console:
    """The console of progress and logs, on stderr; results are printed on stdout."""
    return Console(stderr=True)


class EnvSubcommand:
    """One command of one environment; its docstring is the command's help. An environment changes a command by a
    subclass, which it returns from `get_cli_serve_config_cls` and its like.
    """

    summary: ClassVar[str]
    env_cls: ClassVar[type[EnvCore]]

    def __init__(self, settings: EnvSettings, options: Mapping[str, Any] | None = None) -> None:
        """`options` are the values of the command's own flags, by name."""
        self.settings = settings
        self.options = options or {}

    @classmethod
    def of(cls, env_cls: type[EnvCore]) -> type[EnvSubcommand]:
        """This command for an environment."""
        return type(cls.__name__, (cls,), {"env_cls": env_cls, "__doc__": cls.__doc__})

    @classmethod
    def defaults(cls) -> tuple[BaseEnvConfig, Servers]:
        """The configurations before flags and file: those of `config_init`, with the changes of this command."""
        config, servers = cls.env_cls.config_init()
        return config.model_copy(update=cls.changes(config)), servers

    @classmethod
    def changes(cls, config: BaseEnvConfig) -> dict[str, object]:
        """Fields of the configuration that have other defaults on a command line."""
        return {
            "wandb_name": config.wandb_name or cls.env_cls.name,
            "metrics_path": config.metrics_path or f"data/{cls.env_name()}.metrics.jsonl",
        }

    @classmethod
    def env_name(cls) -> str:
        return cls.env_cls.name or cls.env_cls.__name__

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds flags that only this command has; none by default."""

    def environment(self) -> EnvCore:
        """An environment with these settings."""
        found = self.settings
        return self.env_cls(config=found.env, server_configs=found.servers, slurm=found.slurm, testing=found.testing)

    def run(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define run()")


class ServeSubcommand(EnvSubcommand):
    """Work for a trainer: register at the Trajectory API, roll items out and send scored groups until its steps are
    done. Ctrl-C ends it with everything sent that is under way; a second one ends it at once.
    """

    summary = "work for a trainer, through the Trajectory API"

    def run(self) -> None:
        env = self.environment()

        async def serve() -> None:
            async with watched(env, "steps", console()):
                await env.env_manager()

        asyncio.run(serve())


class ProcessSubcommand(EnvSubcommand):
    """Roll out without a trainer: total_steps groups into a JSON lines file, and a page to read them. Ctrl-C ends it
    with the groups that are under way; a second one ends it at once.
    """

    summary = "write groups to a file and a page, without a trainer"

    @classmethod
    def changes(cls, config: BaseEnvConfig) -> dict[str, object]:
        path = config.data_path_to_save_groups or f"data/{cls.env_name()}.jsonl"
        return super().changes(config) | {
            "data_path_to_save_groups": path,
            "ensure_scores_are_not_same": False,
            "include_messages": True,
        }

    def run(self) -> None:
        env = self.environment()
        env.process_mode = True
        env.n_groups_to_process, env.group_size_to_process = env.config.total_steps, env.config.group_size

        async def process() -> None:
            async with watched(env, "groups", console()):
                await env.process_manager()

        asyncio.run(process())
        if env.jsonl_writer is not None:
            path = env.jsonl_writer.path
            print(f"{env.counts.groups} groups in {path}, to be read in {path.with_suffix('.html')}")


class EvaluateSubcommand(EnvSubcommand):
    """Evaluate once, and write metrics.json and samples.jsonl."""

    summary = "evaluate once, into metrics.json and samples.jsonl"

    @classmethod
    def changes(cls, config: BaseEnvConfig) -> dict[str, object]:
        folder = config.data_dir_to_save_evals or f"data/{cls.env_name()}-evaluation"
        return super().changes(config) | {"data_dir_to_save_evals": folder}

    def run(self) -> None:
        env = self.environment()
        asyncio.run(env._run_evaluate())
        if env.last_evaluation is not None:
            print(f"{env.last_evaluation}; in {env.config.data_dir_to_save_evals}")


#: Short names, for overrides of the commands.
Serve, Process, Evaluate = ServeSubcommand, ProcessSubcommand, EvaluateSubcommand


def main(
    env_cls: type[EnvCore],
    args: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    more: Mapping[str, type[EnvSubcommand]] | None = None,
) -> None:
    """Runs an environment's command line, by default this process's, and exits with its code.

    `prog` is how it was called, for messages; `more` are commands beside the three.
    """
    prog = prog or _prog()
    given = list(sys.argv[1:] if args is None else args)

    def act() -> None:
        try:
            asked = parse_command(env_cls, given, prog, more or {})
            _configure_logging()
            asked.run()
        except OSError as error:
            log_traceback(error, Path(inspect.getfile(env_cls)).resolve().parent)
            raise

    sys.exit(exit_code(prog, act))


def log_traceback(error: OSError, folder: Path) -> None:
    """Logs the traceback of an OSError where an author's code in `folder` raised it: the command line prints such an
    error as one line, which does not say where it came from."""
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    if any(file.is_relative_to(folder) and not file.is_relative_to(PACKAGE) for file in frames):
        log.error("the environment's own code failed", exc_info=error)


def _prog() -> str:
    """How this process was called."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name.endswith(".__main__"):
        return f"python -m {spec.name.removesuffix('.__main__')}"
    return f"python {Path(sys.argv[0]).name}"


def parse_command(
    env_cls: type[EnvCore], args: Sequence[str], prog: str, more: Mapping[str, type[EnvSubcommand]]
) -> EnvSubcommand:
    """The command that the arguments name, with its settings. Exits on --help; raises `Usage` or `InvalidInput`."""
    commands: dict[str, type[EnvSubcommand]] = {
        "serve": env_cls.get_cli_serve_config_cls(),
        "process": env_cls.get_cli_process_config_cls(),
        "evaluate": env_cls.get_cli_evaluate_config_cls(),
        **more,
    }
    parser = Parser(
        prog=prog,
        description=env_cls.__doc__ or f"The environment {env_cls.name or env_cls.__name__}.",
        epilog=EXAMPLES.format(prog=prog),
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", parser_class=Parser)
    for name, kind in commands.items():
        usage = f"{prog} {name} [--config FILE] [--{ENV}.NAME VALUE]... [--{OPENAI}.NAME VALUE]..."
        made = parsers.add_parser(name, usage=usage, help=kind.summary, formatter_class=Formatter, allow_abbrev=False)
        made.description = kind.__doc__
        _add_arguments(made, kind)
    found = vars(parser.parse_args(list(args)))
    chosen = commands[found["command"]]
    return chosen(_settings(chosen, found), found)


def _add_arguments(parser: Parser, kind: type[EnvSubcommand]) -> None:
    """Adds the flags of a command."""
    config, servers = kind.defaults()
    kind.add_arguments(parser)
    parser.add_argument("--config", metavar="FILE", type=Path, help=f"YAML or JSON with {ENV}:, {OPENAI}: and the rest")
    parser.add_argument(PORT, metavar="N", type=int, help=f"short for {URL} http://localhost:N")
    for name in SWITCHES:
        says = ServerManagerConfig.model_fields[name].description
        parser.add_argument(f"--{name}", metavar="true|false", nargs="?", const="true", help=says)
    own = type(config).model_fields.keys() - BaseEnvConfig.model_fields.keys()
    if own:
        add_flags(parser.add_argument_group("this environment"), ENV, config, own)
    add_flags(parser.add_argument_group("every environment"), ENV, config, BaseEnvConfig.model_fields.keys())
    add_flags(parser.add_argument_group("its rollout server"), OPENAI, changed_server(servers))


def _settings(kind: type[EnvSubcommand], found: Mapping[str, Any]) -> EnvSettings:
    config, servers = kind.defaults()
    env = given_flags(found, ENV, type(config))
    if found["port"] is not None:
        if "rollout_server_url" in env:
            raise Usage(f"{PORT} is short for {URL}: give one of them")
        env["rollout_server_url"] = f"http://localhost:{found['port']}"
    path = found["config"]
    given = GivenSettings(
        file=read(path) if path is not None else {},
        source=str(path),
        env=env,
        openai=given_flags(found, OPENAI, type(changed_server(servers))),
        switches={name: found[name] for name in SWITCHES if found[name] is not None},
    )
    return merge_settings(config, servers, given)


def _configure_logging() -> None:
    """Log lines go above the live view on a terminal, and are plain lines elsewhere."""
    if console().is_terminal:
        handler = RichHandler(console=console(), show_path=False)
        logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    else:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
