"""The command line of an environment: `python my_env.py serve|process|evaluate [--config FILE] [--env.x ...] ...`."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.logging import RichHandler

from headrace.command_line import Formatter, Parser, Usage, exit_code
from headrace.envs.cli.command import Command, Evaluate, Process, Serve, console
from headrace.envs.cli.flags import add_flags, given_flags
from headrace.envs.cli.settings import ENV, OPENAI, SWITCHES, Given, Settings, changed_server, settings
from headrace.envs.config import BaseEnvConfig
from headrace.envs.find import tell_where
from headrace.envs.server.config import ServerManagerConfig
from headrace.files import read

if TYPE_CHECKING:
    from headrace.envs.base import BaseEnv

__all__ = ["Command", "Evaluate", "Process", "Serve", "main"]

PORT, URL = "--port", f"--{ENV}.rollout_server_url"
EXAMPLES = """\
precedence: flags, then the file of --config, then the environment's own defaults

examples:
  {prog} serve --port 8000 --openai.base_url http://localhost:9001/v1 --openai.model_name MODEL
  {prog} process --env.total_steps 20 --env.group_size 4 --openai.base_url http://localhost:9001/v1
  {prog} evaluate --config FILE.yaml
"""


def main(
    env_cls: type[BaseEnv],
    args: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    more: Mapping[str, type[Command]] | None = None,
) -> None:
    """Runs an environment's command line and exits with its code. `more` are commands beside the three."""
    prog = prog or _called()
    given = list(sys.argv[1:] if args is None else args)

    def act() -> None:
        try:
            asked = command(env_cls, given, prog, more or {})
            _log()
            asked.run()
        except OSError as error:
            tell_where(error, Path(inspect.getfile(env_cls)).resolve().parent)
            raise

    sys.exit(exit_code(prog, act))


def _called() -> str:
    """How this process's command line was begun."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name.endswith(".__main__"):
        return f"python -m {spec.name.removesuffix('.__main__')}"
    return f"python {Path(sys.argv[0]).name}"


def command(env_cls: type[BaseEnv], args: Sequence[str], prog: str, more: Mapping[str, type[Command]]) -> Command:
    """The command that a command line asks for, with its settings."""
    commands = {
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
        _add(made, kind)
    found = vars(parser.parse_args(list(args)))
    chosen = commands[found["command"]]
    return chosen(_settings(chosen, found), found)


def _add(parser: Parser, kind: type[Command]) -> None:
    """The flags of a command."""
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


def _settings(kind: type[Command], found: Mapping[str, Any]) -> Settings:
    config, servers = kind.defaults()
    env = given_flags(found, ENV, type(config))
    if found["port"] is not None:
        if "rollout_server_url" in env:
            raise Usage(f"{PORT} is short for {URL}: give one of them")
        env["rollout_server_url"] = f"http://localhost:{found['port']}"
    path = found["config"]
    given = Given(
        file=read(path) if path is not None else {},
        source=str(path),
        env=env,
        openai=given_flags(found, OPENAI, type(changed_server(servers))),
        switches={name: found[name] for name in SWITCHES if found[name] is not None},
    )
    return settings(config, servers, given)


def _log() -> None:
    """What is logged stands beside the view on a terminal, and on plain lines elsewhere."""
    if console().is_terminal:
        handler = RichHandler(console=console(), show_path=False)
        logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    else:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
