"""What every command line of Headrace has: exit codes, errors of one line, help in words, and the nearest right name.

Exit codes: 0 done, 1 failed, 2 bad usage. An error is one line on stderr; a traceback is a bug.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.extras import extra_of, install_command, installed
from headrace.files import nearest

OK, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130


class Usage(Exception):
    """A command line that cannot be carried out: the command ends with `BAD_USAGE`, and this as its line."""


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
    print(f"{prog}:", " ".join(str(error).split()), file=sys.stderr)
    return code


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help in words: no Python types, and no defaults that say nothing."""

    METAVARS: ClassVar = {"Path": "PATH", "str": "TEXT", "int": "N", "float": "N", "list[str]": "TEXT"}
    SILENT: ClassVar = (" (default: None)", " (default: False)", " (default: [])")

    def _get_help_string(self, action: argparse.Action) -> str | None:
        found = action.help
        for words in self.SILENT:
            found = found.removesuffix(words) if found else found
        return found

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        if isinstance(action.metavar, str):
            action.metavar = self.METAVARS.get(action.metavar, action.metavar)
        return super()._metavar_formatter(action, default_metavar)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return super()._fill_text(inspect.cleandoc(text), width, indent)


class Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest right flag or command for a wrong one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = self._checked(list(sys.argv[1:] if args is None else args))
        found, extra = super().parse_known_args(given, namespace)
        if extra:
            self.error(f"unexpected argument {extra[0]!r}")
        return found, extra

    def _checked(self, args: list[str]) -> list[str]:
        """The arguments with each flag as it is spelled here; a flag or a command that is not known is an error."""
        commands = self._commands()
        checked: list[str] = []
        takes_value = False
        for at, arg in enumerate(args):
            if arg == "--":
                return [*checked, *args[at:]]
            if arg.startswith("-") and len(arg) > 1 and not arg[1:2].isdigit() and arg[1:2] != ".":
                name, eq, value = arg.partition("=")
                name = self._flag(name)
                takes_value = not eq and self._option_string_actions[name].nargs != 0
                checked.append(name + eq + value)
            elif takes_value:
                takes_value = False
                checked.append(arg)
            elif commands:
                if arg not in commands:
                    self.error(f"no command {arg!r}{nearest(arg, commands) or ': ' + ', '.join(commands)}")
                return [*checked, *args[at:]]
            else:
                checked.append(arg)
        if commands and not {"-h", "--help", "--version"} & set(checked):
            self.print_help(sys.stderr)
            self.exit(BAD_USAGE)
        return checked

    def _flag(self, name: str) -> str:
        """A known flag; between its words, dashes and underscores are the same."""
        known = self._option_string_actions
        if name in known:
            return name
        dashed = {flag.replace("_", "-"): flag for flag in known if flag.startswith("--")}
        if name.replace("_", "-") in dashed:
            return dashed[name.replace("_", "-")]
        self.error(f"unknown flag {name}{nearest(name, known)}")

    def _commands(self) -> list[str]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return list(action.choices)
        return []

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")
