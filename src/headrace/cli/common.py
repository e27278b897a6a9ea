"""What the commands share: opening the pool that a TARGET names, starting servers, and output for terminals, pipes and
programs."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import Field
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.commands import CommandModel, Positional, Usage
from headrace.data.errors import HeadraceError
from headrace.data.json import to_json
from headrace.data.keys import configured_key
from headrace.data.visible import INVISIBLE, visible
from headrace.files import Key
from headrace.pool import KEY_VARIABLE

if TYPE_CHECKING:
    from headrace.pool.embedded import DataPool
    from headrace.pool.remote import RemotePool

#: Seconds for which a command tries to reach a pool: someone waits for it, while a producer goes on with its work.
RETRY_S = 3.0

#: What a table shows where there is no value.
EMPTY_CELL = "-"
#: The schemes of a TARGET that names a pool that runs.
POOL_SCHEMES = ("http", "https", "ray-actor")


class TargetCommand(CommandModel):
    """A command about one pool: a journal's folder, or a pool that runs."""

    target: Positional[str] = Field(
        description="a journal's folder, http://HOST:PORT or ray-actor://NAME?namespace=NAMESPACE"
    )
    key: Key = Field(None, description=f"the pool's key over HTTP (or set {KEY_VARIABLE})")


class FolderCommand(CommandModel):
    """A command about a journal that no pool has open."""

    target: Positional[str] = Field(description="a journal's folder")

    @property
    def folder(self) -> Path:
        """The journal's folder. Raises `Usage` where TARGET names a pool that runs."""
        found = folder_of(self.target)
        if found is None:
            raise Usage(
                f"TARGET is {self.target!r}; this command works on a journal's folder, while no pool has it open"
            )
        return found


def pool_key(given: str | None) -> str | None:
    """The key of `--key`, or of the environment; None where neither has one."""
    return configured_key(given, KEY_VARIABLE)


def folder_of(target: str) -> Path | None:
    """The folder that a TARGET names; None where it names a pool that runs. Raises `Usage` for any other scheme,
    and for an empty TARGET, which would be the current folder."""
    scheme, separator, _ = target.partition("://")
    if target and not separator:
        return Path(target)
    if scheme not in POOL_SCHEMES:
        raise Usage(
            f"TARGET is {target!r}; it is a journal's folder, http://HOST:PORT or ray-actor://NAME?namespace=NAMESPACE"
        )
    return None


@contextmanager
def opened_to_read(on: TargetCommand) -> Iterator[DataPool | RemotePool]:
    """The pool at a TARGET. A journal's folder is opened read-only."""
    folder = folder_of(on.target)
    if folder is None:
        with connected(on) as pool:
            yield pool
        return
    from headrace.pool.readonly import JournalView

    with JournalView(folder) as view:
        yield view


@contextmanager
def connected(on: TargetCommand) -> Iterator[RemotePool]:
    """A client of the pool that runs at a TARGET, over HTTP or Ray."""
    from headrace.pool.connect import connect

    with connect(on.target, key=pool_key(on.key), retry_s=RETRY_S) as pool:
        yield pool


# -- servers -----------------------------------------------------------------------------------------------------------


def warn_unprotected(host: str, powers: str, remedy: str) -> None:
    """Warns where a server listens beyond loopback: what a caller can do there without a key, and what to set."""
    from headrace.net.server import loopback  # with uvicorn, which commands that only read do without

    if not loopback(host):
        remark(
            f"warning: {host} can be reached from other machines, and whoever reaches it can {powers} without a key. "
            f"Set {remedy}"
        )


@contextmanager
def listening_on(host: str, port: int) -> Iterator[None]:
    """Has an `OSError` of the block say which address cannot be listened on."""
    try:
        yield
    except OSError as error:
        raise HeadraceError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


class StopHandler:
    """SIGTERM and Ctrl-C: cancel the task that made this, until there is something to call instead. They wait for its
    next await, so what awaits nothing for long goes before."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._stop: Callable[[], object] = task.cancel
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: self._stop())

    def calls(self, stop: Callable[[], object]) -> None:
        """Has them call this from now on."""
        self._stop = stop


# -- output ------------------------------------------------------------------------------------------------------------


def on_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def print_json(value: Any) -> None:
    """Prints one JSON document: indented on a terminal, else on one line. On a terminal what it would obey is escaped,
    beyond what JSON demands."""
    text = to_json(value, orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if on_terminal() else 0)).decode()
    print(INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) if on_terminal() else text)


def print_rows(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, titles: Sequence[str] | None = None
) -> None:
    """Prints a table on a terminal, without empty columns; elsewhere a header and rows separated by tabs. `titles`
    stand above the columns on a terminal; without them their names, with spaces in place of underscores."""
    if on_terminal():
        above = dict(zip(columns, titles or [name.replace("_", " ") for name in columns], strict=True))
        shown = [name for name in columns if any(cell(row.get(name)) != EMPTY_CELL for row in rows)] or columns
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for name in shown:
            numeric = all(isinstance(row.get(name), int | float | None) for row in rows)
            table.add_column(Text(cell(above[name])), justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell(row.get(name))) for name in shown))
        Console().print(table)
        return
    print("\t".join(map(cell, columns)))
    for row in rows:
        print("\t".join(cell(row.get(name)) for name in columns))


def announce(name: str, address: str) -> None:
    """Prints the one line that programs wait for on stdout, and beside it, on stderr, where people look."""
    print(f"{name} ready on {address}", flush=True)
    remark(f"the dashboard is {address}/dashboard")


def remark(*parts: Any) -> None:
    """Prints on stderr, so that stdout holds only what was asked for."""
    print(*parts, file=sys.stderr)


def cell(value: Any) -> str:
    """A value as a table's cell: one line, in which what a terminal would obey is visible."""
    if value is None:
        return EMPTY_CELL
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return " ".join(f"{cell(name)}={cell(item)}" for name, item in value.items()) or EMPTY_CELL
    if isinstance(value, list | tuple):
        return ",".join(map(cell, value)) or EMPTY_CELL
    return visible(str(value))


def megabytes(size: float) -> str:
    """A size in bytes as text: in MB, or in kB where that would be below 0.1."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
