"""`headrace storm`: see `headrace.storm`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import orjson
from pydantic import Field, model_validator

from headrace.cli.common import remark
from headrace.commands import CommandModel, Usage, command
from headrace.extras import require_for
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.storm import Report, Sizes

#: Findings that are told one by one.
MOST_TOLD = 20
#: Simulations that are played where no number is given.
SEEDS = 20


class StormCommand(CommandModel):
    """Start a whole system (rollout servers, gateway with workers, pool, reward loop, consumers), have agents use it,
    and kill, freeze and cut off its parts, or fill their disk; then check from outside that nothing acknowledged was
    lost, nothing learned from twice, and nothing stuck.

    The last line is JSON. It exits with 0 only where nothing was found.
    """

    quick: bool = Field(False, description="a small storm: ends within two minutes on a free core")
    seed: int | None = Field(None, ge=0, description="plays a storm again (default: a random one, which is told)")
    pool: Literal["embedded", "http", "ray"] = Field("embedded", description="where the pool lives")
    kills: int | None = Field(None, ge=0, description="SIGKILLs, of any process (default: 1000)")
    freezes: int | None = Field(None, ge=0, description="SIGSTOPs for seconds (default: 200)")
    network: int | None = Field(None, ge=0, description="network faults: drop, delay, duplicate, reset (default: 100)")
    full_disks: int | None = Field(None, ge=0, description="times that the journal's disk is full (default: 20)")
    slow_disks: int | None = Field(None, ge=0, description="times that other writes keep its disk busy (default: 20)")
    descriptors: int | None = Field(None, ge=0, description="times that a server has no descriptors left (default: 20)")
    memory: int | None = Field(None, ge=0, description="times that a server has no memory left (default: 20)")
    clocks: int | None = Field(None, ge=0, description="times that a clock jumps, up to a day (default: 20)")
    restarts: int | None = Field(None, ge=0, description="SIGTERMs, as upgrades send them (default: 20)")
    seconds: float | None = Field(None, gt=0, description="begin no fault after so long (default: all are done)")
    soak: float | None = Field(None, gt=0, description="no faults: load for so many seconds, and what grows with it")
    agents: int | None = Field(None, ge=1, description="agents at once (default: 8)")
    workers: int | None = Field(None, ge=1, le=64, description="the gateway's processes (default: 2)")
    patience_s: float | None = Field(None, gt=0, description="longer than this is stuck (default: 300)")
    learner: bool | None = Field(None, description="with a `headrace train` of a tiny model on a channel of its own")
    other_python: Path | None = Field(
        None, description="the Python of another version of Headrace: restarts change from one to the other"
    )
    folder: Path | None = Field(None, description="where logs, journals and files go (default: one of the system's)")
    check: Path | None = Field(None, description="only check the log of a storm in this folder again")
    simulate: bool = Field(False, description="no processes: the pool's code on simulated time, network and disk")
    seeds: int | None = Field(None, ge=1, description="simulations to play, from --seed on (default: 20)")
    operations: int | None = Field(None, ge=1, description="calls on the pool in each simulation (default: 10000)")

    @model_validator(mode="after")
    def _simulated_or_not(self) -> StormCommand:
        given = {name for name in self.model_fields_set if getattr(self, name) not in (None, False)}
        only = {"simulate", "seeds", "operations"}
        shared = {*only, "seed", "folder"}
        for name in sorted(given & (only - {"simulate"}) if not self.simulate else given - shared):
            flag = f"--{name.replace('_', '-')}"
            if self.simulate:
                takes = "it takes --seeds, --seed, --operations and --folder"
                raise ValueError(f"{flag} is for a storm of real processes, and --simulate starts none; {takes}")
            raise ValueError(f"{flag} is for a simulation; give --simulate with it")
        return self

    @model_validator(mode="after")
    def _one_thing(self) -> StormCommand:
        if self.check is not None and not self.check.is_dir():
            raise ValueError(f"--check is {str(self.check)!r}; it must be the folder of a storm that was played")
        if self.soak is not None and self.check is not None:
            raise ValueError("--soak plays a storm and --check looks at one that was played; give one")
        if self.other_python is not None and not os.access(self.other_python, os.X_OK):
            raise ValueError(f"--other-python is {str(self.other_python)!r}; it must be a program to run")
        return self

    def execute(self) -> None:
        require_for("storm --learner" if self.learner else "storm")
        from headrace.storm import check, random_seed, run_storm
        from headrace.storm.log import read_logs
        from headrace.storm.soak import growth_figures

        if self.check is not None:
            events = read_logs(self.check)
            if not any(event["e"] == "begin" for event in events):
                raise Usage(f"there is no storm's log in {self.check}; --check takes the folder that a storm told")
            _conclude(check(events), {})
            return
        seed = self.seed if self.seed is not None else random_seed()
        if self.simulate:
            _simulate(seed, self.seeds or SEEDS, self.operations, self.folder)
            return
        folder = self.folder or Path(tempfile.mkdtemp(prefix=f"headrace-storm-{seed}-"))
        report, growth = run_storm(
            folder,
            seed=seed,
            sizes=self._sizes(),
            pool=self.pool,
            soak_s=self.soak,
            other_python=self.other_python.absolute() if self.other_python is not None else None,
            tell=remark,
        )
        about: dict[str, object] = {"seed": seed, "pool": self.pool, "folder": str(folder)}
        for one in growth:
            remark(f"{one}{', which grows' if one.grows else ''}")
        _conclude(report, about | (growth_figures(growth) if self.soak is not None else {}))

    def _sizes(self) -> Sizes:
        from headrace.storm import QUICK, Sizes

        base = QUICK if self.quick else Sizes()
        given = {name: value for name in Sizes.__struct_fields__ if (value := getattr(self, name, None)) is not None}
        return msgspec.structs.replace(base, **given)


def _simulate(first: int, count: int, operations: int | None, folder: Path | None) -> None:
    """Plays simulations, tells what each found and how to play it again, and prints the line of figures; exits with 1
    where anything was found."""
    from headrace.storm.simulation import OPERATIONS, play_seeds

    size = operations or OPERATIONS
    summary = play_seeds(range(first, first + count), operations=size, folder=folder, tell=remark, most_told=MOST_TOLD)
    about = {"seed": first, "seeds": count, "version": __version__}
    print(
        orjson.dumps({**summary.figures, **summary.counts, "failed_seeds": summary.failed, **about}).decode(),
        flush=True,
    )
    if summary.failed:
        raise SystemExit(1)


def _conclude(report: Report, about: dict[str, object]) -> None:
    """Prints what was found and the line of figures; exits with 1 where anything was."""
    for finding in report.findings[:MOST_TOLD]:
        remark(f"{finding.kind}: {finding.subject}: {finding.what}")
    if len(report.findings) > MOST_TOLD:
        remark(f"and {len(report.findings) - MOST_TOLD} more")
    print(orjson.dumps({**report.figures, **report.counts, **about, "version": __version__}).decode(), flush=True)
    if not report.clean or about.get("grows"):
        raise SystemExit(1)


storm_app = command("storm", StormCommand)
