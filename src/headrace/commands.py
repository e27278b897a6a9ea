"""A command line of pydantic models, parsed by cyclopts.

A command is a model: its fields are the flags, their descriptions the help, their constraints what is checked. Flags
are kebab-case, and between their words an underscore is read as a dash; a field that is a model itself has dotted flags
(`--env.group-size`). Nothing but the command line sets a flag: what may come from the environment is read where it is
used, and its name is in the help. Values reach the model as the text that was typed, so what is wrong is said in one
way, by the model.

Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted. An error is one line on stderr; a traceback is a bug.

A command's module is imported when the command is asked for, or to write a script of completions for a shell.
"""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_origin

from cyclopts import App, Group, Parameter
from cyclopts.exceptions import (
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from pydantic import BaseModel, ConfigDict, SkipValidation, ValidationError
from pydantic.fields import FieldInfo
from rich.console import Console

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.data.visible import visible
from headrace.extras import extra_of, install_command, installed
from headrace.files import FieldPath, explained, kinds, nearest
from headrace.processes import INTERRUPTED

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import ConsoleOptions

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

OK, FAILED, BAD_USAGE = 0, 1, 2

_POSITIONAL = object()
#: A field that is given by its position: `target: Positional[str]` is shown as TARGET.
Positional = Annotated[T, _POSITIONAL]

#: The parts of a help page, by their headings, in their order.
ARGUMENTS, OPTIONS, SUBCOMMANDS = (
    Group(name, sort_key=at) for at, name in enumerate(("positional arguments", "options", "subcommands"))
)
#: Columns of a help page that names of flags may take beside what they mean; a longer name has a line of its own.
_NAMES_WIDTH = 24
_PLACEHOLDERS = {Path: "PATH", int: "N", float: "N"}


class Usage(Exception):
    """A command line that cannot be carried out: the command ends with `BAD_USAGE`, and this as its line."""


class CommandModel(BaseModel):
    """A command: what it is told are its fields, and its docstring is its help page. Its numbers are finite."""

    model_config = ConfigDict(allow_inf_nan=False)

    def execute(self) -> None:
        """Does what was asked for. Raises `Usage` where that cannot be, and `HeadraceError` where it failed."""
        raise NotImplementedError(f"{type(self).__name__} must define execute()")


@dataclass(frozen=True, slots=True)
class Flag:
    """A value of a command line: how it is given, and what the help says of it."""

    #: `--group-size`; for a value that is given by its position, a name in capitals.
    name: str
    summary: str = ""
    #: Decides how many words are taken, and what a shell completes: str, Path, a Literal, `list[str]` (a word each time
    #: that it is given), bool (no word) or `bool | str` (a word, or none, which is True).
    kind: Any = str
    placeholder: str = "TEXT"
    #: The default as the help shows it; empty where it shows none.
    default: str = ""
    #: The flag that switches this one off; empty where there is none.
    negative: str = ""
    required: bool = False
    group: Group = OPTIONS

    @property
    def is_positional(self) -> bool:
        return not self.name.startswith("-")


def command(name: str, model: type[CommandModel]) -> App:
    """The app that reads a command's flags, makes the command of them and executes it."""
    return flags_app(
        name, inspect.getdoc(model) or "", model_flags(model), lambda values: from_flags(model, values).execute()
    )


def flags_app(
    name: str, page: str, flags: Sequence[Flag], execute: Callable[[dict[str, Any]], object], **options: Any
) -> App:
    """The app that reads flags and executes a function with the values of those that were given, by their names.

    A value is the text that was typed, a list of them, or a bool. `page` is the text of the help; `options` are those
    of `cyclopts.App`.
    """
    names = {f"flag_{at}": flag.name for at, flag in enumerate(flags)}
    parameters = [_parameter(key, flag) for key, flag in zip(names, flags, strict=True)]
    signature = inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))

    def read(*args: Any, **given: Any) -> object:
        return execute({names[key]: value for key, value in signature.bind(*args, **given).arguments.items()})

    read.__signature__ = signature  # type: ignore[attr-defined]
    optional = [flag.name for flag in flags if flag.is_positional and not flag.required]
    app = _app(name, _HelpPage(page, optional), **options)
    app.default(read)
    return app


def group(name: str, page: str, commands: Mapping[str, tuple[str, str]], *, examples: str = "", **options: Any) -> App:
    """The app that has commands: by the name of each, where its app is (`module:name`) and what it does, in a line.
    `page` is the text of its help, and `examples` that after the list of commands; `options` are those of
    `cyclopts.App`.
    """
    app = _app(name, _HelpPage(page, examples=examples), **options)
    for at, (its_name, (where, summary)) in enumerate(commands.items()):
        app.command(where, name=its_name, help=summary, sort_key=at)
    return app


