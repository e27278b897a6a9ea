"""`headrace run`: see `headrace.run`."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from pydantic import Field

from headrace.commands import FAILED, CommandModel, Positional, Usage, command
from headrace.extras import require_for

#: Where runs are, below the folder of their file, unless `--run-dir` names another.
RUNS = "runs"


class RunCommand(CommandModel):
    """Train a model as one file says: starts rollout servers, a gateway with its journalled pool, rewards, rollouts and
    the trainer; shows what happens; begins again what dies; ends everything that it started.

    Its last line is one JSON object, with reward_start, reward_end, steps, seconds and report. The exit code is 0 where
    something was learned, and 130 after Ctrl-C, which says how to go on.
    """

    file: Positional[Path] = Field(description="the YAML file; docs/run.md has every field")
    resume: bool = Field(False, description="go on with the run in --run-dir, or with the latest one of this file")
    dry_run: bool = Field(
        False,
        description="say what would be started, check every path, column, import and port, and play one rollout with "
        "its reward; nothing is learned",
    )
    evaluate: bool = Field(
        False,
        description="play the held-out data with the run's last checkpoint (or the model): mean, pass@k, by a field",
    )
    by: list[str] = Field([], description="with --evaluate: a column whose values get a mean each; several times")
    set: list[str] = Field([], description="a value in place of the file's, as train.steps=20; several times")
    run_dir: Path | None = Field(None, description="the run's folder (default: a new one in runs/, beside the file)")

    def execute(self) -> None:
        require_for("run")
        from headrace.run.checks import check
        from headrace.run.config import load

        if sum((self.resume, self.dry_run, self.evaluate)) > 1:
            raise Usage("--resume, --dry-run and --evaluate are three different things; give one of them")
        # Whoever asks for it to end gets what Ctrl-C gets: nothing is left running.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        config = load(self.file, self.set)
        check(config, self.file.absolute().parent)
        if self.dry_run:
            from headrace.run.dry_run import dry_run

            dry_run(self.file, config)
        elif self.evaluate:
            from headrace.run.evaluate import evaluate_run

            evaluate_run(self.file, config, self._existing(), by=self.by)
        else:
            from headrace.run.run import execute

            if not execute(self.file, config, self._folder(), resume=self.resume):
                raise SystemExit(FAILED)

    def _folder(self) -> Path:
        """The run's folder. Raises `InvalidInput` where there is none to resume."""
        from headrace.run.folder import latest

        if self.run_dir is not None:
            return self.run_dir
        runs = self.file.absolute().parent / RUNS
        return latest(runs, self.file.stem) if self.resume else runs / time.strftime(f"{self.file.stem}-%Y%m%d-%H%M%S")

    def _existing(self) -> Path | None:
        """The folder of the run that is evaluated; None where there is none yet, and its model is."""
        from headrace.data.errors import InvalidInput
        from headrace.run.folder import latest

        if self.run_dir is not None:
            return self.run_dir
        try:
            return latest(self.file.absolute().parent / RUNS, self.file.stem)
        except InvalidInput:
            return None


run_app = command("run", RunCommand)
