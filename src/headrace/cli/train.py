"""`headrace train`: see `headrace.trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from headrace.cli.actors import check_resources
from headrace.commands import CommandModel, Positional, command
from headrace.extras import require_for

if TYPE_CHECKING:
    from headrace.trainer.config import TrainerConfig
    from headrace.trainer.ranks import Ranks
    from headrace.trainer.reporting import RunOutcome
    from headrace.trainer.view import TrainView


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
    workers: int | None = Field(
        None, ge=1, description="train on so many workers of a Ray cluster, each with a part of the model"
    )
    gpus_per_worker: float = Field(0, ge=0, description="GPUs that Ray sets aside for each of them; 0: CPUs compute")
    cpus_per_worker: float = Field(1, ge=0, description="CPUs that Ray sets aside for each of them")
    resource: list[str] = Field(
        [], description="what else a worker's node must have, as NAME=AMOUNT; may be given several times"
    )
    here: bool = Field(False, description="keep the workers on this machine's node")
    max_failures: int = Field(3, ge=-1, description="times that the workers are begun again where one dies; -1: always")
    ray_address: str = Field("auto", description="the cluster: auto, HOST:PORT or ray://HOST:10001")
    namespace: str = Field("default", description="the cluster's namespace")

    _amounts = field_validator("resource")(check_resources)

    def execute(self) -> None:
        require_for("train" if self.workers is None else "train --workers")
        from headrace.trainer.ranks import joined

        with joined() as ranks:
            config = ranks.agreed(self._load)
            if self.dry_run:
                from headrace.trainer.dry_run import dry_run

                if ranks.rank == 0:
                    ranks.count_out()
                    print(dry_run(config))
            elif ranks.rank == 0:
                self._train(config, ranks)
            else:
                from headrace.trainer.shared_learner import follow

                follow(config, config.device, ranks)

    def _load(self) -> TrainerConfig:
        from headrace.trainer.config import load

        given = {"steps": self.steps, "run": self.run}
        return load(self.config, **{name: value for name, value in given.items() if value is not None})

    def _train(self, config: TrainerConfig, ranks: Ranks) -> None:
        from rich.console import Console

        from headrace.trainer.view import TrainView

        with TrainView(Console(), config) as view:
            if self.workers is not None:
                outcome = self._train_on_ray(config, self.workers, view)
            else:
                from headrace.trainer.trainer import train

                outcome = train(config, resume=self.resume or ranks.restarts > 0, watcher=view, ranks=ranks)
        for sentence in outcome.sentences():
            print(sentence)
        if outcome.stopped_by:
            print(f"stopped by {outcome.stopped_by}; go on with: headrace train {self.config} --resume")
        outcome.check()

    def _train_on_ray(self, config: TrainerConfig, workers: int, view: TrainView) -> RunOutcome:
        from headrace.net.ray_placement import resource_of
        from headrace.trainer.config import TrainWorkers
        from headrace.trainer.ray_train import train_on_ray

        wanted = TrainWorkers(
            workers=workers,
            gpus=self.gpus_per_worker,
            num_cpus=self.cpus_per_worker,
            resources=dict(map(resource_of, self.resource)),
            here=self.here,
            max_failures=self.max_failures,
        )
        where = {"address": self.ray_address, "namespace": self.namespace}
        return train_on_ray(config, wanted, **where, resume=self.resume, watcher=view)


train_app = command("train", TrainCommand)
