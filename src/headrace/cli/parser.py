"""How a command line becomes a command: pydantic-settings' models, and errors that say what would be right.

A command is a pydantic model with a `cli_cmd` method; its fields are its flags. Flags are kebab-case, and an underscore
is read as a dash. Nothing but the command line sets them: an environment variable that happens to be called `port`
does not. What may come from the environment is read where it is used, and its name is in the help.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from headrace.command_line import Formatter, Parser, Usage


class Commands(BaseSettings):
    """The root of a command line: a model whose fields are subcommands."""

    model_config = SettingsConfigDict(
        case_sensitive=True,
        cli_avoid_json=True,
        cli_enforce_required=True,
        cli_exit_on_error=False,
        cli_hide_none_type=True,
        cli_implicit_flags="toggle",
        cli_kebab_case=True,
        nested_model_default_partial_update=True,
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    def cli_cmd(self) -> None:
        CliApp.run_subcommand(self)


def run(root: type[Commands], args: Sequence[str], *, prog: str, version: str) -> None:
    """Carries out what `args` ask for. Bad usage is a `Usage`, or ends with the parser's own message and code 2."""
    parser = Parser(prog=prog, description=root.__doc__, formatter_class=Formatter, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=version, help="show the version and exit")
    source: CliSettingsSource[Parser] = CliSettingsSource(
        root, root_parser=parser, parse_args_method=_parse, formatter_class=Formatter
    )
    try:
        CliApp.run(root, list(args), source)
    except ValidationError as error:
        raise Usage(_explained(error, root)) from None
    except SettingsError as error:
        raise Usage(str(error)) from None


def _parse(parser: Parser, args: Sequence[str]) -> argparse.Namespace:
    """Parses; the values of a flag given several times are handed on as JSON, so that commas in them stay in them."""
    found = parser.parse_args(list(args))
    for name, value in vars(found).items():
        if isinstance(value, list):
            setattr(found, name, json.dumps(value))
    return found


def _explained(error: ValidationError, root: type[BaseModel]) -> str:
    """What is wrong, by the names that the command line has for it."""
    said = []
    for line in error.errors(include_url=False):
        message = line["msg"].removeprefix("Value error, ")
        given = f", not {line['input']!r}" if isinstance(line["input"], str | int | float) else ""
        name = _name(line["loc"], root)
        said.append(f"{name}: {message}{given}" if name != "--" else message)  # what no single flag is to blame for
    return "; ".join(said)


def _name(path: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """The flag or the argument at a path of fields, commands first."""
    names: list[str] = []
    for part in path:
        fields = model.model_fields
        name = next((name for name, field in fields.items() if part in (name, field.alias)), None)
        if name is None:
            break
        marks = [getattr(mark, "__name__", "") for mark in fields[name].metadata]
        if "_CliPositionalArg" in marks:
            return str(part).upper().replace("_", "-")
        if "_CliSubCommand" not in marks:
            names.append(str(part).replace("_", "-"))
        inner = [t for t in (fields[name].annotation, *get_args(fields[name].annotation)) if _is_model(t)]
        if not inner:
            break
        model = inner[0]
    return f"--{'.'.join(names)}"


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
