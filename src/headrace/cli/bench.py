"""`headrace bench`: see `headrace.bench`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field
from pydantic_settings import CliPositionalArg

from headrace.extras import NEEDS, require_for


class Bench(BaseModel):
    """Measure a part of Headrace, and print ratios against a named limit or peer measured in the same run."""

    name: CliPositionalArg[str] = Field(description="what to measure: pool, gateway, trainer, envs, api")
    quick: bool = Field(False, description="smaller sizes: ends within two minutes on two cores")
    json_path: Path | None = Field(None, alias="json", description="write the figures to this file as JSON")

    def cli_cmd(self) -> None:
        from headrace import bench

        if f"bench {self.name}" in NEEDS:
            require_for(f"bench {self.name}")
        code = bench.run(self.name, quick=self.quick, json_path=self.json_path)
        if code:
            raise SystemExit(code)
