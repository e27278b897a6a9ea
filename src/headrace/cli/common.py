"""What the commands share: opening the pool that a TARGET names, starting servers, and output for terminals, pipes and
programs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
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
    key: str | None = Field(None, description=f"the pool's key over HTTP (or set {KEY_VARIABLE})")


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
    return given or os.environ.get(KEY_VARIABLE) or None


def folder_of(target: str) -> Path | None:
    """The folder that a TARGET names; None where it names a pool that runs. Raises `Usage` for any other scheme."""
    scheme, separator, _ = target.partition("://")
    if not separator:
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


def log_to_stderr() -> None:
    """Sets the log of a command that serves: from INFO on, on stderr."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


def warn_unprotected(host: str, powers: str, remedy: str) -> None:
    """Warns where a server without a key listens beyond loopback: what a caller can do there, and what to set."""
    from headrace.net.server import loopback  # with uvicorn, which commands that only read do without

    if not loopback(host):
        remark(
            f"warning: {host} can be reached from other machines and there is no key: whoever reaches it can {powers}. "
            f"Set {remedy}"
        )


@contextmanager
def listening_on(host: str, port: int) -> Iterator[None]:
    """Has an `OSError` of the block say which address cannot be listened on."""
    try:
        yield
    except OSError as error:
        raise HeadraceError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


# -- output ------------------------------------------------------------------------------------------------------------


def on_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def print_json(value: Any) -> None:
    """Prints one JSON document: indented on a terminal, else on one line."""
    print(to_json(value, orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if on_terminal() else 0)).decode())


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Prints a table on a terminal, without empty columns; elsewhere a header and rows separated by tabs."""
    if on_terminal():
        shown = [name for name in columns if any(cell(row.get(name)) != EMPTY_CELL for row in rows)] or columns
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for name in shown:
            numeric = all(isinstance(row.get(name), int | float | None) for row in rows)
            table.add_column(Text(name.replace("_", " ")), justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell(row.get(name))) for name in shown))
        Console().print(table)
        return
    print("\t".join(columns))
    for row in rows:
        print("\t".join(cell(row.get(name)).replace("\t", " ").replace("\n", " ") for name in columns))


def announce(name: str, address: str) -> None:
    """Prints the one line that programs wait for on stdout, and beside it, on stderr, where people look."""
    print(f"{name} ready on {address}", flush=True)
    remark(f"the dashboard is {address}/dashboard")


def remark(*parts: Any) -> None:
    """Prints on stderr, so that stdout holds only what was asked for."""
    print(*parts, file=sys.stderr)


def cell(value: Any) -> str:
    """A value as a table's cell."""
    if value is None:
        return EMPTY_CELL
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={cell(item)}" for name, item in value.items()) or EMPTY_CELL
    if isinstance(value, list | tuple):
        return ",".join(map(cell, value)) or EMPTY_CELL
    return str(value)


def megabytes(size: float) -> str:
    """A size in bytes as text: in MB, or in kB where that would be below 0.1."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
