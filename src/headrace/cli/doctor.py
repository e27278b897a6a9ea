"""`headrace doctor`: what this machine has for Headrace, and how that is shown.

Looked at are Python, libraries beside the versions that are tested, ports, GPU, memory and disk. Nothing heavy is
imported and nothing is started: a library's version is read from its metadata, a port is tried by binding to it for a
moment, and the GPU is asked through `nvidia-smi`.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import msgspec
from pydantic import Field
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.api import ApiCommand
from headrace.cli.common import print_json
from headrace.cli.dashboard import DashboardCommand
from headrace.cli.engine import EngineCommand
from headrace.cli.gateway import GatewayCommand
from headrace.cli.pool.run import PoolServeCommand
from headrace.commands import FAILED, CommandModel, command
from headrace.extras import NEEDS, clone, install_command, installed, missing
from headrace.files import cache_folder
from headrace.version import __version__

#: The Pythons that Headrace is tried with.
PYTHONS = ((3, 11), (3, 13))
#: Libraries whose versions matter when something is odd.
LIBRARIES = (
    *("aiohttp", "fastapi", "msgspec", "numpy", "pydantic", "starlette", "uvicorn"),
    *("torch", "transformers", "tokenizers", "safetensors", "renderers", "ray", "pyarrow", "math-verify"),
)
#: Seconds that the GPU's driver may take to answer: one that hangs counts as none.
GPU_ANSWER_S = 10.0
#: Free GB below which a demo's journal and checkpoints, or an installation, may not fit.
LEAST_DISK_GB = 5.0
#: The commands that listen on a port by default, by how the report names them.
LISTENING: dict[str, type[CommandModel]] = {
    "api": ApiCommand,
    "engine": EngineCommand,
    "gateway, serve and replay": GatewayCommand,
    "pool serve": PoolServeCommand,
    "dashboard": DashboardCommand,
}
#: The commands that need nothing but Headrace itself; the others are in `headrace.extras.NEEDS`.
CORE_COMMANDS = (
    *("api", "dashboard", "why", "pool", "check-gateway", "rollout", "simulate", "bench envs", "bench api"),
    "doctor",
)


class DoctorCommand(CommandModel):
    """Look at this machine: Python, which commands work and what the others lack, versions beside those that are
    tested, ports, GPU, memory and disk. Exit code 1 where something is broken that every command needs, else 0.
    """

    as_json: bool = Field(False, alias="json", description="print the findings as one JSON object")

    def execute(self) -> None:
        ports = {model.model_fields["port"].default: name for name, model in LISTENING.items()}
        report = examine(ports, CORE_COMMANDS)
        if self.as_json:
            print_json(msgspec.to_builtins(report))
        else:
            show(report)
        if report.broken:
            raise SystemExit(FAILED)


class LibraryVersion(msgspec.Struct, frozen=True):
    """A library, and its version where it is installed."""

    name: str
    installed: str | None
    #: The version in constraints.txt.
    tested: str | None


class CommandNeeds(msgspec.Struct, frozen=True):
    """A command of `headrace`; it works where nothing is missing."""

    name: str
    missing: tuple[str, ...]
    #: The shell command that installs what is missing.
    install: str | None


class DefaultPort(msgspec.Struct, frozen=True):
    """A port that a command listens on unless it is told another."""

    port: int
    used_by: str
    free: bool


class Gpu(msgspec.Struct, frozen=True):
    """An NVIDIA GPU."""

    name: str
    #: None where it shares the machine's memory.
    memory_gb: float | None
    driver: str


class Disk(msgspec.Struct, frozen=True):
    """A folder that Headrace writes to, and what is free on its disk."""

    folder: str
    free_gb: float


class DoctorReport(msgspec.Struct, frozen=True):
    """What was found: what `--json` prints."""

    headrace: str
    location: str
    python: str
    executable: str
    platform: str
    cores: int
    memory_gb: float | None
    gpus: list[Gpu]
    disks: list[Disk]
    ports: list[DefaultPort]
    #: Whether Ray would present a token to a cluster; None without Ray.
    ray_token: str | None
    libraries: list[LibraryVersion]
    commands: list[CommandNeeds]
    #: What every command needs and is not there: with any of these nothing can be relied on.
    broken: list[str]
    #: What is worth a look, and breaks nothing by itself.
    warnings: list[str]


def examine(ports: Mapping[int, str], commands: Iterable[str]) -> DoctorReport:
    """Looks at this machine. `ports` has what listens on each by default; `commands` are the names of all commands."""
    tested = tested_versions()
    libraries = [LibraryVersion(name, version_of(name), tested.get(name)) for name in LIBRARIES]
    gpus = find_gpus()
    disks = [Disk(str(folder), shutil.disk_usage(folder).free / 1e9) for folder in _folders()]
    looked = [DefaultPort(port, by, is_free(port)) for port, by in sorted(ports.items())]
    return DoctorReport(
        headrace=__version__,
        location=str(clone() or Path(__file__).parents[1]),
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.platform(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gb=_memory_gb(),
        gpus=gpus,
        disks=disks,
        ports=looked,
        ray_token=ray_token(os.environ, Path.home()) if installed("ray") else None,
        libraries=libraries,
        commands=[_command(name) for name in dict.fromkeys([*commands, *NEEDS])],
        broken=_broken(),
        warnings=_warnings(libraries, gpus, disks, looked),
    )


def _command(name: str) -> CommandNeeds:
    """What one command lacks here."""
    needs = NEEDS.get(name, ())
    lacking = missing(needs)
    extras = [extra for extra in needs if missing([extra])]
    return CommandNeeds(name, lacking, install_command(*extras) if lacking else None)


def _broken() -> list[str]:
    """A sentence for each requirement of the core that is not installed."""
    try:
        core = [line for line in requires("headrace") or [] if "extra ==" not in line]
    except PackageNotFoundError:
        return []  # run from its sources: what is missing shows where it is imported
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in core]
    return [f"{name} is not installed, and every command needs it" for name in names if version_of(name) is None]


def _warnings(
    libraries: list[LibraryVersion], gpus: list[Gpu], disks: list[Disk], ports: list[DefaultPort]
) -> list[str]:
    found = []
    oldest, newest = PYTHONS
    if not oldest <= sys.version_info[:2] <= newest:
        tried = " to ".join(".".join(map(str, which)) for which in PYTHONS)
        found.append(f"Python {platform.python_version()} is not among those that are tried: {tried}")
    torch = next((library.installed for library in libraries if library.name == "torch"), None)
    if torch is not None and gpus and torch.endswith("+cpu"):
        found.append(f"there is a GPU, and torch {torch} cannot use it: make clean, then make setup TORCH=cuda")
    found += [
        f"port {port.port} is taken: headrace {port.used_by} needs another there (--port)"
        for port in ports
        if not port.free
    ]
    found += [
        f"{disk.folder} has {disk.free_gb:.1f} GB free; runs and set-ups may need {LEAST_DISK_GB:.0f}"
        for disk in disks
        if disk.free_gb < LEAST_DISK_GB
    ]
    return found


# -- versions ----------------------------------------------------------------------------------------------------------


def version_of(name: str) -> str | None:
    """The installed version of a library; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def tested_versions() -> dict[str, str]:
    """The versions that Headrace is tested with, by the name of each library: the pins of its constraints.txt."""
    text = (Path(__file__).parents[1] / "constraints.txt").read_text()
    pins = re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    return {re.sub(r"[._]", "-", name).lower(): pin for name, pin in pins}


