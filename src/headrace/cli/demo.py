"""`headrace demo`: see `headrace.demo`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field

from headrace.cli.parser import FAILED


class Demo(BaseModel):
    """See the pool at work. Simulated agents play a number game at random and record exact tokens; half-way the pool's
    process is killed (kill -9) and recovers from its journal; a consumer leases batches and acknowledges them.

    No training yet: the trainer comes later. The last line of stdout is a JSON object; the exit code is 0 only if
    nothing was lost.
    """

    groups: int = Field(48, ge=4, description="prompts to play, each 8 times")
    agents: int = Field(4, ge=1, le=64, description="agents that play at once")
    seed: int = Field(0, description="of the hidden numbers and the guesses")
    journal: Path | None = Field(None, description="keep the journal in this new folder, instead of a temporary one")

    def cli_cmd(self) -> None:
        from headrace.demo import play

        if not play(groups=self.groups, agents=self.agents, seed=self.seed, journal=self.journal):
            raise SystemExit(FAILED)