def _app(name: str, help_page: _HelpPage, **options: Any) -> App:
    app = App(
        name=name,
        help_formatter=help_page,
        help_format="plaintext",
        group_commands=SUBCOMMANDS,
        group_arguments=ARGUMENTS,
        group_parameters=OPTIONS,
        **{"version_flags": ()} | options,
    )
    for flags, words in ((app.help_flags, "show this help and exit"), (app.version_flags, "show the version and exit")):
        for flag in flags:
            app[flag].group, app[flag].help = OPTIONS, words
    return app


def run(app: App, args: Sequence[str]) -> Any:
    """Executes the command that `args` ask for, and returns its result; None where they ask for help. Raises `Usage`
    where its values are wrong; where the line itself is, says so in one line that begins with the command, and exits
    with `BAD_USAGE`.
    """
    _, apps, rest = app.parse_commands(list(args))
    if apps[-1].default_command is None and not rest:
        app.help_print(list(args), console=Console(stderr=True))
        sys.exit(BAD_USAGE)
    try:
        execute, bound, _ = app.parse_args(list(args), print_error=False, exit_on_error=False, verbose=False)
    except CycloptsError as error:
        prog = " ".join((app.name[0], *(error.command_chain or ())))
        print(f"{prog}: {_problem(error)} (see {prog} --help)", file=sys.stderr)
        sys.exit(BAD_USAGE)
    return execute(*bound.args, **bound.kwargs)


def exit_code(prog: str, command: Callable[[], object]) -> int:
    """Runs a command and returns its exit code. What went wrong is one line on stderr that begins with `prog`; an error
    that is no failure of the command (a bug) is raised.
    """
    try:
        command()
        sys.stdout.flush()
        return OK
    except (Usage, InvalidInput) as error:
        return _say(prog, error, BAD_USAGE)
    except HeadraceError as error:
        return _say(prog, error, FAILED)
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if extra is None or installed((error.name or "").partition(".")[0]):  # it is there, but not all of it
            raise
        return _say(prog, f"this needs {error.name}: {install_command(extra)}", FAILED)
    except BrokenPipeError:
        # The reader had enough (`| head`); Python would complain about the same pipe once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return _say(prog, f"{error.strerror or error}: {error.filename}" if error.filename else error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED


def _say(prog: str, error: object, code: int) -> int:
    print(f"{prog}:", visible(" ".join(str(error).split())), file=sys.stderr)
    return code


# -- flags -------------------------------------------------------------------------------------------------------------


def model_flags(model: type[BaseModel]) -> list[Flag]:
    """The flags of a model's fields."""
    return [_flag(path, field) for path, field in fields(model, by_alias=True)]


def from_flags(model: type[Model], values: Mapping[str, Any]) -> Model:
    """The model of the values of its flags, by their names; others are left out. Raises `Usage` for wrong values, and
    for a path that is empty, as where a script's variable is not set: it would mean the current folder."""
    names: dict[tuple[str, ...], str] = {}
    for path, field in fields(model, by_alias=True):
        names[path] = name = _name(path, field)
        if values.get(name) == "" and Path in kinds(field.annotation):
            raise Usage(f"{name} is empty; name a path{'' if field.is_required() else ', or leave it out'}")
    given = nested((path, values[name]) for path, name in names.items() if name in values)
    try:
        return model.model_validate(given)
    except ValidationError as error:

        def named(path: FieldPath) -> str:  # empty where no single flag is to blame
            return next((name for known, name in names.items() if path[: len(known)] == known), "")

        raise Usage("; ".join(explained(error, model, named))) from None


