"""`headrace check-model`: see `headrace.checkup.model`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.common import on_terminal, print_json
from headrace.commands import FAILED, CommandModel, Positional, Usage, command
from headrace.data.errors import InvalidInput
from headrace.extras import require_for

if TYPE_CHECKING:
    from headrace.checkup.model import ModelReport


class CheckModelCommand(CommandModel):
    """Try a model's tokenizer and chat template: which renderer it gets, which turns continue exactly what was sampled,
    whether its tool calls and its reasoning are read. Exit code 0: all of it; 1: not all, and the last lines say what;
    2: there is no tokenizer that could be tried.
    """

    folder: Positional[Path] = Field(description="a model's folder; its tokenizer's files are enough")
    renderer: str = Field("auto", description="`template`, or a family's name, instead of what fits")
    as_json: bool = Field(False, alias="json", description="print the findings as one JSON object")

    def execute(self) -> None:
        require_for("check-model")
        from headrace.checkup.model import check_model
        from headrace.tokens import Unrenderable, do_without_torch

        do_without_torch()
        try:
            report = check_model(self.folder, self.renderer)
        except (InvalidInput, Unrenderable) as error:
            raise Usage(str(error)) from error
        print_json(report.as_dict()) if self.as_json else show(report)
        if not report.well:
            raise SystemExit(FAILED)


def show(report: ModelReport) -> None:
    """Prints the findings, as a table on a terminal and as tab-separated lines elsewhere, and then the verdict."""
    well = "every turn is continued and everything is read" if report.well else "not everything is continued and read"
    verdict = f"{report.folder}: {well}"
    if not on_terminal():
        for row in report.rows():
            print("\t".join(row))
        for trouble in report.trouble:
            print(f"trouble\t{' '.join(trouble.split())}")
        print(verdict)
        return
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    for name, found in report.rows():
        table.add_row(Text(name, "bold"), Text(found))
    console = Console()
    console.print(table)
    for trouble in report.trouble:
        console.print(Text(trouble, "red"))
    console.print(Text(verdict, "green" if report.well else "red"))


check_model_app = command("check-model", CheckModelCommand)
