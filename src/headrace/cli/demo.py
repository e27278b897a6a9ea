"""`headrace demo`: see `headrace.demo`."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Literal

from pydantic import Field

from headrace.commands import FAILED, CommandModel, Usage, command
from headrace.extras import require_for

#: Where runs are, each a folder, unless `--run` names another.
RUNS = Path("runs")


class DemoCommand(CommandModel):
    """Watch agents learn from nothing. A two-layer transformer with random weights is served by the engine; agents that
    know no more than a base URL play a number game against it through the gateway; the trainer learns from what the
    pool recorded and publishes the weights.

    It ends when the mean reward of ten steps is 0.95, with a picture, a page and one JSON object as the last line of
    stdout. The exit code is 0 only if that was reached, and 130 after Ctrl-C; both say how to go on.
    """

    task: str = Field("number", description="number: 1 to 6 in three guesses; number3: 1 to 3 in three")
    seed: int = Field(0, ge=0, description="of the weights, the hidden numbers and the order of learning")
    steps: int | None = Field(None, ge=1, description="most training steps (default: the recipe's)")
    engine: Literal["headrace", "vllm"] = Field("headrace", description="what serves the model")
    vllm_addresses: str | None = Field(None, description="with --engine vllm: servers that serve --model")
    model: str | None = Field(
        None, description="folder of the checkpoint to begin with (default: random weights, by the seed)"
    )
    sync_mode: Literal["auto", "keep", "drain", "abort-resume"] = Field(
        "auto", description="what becomes of calls in flight when weights are exchanged"
    )
    ray: bool = Field(False, description="the pool is an actor of a local Ray cluster")
    run: Path | None = Field(None, description="the run's folder (default: a new one in runs/)")
    resume: bool = Field(
        False,
        description="go on, as it began, with the run in --run or with the latest one in runs/; --steps may differ",
    )

    def execute(self) -> None:
        require_for("demo --ray" if self.ray else "demo")
        from headrace.demo.run import DemoOptions, play

        # Whoever asks for it to end gets what Ctrl-C gets: nothing is left running.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        # What was not said is left open: a resumed run has its own.
        options = DemoOptions(**self.model_dump(include=self.model_fields_set - {"run", "resume"}))
        if not play(options, self._folder(), resume=self.resume):
            raise SystemExit(FAILED)

    def _folder(self) -> Path:
        """The run's folder. Raises `Usage` where there is none to resume."""
        if self.run is not None:
            return self.run
        if not self.resume:
            return RUNS / time.strftime("demo-%Y%m%d-%H%M%S")
        found = sorted(RUNS.glob("demo-*"))
        if not found:
            raise Usage(f"--resume: there is no demo in {RUNS}; name its folder with --run")
        return found[-1]


demo_app = command("demo", DemoCommand)