def fields(
    model: type[BaseModel], above: tuple[str, ...] = (), *, by_alias: bool = False
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every field with its path; for a field that is a model itself, its fields."""
    for name, field in model.model_fields.items():
        path = (*above, field.alias or name) if by_alias else (*above, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, path, by_alias=by_alias)
        else:
            yield path, field


def nested(values: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """Values with their paths, as mappings in mappings."""
    found: dict[str, Any] = {}
    for (*above, last), value in values:
        inner = found
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return found


def _name(path: tuple[str, ...], field: FieldInfo) -> str:
    name = ".".join(path).replace("_", "-")
    return name.upper() if _POSITIONAL in field.metadata else f"--{name}"


def _flag(path: tuple[str, ...], field: FieldInfo) -> Flag:
    name, types = _name(path, field), kinds(field.annotation)
    literal = next((kind for kind in types if get_origin(kind) is Literal), None)
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    kind: Any = str
    if bool in types:
        kind = bool
    elif any(get_origin(kind) is list for kind in types):
        kind = list[str]
    elif literal is not None:
        kind = literal
    elif Path in types:
        kind = Path
    return Flag(
        name,
        field.description or "",
        kind,
        placeholder=next((_PLACEHOLDERS[kind] for kind in types if kind in _PLACEHOLDERS), "TEXT"),
        default=str(default) if default not in (None, "", []) and default is not False else "",
        negative=name.replace("--", "--no-", 1) if bool in types and default is not False else "",
        required=field.is_required(),
    )


def _parameter(key: str, flag: Flag) -> inspect.Parameter:
    """How cyclopts reads a flag: as the words that were typed."""
    settings = Parameter(
        name=flag.name,
        help=flag.summary,
        converter=None if flag.kind in (str, bool, list[str]) else _typed,
        metavar=flag.placeholder,
        negative=flag.negative or (),
        show_default=flag.default or False,
        allow_repeating=True,
        group=ARGUMENTS if flag.is_positional else flag.group,
    )
    return inspect.Parameter(
        key,
        inspect.Parameter.POSITIONAL_ONLY if flag.is_positional else inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[flag.kind, settings, SkipValidation()],  # type: ignore[type-arg]  # a model validates
        default=inspect.Parameter.empty if flag.required else None,
    )


def _typed(hint: Any, tokens: Sequence[Any]) -> str:
    """A converter that leaves a value as it was typed."""
    return str(tokens[-1].value)


# -- messages ----------------------------------------------------------------------------------------------------------


def _problem(error: CycloptsError) -> str:
    """What is wrong with a command line, and the nearest right name."""
    assert error.app is not None
    unused = error.unused_tokens or []
    match error:
        case UnknownOptionError():
            return _unknown_flag(error.token.keyword or error.token.value, error.app)
        case MissingArgumentError(argument=argument, keyword=None) if argument is not None:
            unknown = next((token for token in unused if token.startswith("-")), None)
            if unknown is not None:
                return _unknown_flag(unknown, error.app)
            return f"the following arguments are required: {argument.name}"
        case MissingArgumentError():
            return f"argument {error.keyword}: expected one argument"
        case UnknownCommandError() if unused[0].startswith("-"):
            return _unknown_flag(unused[0], error.app)
        case UnknownCommandError():
            names = [name for name in error.app if not name.startswith("-")]
            return f"no command {unused[0]!r}{nearest(unused[0], names) or ': ' + ', '.join(names)}"
        case UnusedCliTokensError():
            return f"unexpected argument {unused[0]!r}"
    return " ".join(str(error).split())


def _unknown_flag(token: str, app: App) -> str:
    name = token.partition("=")[0]
    known = [known for known in app if known.startswith("-")]
    if app.default_command is not None:
        known += [known for argument in app.assemble_argument_collection() for known in argument.names]
    return f"unknown flag {name}{nearest(name, known)}"


class _HelpPage:
    """Writes a help page in plain words: usage, what the command does, and a line for each command or flag."""

    def __init__(self, page: str, optional: Sequence[str] = (), examples: str = "") -> None:
        """`page` is what the command does, `optional` are the positional arguments that may be left out, and `examples`
        is what follows the list of commands."""
        self._page = page
        self._examples = examples
        self._optional = " ".join(f"[{name}]" for name in optional)

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        _write(console, f"usage: {str(usage).strip().replace('[ARGS]', self._optional)}\n")

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        _write(console, self._page)

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if not panel.entries:
            return
        _write(console, f"\n{panel.title}:")
        for entry in panel.entries:
            placeholder = f"{{{','.join(entry.choices)}}}" if entry.choices else entry.metavar
            flags = entry.positional_label or ", ".join([*entry.positive_names, *entry.positive_shorts])
            name = f"  {flags}{f' {placeholder}' if placeholder and not entry.positional_label else ''}"
            name += "".join(f", {negative}" for negative in entry.negative_names)
            words = str(entry.description.primary_renderable)
            words += f" (default: {entry.default})" if entry.default else ""
            width = max(options.max_width - _NAMES_WIDTH, _NAMES_WIDTH)
            lines = textwrap.wrap(words, width, break_on_hyphens=False)
            if lines and len(name) <= _NAMES_WIDTH - 2:
                _write(console, f"{name:<{_NAMES_WIDTH}}{lines.pop(0)}")
            else:
                _write(console, name)
            for line in lines:
                _write(console, " " * _NAMES_WIDTH + line)
        if self._examples and panel.title == SUBCOMMANDS.name:
            _write(console, f"\n{self._examples}")


def _write(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
