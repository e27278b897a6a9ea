"""The command line of an environment: `python my_env.py serve|process|evaluate [--config FILE] [--env.x ...] ...`.

`--env.group_size 8` is the flag of the field `group_size` of the configuration, `--openai.timeout 60` of that of its
server. A field that is a model has dotted flags, one that holds a list or a mapping takes YAML, one that is true or
false takes either, or nothing, which is true. What the commands do is in `subcommands`, how flags and file are merged
in `settings`.
"""

from __future__ import annotations

import inspect
import logging
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from cyclopts import App, Group
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.logging import RichHandler

from headrace.commands import (
    OK,
    OPTIONS,
    Flag,
    Usage,
    exit_code,
    fields,
    flags_app,
    from_flags,
    group,
    model_flags,
    nested,
    run,
)
from headrace.data.errors import InvalidInput
from headrace.data.visible import VisibleFormatter, log_to_stderr
from headrace.envs.core import EnvCore
from headrace.envs.server.config import ServerManagerConfig
from headrace.envs.settings import ENV, OPENAI, SWITCHES, GivenSettings, changed_server, merge_settings
from headrace.envs.subcommands import (
    URL_FLAG,
    EnvSubcommand,
    EvaluateSubcommand,
    ProcessSubcommand,
    ServeSubcommand,
    console,
)
from headrace.envs.types import BaseEnvConfig
from headrace.files import kinds, read

__all__ = [
    "EnvSubcommand",
    "ServeSubcommand",
    "ProcessSubcommand",
    "EvaluateSubcommand",
    "main",
    "parse_command",
    "log_traceback",
]

log = logging.getLogger("headrace.envs")

#: Headrace's own files, which are no author's code.
PACKAGE = Path(__file__).resolve().parents[1]
EXAMPLES = """\
precedence: flags, then the file of --config, then the environment's own defaults

examples:
  {prog} serve --port 8000 --openai.base_url http://localhost:9001/v1 --openai.model_name MODEL
  {prog} process --env.total_steps 20 --env.group_size 4 --openai.base_url http://localhost:9001/v1
  {prog} evaluate --config FILE.yaml"""
#: Headings of the help, in their order.
THIS_ENV, EVERY_ENV, SERVER = (
    Group(name, sort_key=10 + at)
    for at, name in enumerate(("this environment", "every environment", "its rollout server"))
)
#: How None is written on a command line, where a field takes it.
NONE = ("None", "none", "null")
NUMBERS = (int, float)
#: Origins of types that are neither a list nor a mapping.
PLAIN_ORIGINS = (None, Union, UnionType, Literal, Annotated)
#: Fields whose names end so are secret: the help does not show their values.
SECRET_SUFFIX = "key"
#: Characters of a default in the help; a longer one is cut.
MAX_DEFAULT_CHARS = 60


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