# -- the machine -------------------------------------------------------------------------------------------------------


def is_free(port: int) -> bool:
    """Whether a server could listen on a port, of all addresses, at this moment."""
    with socket.socket() as tried:
        # As servers do: a connection that has only just ended does not make a port taken.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        return True


def find_gpus() -> list[Gpu]:
    """The GPUs that `nvidia-smi` lists; none where it is not there or does not answer."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=GPU_ANSWER_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.rsplit(",", 2)] for line in said.splitlines()]
    return [Gpu(name, float(mib) * 2**20 / 1e9 if mib.isdigit() else None, driver) for name, mib, driver in rows]


def ray_token(variables: Mapping[str, str], home: Path) -> str:
    """Where Ray would find the token of a cluster that asks for one, in the order in which Ray looks."""
    if variables.get("RAY_AUTH_MODE") == "disabled":
        return "off (RAY_AUTH_MODE=disabled)"
    if variables.get("RAY_AUTH_TOKEN"):
        return "in RAY_AUTH_TOKEN"
    named = variables.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else home / ".ray" / "auth_token"
    return f"in {path}" if path.is_file() else f"none ({path} is not there)"


def _folders() -> list[Path]:
    """The folders whose disks are looked at: the current one and, where it is on another disk, that of caches."""
    here, cache = Path.cwd(), cache_folder()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return [here] if existing.stat().st_dev == here.stat().st_dev else [here, existing]


def _memory_gb() -> float | None:
    """The machine's memory; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    except (ValueError, OSError):
        return None


# -- for people --------------------------------------------------------------------------------------------------------


def show(report: DoctorReport) -> None:
    """Prints the findings for people: the machine, the commands, the libraries, and last what needs attention."""
    console = Console(soft_wrap=True)
    console.print(_grid(_facts(report)))
    _print_commands(report, console)
    _print_libraries(report, console)
    for line in report.warnings:
        console.print(Text(f"note: {line}", "yellow"))
    for line in report.broken:
        console.print(Text(f"broken: {line}", "red"))
    working = sum(not each.missing for each in report.commands)
    console.print(f"{working} of {len(report.commands)} commands have all that they need")


def _facts(report: DoctorReport) -> list[tuple[str, str]]:
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


def _print_commands(report: DoctorReport, console: Console) -> None:
    table = _table("command", "works", "missing")
    for each in report.commands:
        works = Text("no", "red") if each.missing else Text("yes", "green")
        table.add_row(Text(f"headrace {each.name}"), works, Text(", ".join(each.missing)))
    console.print(table)
    for install in dict.fromkeys(each.install for each in report.commands if each.install):
        names = ", ".join(each.name for each in report.commands if each.install == install)
        console.print(Text(f"for {names}: {install}"))


def _print_libraries(report: DoctorReport, console: Console) -> None:
    table = _table("library", "installed", "tested")
    for library in report.libraries:
        table.add_row(*(Text(text) for text in (library.name, library.installed or "-", library.tested or "-")))
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


doctor_app = command("doctor", DoctorCommand)
