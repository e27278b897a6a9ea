"""`headrace new`: see `headrace.run.new`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

from pydantic import Field

from headrace.commands import CommandModel, Positional, command
from headrace.extras import require_for


class NewCommand(CommandModel):
    """Write a small project: an agent, a reward, twenty rows of data, a run.yaml and a test. It runs as it is, on a
    CPU, in a minute or two, and learns: `headrace run run.yaml` in it."""

    folder: Positional[Path] = Field(description="where it goes; not there yet, or empty")
    kind: Literal["agent", "command", "flow", "environment"] = Field(
        "agent",
        description="who plays: a coroutine with a base URL; any program; a flow that handles tokens; an environment",
    )

    def execute(self) -> None:
        require_for("new")
        from headrace.run.new import create

        for path in create(self.folder, self.kind):
            print(path)
        print(f"next: cd {shlex.quote(str(self.folder))} && headrace run run.yaml")


new_app = command("new", NewCommand)