def _configure_logging() -> None:
    """Log lines go above the live view on a terminal, and are plain lines elsewhere."""
    if console().is_terminal:
        handler = RichHandler(console=console(), show_path=False)
        handler.setFormatter(VisibleFormatter("%(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
    else:
        log_to_stderr("%(asctime)s %(levelname)s %(name)s: %(message)s")


def parse_command(
    env_cls: type[EnvCore], args: Sequence[str], prog: str, more: Mapping[str, type[EnvSubcommand]]
) -> EnvSubcommand:
    """The command that the arguments name, with its settings. Exits on --help, and with one line where there is no such
    command or flag; raises `Usage` or `InvalidInput` for wrong values.
    """
    page = inspect.cleandoc(env_cls.__doc__ or f"The environment {env_cls.name or env_cls.__name__}.")
    app = group(prog, page, {}, examples=EXAMPLES.format(prog=prog))
    commands: dict[str, type[EnvSubcommand]] = {
        "serve": env_cls.get_cli_serve_config_cls(),
        "process": env_cls.get_cli_process_config_cls(),
        "evaluate": env_cls.get_cli_evaluate_config_cls(),
        **more,
    }
    for at, (name, kind) in enumerate(commands.items()):
        usage = f"{prog} {name} [--config FILE] [--{ENV}.NAME VALUE]... [--{OPENAI}.NAME VALUE]..."
        options: dict[str, Any] = {"usage": usage, "help": kind.summary, "sort_key": at}
        # Flags are many: a command that is not asked for is a line of the list.
        app.command(_app(name, kind, **options) if name in args else group(name, "", {}, **options))
    found: EnvSubcommand | None = run(app, args)
    if found is None:  # the help was shown
        sys.exit(OK)
    return found


def _app(name: str, kind: type[EnvSubcommand], **options: Any) -> App:
    """The app that reads a command's flags and makes the command."""
    config, servers = kind.defaults()

    def make(values: dict[str, Any]) -> EnvSubcommand:
        asked = from_flags(kind.options_cls, values)
        env = given_values(values, ENV, type(config))
        if asked.port is not None:
            if "rollout_server_url" in env:
                raise Usage(f"--port is short for {URL_FLAG}: give one of them")
            env["rollout_server_url"] = f"http://localhost:{asked.port}"
        given = GivenSettings(
            file=read(asked.config) if asked.config is not None else {},
            source=str(asked.config),
            env=env,
            openai=given_values(values, OPENAI, type(changed_server(servers))),
            switches={name: values[f"--{name}"] for name in SWITCHES if f"--{name}" in values},
        )
        return kind(merge_settings(config, servers, given), asked)

    own = type(config).model_fields.keys() - BaseEnvConfig.model_fields.keys()
    flags = [
        *model_flags(kind.options_cls),
        *(_flag(f"--{name}", ServerManagerConfig.model_fields[name]) for name in SWITCHES),
        *config_flags(ENV, config, THIS_ENV, own),
        *config_flags(ENV, config, EVERY_ENV, BaseEnvConfig.model_fields.keys()),
        *config_flags(OPENAI, changed_server(servers), SERVER),
    ]
    return flags_app(name, inspect.getdoc(kind) or "", flags, make, **options)


# -- flags of a configuration ------------------------------------------------------------------------------------------


def config_flags(prefix: str, defaults: BaseModel, group: Group, names: Collection[str] | None = None) -> list[Flag]:
    """A flag for each of the model's fields, or of those named, with this environment's defaults in the help."""
    return [
        _flag(f"--{prefix}.{'.'.join(path)}", field, group, _default(defaults, path))
        for path, field in fields(type(defaults))
        if names is None or path[0] in names
    ]


def given_values(values: Mapping[str, Any], prefix: str, model: type[BaseModel]) -> dict[str, Any]:
    """The values of the given flags, nested as the model's fields are: text where the field takes text, and read as
    YAML where it takes a list or a mapping. Raises `InvalidInput` for invalid YAML.
    """
    named = ((path, f"--{prefix}.{'.'.join(path)}", field) for path, field in fields(model))
    return nested((path, _value(name, values[name], field.annotation)) for path, name, field in named if name in values)


def _flag(name: str, field: FieldInfo, group: Group = OPTIONS, default: str = "") -> Flag:
    kind, placeholder = _form(field.annotation)
    return Flag(name, field.description or "", kind, placeholder, default, group=group)


def _form(annotation: Any) -> tuple[Any, str]:
    """The kind of a field's flag, and the placeholder of its value in the help."""
    plain = [kind for kind in (_members(annotation) or (annotation,)) if kind is not type(None)]
    if annotation is bool or bool in plain:
        return bool | str, "[true|false]"
    for kind in [annotation, *plain]:
        if get_origin(kind) is Literal:
            return Literal[tuple(map(str, get_args(kind)))], ""
        if isinstance(kind, type) and issubclass(kind, Enum):
            return Literal[tuple(str(member.value) for member in kind)], ""
    if all(kind in NUMBERS for kind in plain):
        return str, "N"
    if Path in plain:
        return Path, "PATH"
    return str, "TEXT" if str in plain or Any in plain else "YAML"


def _value(name: str, given: str | bool, annotation: Any) -> Any:
    """The value of a flag, as far as the model that validates it cannot read it from the text."""
    parts = kinds(annotation)
    if given in NONE and type(None) in parts:
        return None
    if any(kind is str or kind is Any for kind in (annotation, *_members(annotation))):
        return given
    if any(_is_container(kind) or get_origin(kind) not in PLAIN_ORIGINS for kind in parts):
        try:
            return yaml.safe_load(given)
        except yaml.YAMLError:
            raise InvalidInput(f"{name} {given!r} is no list or mapping such as [1, 2] or {{a: 1}}") from None
    return given


def _members(annotation: Any) -> tuple[Any, ...]:
    """The types of a union; none for a list or a mapping, whose inner types do not matter here."""
    origin = get_origin(annotation)
    return get_args(annotation) if origin is not None and not _is_container(origin) else ()


def _is_container(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, list | dict | tuple | set | frozenset | BaseModel)


def _default(values: Any, path: tuple[str, ...]) -> str:
    """A default as it is typed on a command line, cut where it is long; empty where the help shows none."""
    for name in path:
        values = getattr(values, name, None)
    if values in (None, "") or path[-1].endswith(SECRET_SUFFIX):
        return ""
    if isinstance(values, bool):
        return str(values).lower()
    text = " ".join(str(values.value if isinstance(values, Enum) else values).split())
    return text if len(text) <= MAX_DEFAULT_CHARS else f"{text[: MAX_DEFAULT_CHARS - 3]}..."
