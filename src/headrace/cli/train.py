"""`headrace train`: see `headrace.trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from headrace.commands import CommandModel, Positional, command
from headrace.extras import require_for

if TYPE_CHECKING:
    from headrace.trainer.config import TrainerConfig
    from headrace.trainer.ranks import Ranks


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
        from headrace.trainer.ranks import joined

        with joined() as ranks:
            config = ranks.agreed(self._load)
            if self.dry_run:
                from headrace.trainer.dry_run import dry_run

                if ranks.rank == 0:
                    print(dry_run(config))
            elif ranks.rank == 0:
                self._train(config, ranks)
            else:
                from headrace.trainer.shared_learner import follow
                from headrace.trainer.trainer import device_of

                follow(config, device_of(config.device), ranks)

    def _load(self) -> TrainerConfig:
        from headrace.trainer.config import load

        given = {"steps": self.steps, "run": self.run}
        return load(self.config, **{name: value for name, value in given.items() if value is not None})

    def _train(self, config: TrainerConfig, ranks: Ranks) -> None:
        from rich.console import Console

        from headrace.trainer.trainer import train
        from headrace.trainer.view import TrainView

        with TrainView(Console(), config) as view:
            outcome = train(config, resume=self.resume or ranks.restarts > 0, watcher=view, ranks=ranks)
        for sentence in outcome.sentences():
            print(sentence)
        if outcome.stopped_by:
            print(f"stopped by {outcome.stopped_by}; go on with: headrace train {self.config} --resume")
        outcome.check()


train_app = command("train", TrainCommand)
