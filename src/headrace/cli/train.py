"""`headrace train`: see `headrace.trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from headrace.commands import CommandModel, Positional, command
from headrace.extras import require_for

if TYPE_CHECKING:
    from headrace.trainer.config import TrainerConfig


class TrainCommand(CommandModel):
    """Train a model from a pool, and publish its weights to the rollout servers, as a YAML file says. SIGTERM or Ctrl-C
    ends it after the step under way, with a checkpoint, and at once where it only waits; a second Ctrl-C does not wait
    for the step. --resume goes on from the last checkpoint.
    """

    config: Positional[Path] = Field(description="the YAML file; docs/trainer.md has every field")
    resume: bool = Field(False, description="go on from the run's last checkpoint")
    dry_run: bool = Field(
        False,
        description="print the configuration, the memory it needs, what it would do and, where the pool answers, the "
        "first batch's shape; train nothing",
    )
    steps: int | None = Field(None, ge=1, description="in place of the file's")
    run: Path | None = Field(None, description="the run's folder, in place of the file's")

    def execute(self) -> None:
        require_for("train")
        from headrace.trainer.config import load

        given = {"steps": self.steps, "run": self.run}
        config = load(self.config, **{name: value for name, value in given.items() if value is not None})
        if self.dry_run:
            from headrace.trainer.dry_run import dry_run

            print(dry_run(config))
            return
        self._train(config)

    def _train(self, config: TrainerConfig) -> None:
        from rich.console import Console

        from headrace.trainer.trainer import train
        from headrace.trainer.view import TrainView

        with TrainView(Console(), config) as view:
            outcome = train(config, resume=self.resume, watcher=view)
        for sentence in outcome.sentences():
            print(sentence)
        if outcome.stopped_by:
            print(f"stopped by {outcome.stopped_by}; go on with: headrace train {self.config} --resume")
        outcome.check()


train_app = command("train", TrainCommand)
