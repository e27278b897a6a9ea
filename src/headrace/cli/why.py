"""`headrace why`: what became of a call, a trajectory, a group or a batch; see `headrace.dashboard.why`."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import msgspec
from pydantic import Field

from headrace.cli.common import folder_of, print_json
from headrace.commands import CommandModel, Positional, Usage, command
from headrace.data.visible import visible

if TYPE_CHECKING:
    from headrace.dashboard.why import Why


class WhyCommand(CommandModel):
    """Say what became of something, from the journal alone: of a call (the id in `x-headrace-call`), a trajectory, all
    trajectories of a prompt, or a batch by its lease; and which calls a batch was made of. A pool may have the journal
    open meanwhile.
    """

    uid: Positional[str] = Field(description="a trajectory, a call, a prompt, a lease, or `batch N`")
    journal: Positional[str] = Field(".", description="a journal's folder, or the folder of a run; default: here")
    channel: str | None = Field(None, description="of this channel only")
    as_json: bool = Field(False, alias="json", description="print JSON")

    def execute(self) -> None:
        from headrace.dashboard.history import read_history
        from headrace.dashboard.why import why
        from headrace.run.services import JOURNAL

        folder = folder_of(self.journal)
        if folder is None:
            raise Usage(f"JOURNAL is {self.journal!r}; it is a folder: what became of things is in the journal")
        beside = folder / JOURNAL
        found = why(read_history(beside if beside.is_dir() else folder), self.uid, self.channel)
        if self.as_json:
            print_json([msgspec.to_builtins(one) for one in found])
            return
        for one in found:
            _show(one)


def _show(one: Why) -> None:
    print(visible(f"{one.kind} {one.name} (channel {one.channel})"))
    print(f"  {visible(one.verdict)}")
    for line in one.lines:
        at = "-" if line.at is None else datetime.fromtimestamp(line.at).isoformat(" ", "seconds")
        call = f" [call {line.call}]" if line.call is not None and one.kind != "call" else ""
        print(f"  {at:<19}  {visible(line.words + call)}")
    if one.left_out:
        print(f"  and {one.left_out} more")


why_command = command("why", WhyCommand)
