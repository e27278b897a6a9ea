"""A command line of pydantic models, parsed by cyclopts.

A command is a model: its fields are the flags, their descriptions the help, their constraints what is checked. Flags
are kebab-case, and an underscore is read as a dash; a field that is a model itself has dotted flags
(`--env.group-size`). Nothing but the command line sets a flag: what may come from the environment is read where it is
used, and its name is in the help. Values reach the model as the text that was typed, so what is wrong is said in one
way, by the model.

A command's module is imported when the command is asked for, or to write a script of completions for a shell.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
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
from pydantic import BaseModel, SkipValidation, ValidationError
from pydantic.fields import FieldInfo
from rich.console import Console

from headrace.command_line import BAD_USAGE, Usage
from headrace.files import FieldPath, explained, kinds, nearest

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import ConsoleOptions

T = TypeVar("T")

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


class CommandModel(BaseModel):
    """A command: what it is told are its fields, and its docstring is its help page."""

    def execute(self) -> None:
        """Does what was asked for. Raises `Usage` where that cannot be, and `HeadraceError` where it failed."""
        raise NotImplementedError(f"{type(self).__name__} must define execute()")


def command(name: str, model: type[CommandModel]) -> App:
    """The app that reads a command's flags, makes the command of them and executes it."""
    fields = {"__".join(path): (path, field) for path, field in _fields(model)}
    parameters = [_parameter(key, path, field) for key, (path, field) in fields.items()]
    signature = inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))
    labels = {path: _label(path, field) for path, field in fields.values()}

    def execute(*args: Any, **flags: Any) -> None:
        values: dict[str, Any] = {}
        for key, value in signature.bind(*args, **flags).arguments.items():
            *above, last = fields[key][0]
            inner = values
            for part in above:
                inner = inner.setdefault(part, {})
            inner[last] = value
        try:
            made = model.model_validate(values)
        except ValidationError as error:
            raise Usage("; ".join(explained(error, model, lambda path: _named(path, labels)))) from None
        made.execute()

    execute.__signature__ = signature  # type: ignore[attr-defined]
    optional = [labels[path] for path, field in fields.values() if _is_positional(field) and not field.is_required()]
    app = _app(name, _HelpPage(inspect.getdoc(model) or "", optional))
    app.default(execute)
    return app


def group(name: str, page: str, commands: Mapping[str, tuple[str, str]], **options: Any) -> App:
    """The app that has commands: by the name of each, where its app is (`module:name`) and what it does, in a line.
    `page` is the text of its help; `options` are those of `cyclopts.App`.
    """
    app = _app(name, _HelpPage(page), **options)
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


def run(app: App, args: Sequence[str]) -> None:
    """Executes the command that `args` ask for. Raises `Usage` where its values are wrong; where the line itself is,
    says so in one line that begins with the command, and exits with `BAD_USAGE`.
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
    execute(*bound.args, **bound.kwargs)


# -- flags -------------------------------------------------------------------------------------------------------------


def _fields(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every field by its path; a field that is a model itself by its fields."""
    for name, field in model.model_fields.items():
        path = (*above, field.alias or name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, path)
        else:
            yield path, field


def _is_positional(field: FieldInfo) -> bool:
    return _POSITIONAL in field.metadata


def _label(path: tuple[str, ...], field: FieldInfo) -> str:
    """What a field is called on the command line."""
    name = ".".join(path).replace("_", "-")
    return name.upper() if _is_positional(field) else f"--{name}"


def _named(path: FieldPath, labels: Mapping[tuple[str, ...], str]) -> str:
    """What the command line has at a path of fields; empty where no single flag is to blame."""
    return next((label for known, label in labels.items() if path[: len(known)] == known), "")


def _parameter(key: str, path: tuple[str, ...], field: FieldInfo) -> inspect.Parameter:
    """How cyclopts reads a field. It is told the type only as far as that decides how many words a flag takes, what the
    help says and what a shell can complete.
    """
    types = kinds(field.annotation)
    literal = next((kind for kind in types if get_origin(kind) is Literal), None)
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    toggles = bool in types and default is not False
    hint: Any = str
    if bool in types:
        hint = bool
    elif any(get_origin(kind) is list for kind in types):
        hint = list[str]
    elif literal is not None:
        hint = literal
    elif Path in types:
        hint = Path
    settings = Parameter(
        name=_label(path, field),
        help=field.description,
        converter=_typed if hint in (Path, literal) else None,
        metavar=next((_PLACEHOLDERS[kind] for kind in types if kind in _PLACEHOLDERS), "TEXT"),
        negative=_label(path, field).replace("--", "--no-", 1) if toggles else (),
        show_default=str(default) if default not in (None, "", []) and default is not False else False,
        allow_repeating=True,
    )
    return inspect.Parameter(
        key,
        inspect.Parameter.POSITIONAL_ONLY if _is_positional(field) else inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[hint, settings, SkipValidation()],  # type: ignore[type-arg]  # the model validates
        default=inspect.Parameter.empty if field.is_required() else None,
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

    def __init__(self, page: str, optional: Sequence[str] = ()) -> None:
        """`page` is what the command does, and `optional` the positional arguments that may be left out."""
        self._page = page
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


def _write(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
