"""`headrace train`: see `headrace.trainer`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field
from pydantic_settings import CliPositionalArg

from headrace.extras import require_for

if TYPE_CHECKING:
    from headrace.trainer.checkpoint import Progress


class Train(BaseModel):
    """Train a model from a pool, and publish its weights to the rollout servers, as a YAML file says. SIGTERM or Ctrl-C
    ends it after the step under way, with a checkpoint; --resume goes on from the last one.
    """

    config: CliPositionalArg[Path] = Field(description="the YAML file; docs/trainer.md has every field")
    resume: bool = Field(False, description="go on from the run's last checkpoint")
    dry_run: bool = Field(
        False, description="print the configuration, the memory it needs and the first batch's shape; train nothing"
    )
    steps: int | None = Field(None, ge=1, description="in place of the file's")
    run: Path | None = Field(None, description="the run's folder, in place of the file's")

    def cli_cmd(self) -> None:
        require_for("train")
        from headrace.trainer.config import load

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        given = {"steps": self.steps, "run": self.run}
        config = load(self.config, **{name: value for name, value in given.items() if value is not None})
        if self.dry_run:
            from headrace.trainer.dry_run import dry_run

            print(dry_run(config))
            return
        from headrace.trainer.trainer import train

        done = train(config, resume=self.resume, ready=_say)
        print(f"{done.step} steps, version {done.version}, {done.trajectories} trajectories, {done.tokens} tokens")


def _say(progress: Progress) -> None:
    print(f"trainer ready at step {progress.step}, version {progress.version}", flush=True)
