"""`headrace doctor`: see `headrace.doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from pydantic import BaseModel, Field
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.api import ApiCommand
from headrace.cli.common import print_json
from headrace.cli.engine import EngineCommand
from headrace.cli.gateway import GatewayCommand
from headrace.cli.pool.run import Serve
from headrace.command_line import FAILED

if TYPE_CHECKING:
    from headrace.doctor import Report

#: What listens where, unless it is told otherwise.
LISTENING: dict[str, type[BaseModel]] = {
    "api": ApiCommand,
    "engine": EngineCommand,
    "gateway and serve": GatewayCommand,
    "pool serve": Serve,
}
#: The commands that need nothing but Headrace itself; the others are in `headrace.extras.NEEDS`.
PLAIN = ("api", "pool", "check-gateway", "bench envs", "bench api", "doctor")


class Doctor(BaseModel):
    """Look at this machine: Python, which commands work and what the others lack, versions beside those that are
    tested, ports, GPU, memory and disk. Exit code 1 where something is broken that every command needs, else 0.
    """

    as_json: bool = Field(False, alias="json", description="print the findings as one JSON object")

    def cli_cmd(self) -> None:
        from headrace.doctor import examine

        ports = {command.model_fields["port"].default: name for name, command in LISTENING.items()}
        report = examine(ports, PLAIN)
        if self.as_json:
            print_json(msgspec.to_builtins(report))
        else:
            show(report)
        if report.broken:
            raise SystemExit(FAILED)


def show(report: Report) -> None:
    """The findings for people: what the machine is, what works, and at the end what is worth a look."""
    console = Console(soft_wrap=True)
    console.print(_grid(_facts(report)))
    _print_commands(report, console)
    _print_libraries(report, console)
    for line in report.warnings:
        console.print(Text(f"note: {line}", "yellow"))
    for line in report.broken:
        console.print(Text(f"broken: {line}", "red"))
    working = sum(not command.missing for command in report.commands)
    console.print(f"{working} of {len(report.commands)} commands have all that they need")


def _facts(report: Report) -> list[tuple[str, str]]:
    gpus = [
        f"{gpu.name}, {f'{gpu.memory_gb:.0f} GB' if gpu.memory_gb else 'shared memory'}, driver {gpu.driver}"
        for gpu in report.gpus
    ]
    memory = f", {report.memory_gb:.1f} GB of memory" if report.memory_gb is not None else ""
    torch = next((library.installed for library in report.libraries if library.name == "torch"), None)
    found = [
        ("headrace", f"{report.headrace} in {report.location}"),
        ("python", f"{report.python}, {report.executable}"),
        ("platform", report.platform),
        ("machine", f"{report.cores} cores{memory}"),
        ("gpu", "; ".join(gpus) or "none"),
        ("torch", torch or "not installed"),
        ("disk", ", ".join(f"{disk.free_gb:.1f} GB free in {disk.folder}" for disk in report.disks)),
        ("ports", ", ".join(f"{port.port} ({port.used_by}) {_state(port.free)}" for port in report.ports)),
    ]
    if report.ray_token is not None:
        found.append(("ray token", report.ray_token))
    return found


def _state(free: bool) -> str:
    return "free" if free else "taken"


def _grid(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _print_commands(report: Report, console: Console) -> None:
    table = _table("command", "works", "missing")
    for command in report.commands:
        works = Text("no", "red") if command.missing else Text("yes", "green")
        table.add_row(Text(f"headrace {command.name}"), works, Text(", ".join(command.missing)))
    console.print(table)
    for install in dict.fromkeys(command.install for command in report.commands if command.install):
        names = ", ".join(command.name for command in report.commands if command.install == install)
        console.print(Text(f"for {names}: {install}"))


def _print_libraries(report: Report, console: Console) -> None:
    table = _table("library", "installed", "tested")
    for library in report.libraries:
        table.add_row(*(Text(text) for text in (library.name, library.installed or "-", library.tested or "-")))
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
