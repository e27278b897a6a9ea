"""`headrace bench`: see `headrace.bench`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from headrace.commands import CommandModel, Positional, command
from headrace.extras import NEEDS, require_for


class BenchCommand(CommandModel):
    """Measure a part of Headrace, and print ratios against a named limit or peer measured in the same run."""

    name: Positional[str] = Field(description="what to measure: pool, gateway, trainer, envs, api, run")
    quick: bool = Field(False, description="smaller sizes: ends within two minutes on two cores")
    runs: int | None = Field(None, ge=1, description="trainer: run the demo so often, seed by seed; who learned?")
    busy: int = Field(0, ge=0, description="trainer: so many of the runs, the last, on cores that are kept busy")
    json_path: Path | None = Field(None, alias="json", description="write the figures to this file as JSON")

    def execute(self) -> None:
        from headrace import bench

        if f"bench {self.name}" in NEEDS:
            require_for(f"bench {self.name}")
        code = bench.benchmark(self.name, quick=self.quick, json_path=self.json_path, runs=self.runs, busy=self.busy)
        if code:
            raise SystemExit(code)


bench_app = command("bench", BenchCommand)
