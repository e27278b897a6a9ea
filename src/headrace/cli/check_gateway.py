"""`headrace check-gateway`: see `headrace.checkup`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from pydantic import Field, field_validator
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.common import on_terminal
from headrace.commands import FAILED, CommandModel, Positional, Usage, command
from headrace.data.keys import configured_key
from headrace.data.visible import visible
from headrace.files import Key, check_place

if TYPE_CHECKING:
    from headrace.checkup import CheckReport

#: Colours of the verdicts.
STYLES = {"ok": "green", "note": "yellow", "bad": "red"}
COLUMNS = ("dialect", "check", "verdict", "cause", "said")
#: The environment variables of keys.
KEY_VARIABLES = {"api_key": "HEADRACE_API_KEY", "admin_key": "HEADRACE_ADMIN_KEY"}
ALL_DIALECTS = "chat,completions,responses,messages"


class CheckGatewayCommand(CommandModel):
    """Ask a gateway, or any OpenAI-compatible server, whether what it samples can be trained on, token for token. Exit
    code 0: exactly so; 1: not so, and the findings say why; 2: it could not be asked.
    """

    url: Positional[str] = Field(description="http://HOST:PORT, with or without /v1")
    model: str | None = Field(None, description="the model to ask; otherwise the first that is served")
    api_key: Key = Field(None, description=f"the key of an agent (or set {KEY_VARIABLES['api_key']})")
    admin_key: Key = Field(
        None,
        description="the key that opens a gateway's trajectories, where it has one "
        f"(or set {KEY_VARIABLES['admin_key']})",
    )
    dialects: str = Field(ALL_DIALECTS, description="which to try, separated by commas")
    tokenizer_path: Path | None = Field(
        None, description="the served model's folder: names causes of drift where the server has no /detokenize"
    )
    channel: str = Field("checkup", description="where a Headrace gateway records what is said here")
    timeout_s: float = Field(120, gt=0, description="how long one answer may take")
    json_path: Path | None = Field(None, alias="json", description="write the findings to this file as JSON")

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return value

    @field_validator("dialects")
    @classmethod
    def _known(cls, value: str) -> str:
        unknown = [name for name in value.split(",") if name not in ALL_DIALECTS.split(",")]
        if unknown:
            raise ValueError(f"no dialect {unknown[0]!r}; there are {ALL_DIALECTS}")
        return value

    def execute(self) -> None:
        from headrace.checkup import OutOfReach, checkup

        if self.json_path is not None:
            check_place(self.json_path)
        given = {name: configured_key(getattr(self, name), variable) for name, variable in KEY_VARIABLES.items()}
        try:
            report = asyncio.run(
                checkup(
                    self.url,
                    model=self.model,
                    dialects=self.dialects.split(","),
                    tokenizer=self.tokenizer_path,
                    channel=self.channel,
                    timeout_s=self.timeout_s,
                    **given,
                )
            )
        except OutOfReach as error:
            raise Usage(f"out of reach: {error}") from error
        show(report)
        if self.json_path is not None:
            self.json_path.write_bytes(
                orjson.dumps(report.as_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
            )
        if not report.exact:
            raise SystemExit(FAILED)


def show(report: CheckReport) -> None:
    """Prints the findings, as a table on a terminal and as tab-separated lines elsewhere, and then the verdict."""
    rows = [[visible(getattr(finding, name)) for name in COLUMNS] for finding in report.findings]
    said = "trainable exactly" if report.exact else "not trainable exactly"
    verdict = visible(f"{report.url} ({report.kind}, {report.model}): {said}")
    if not on_terminal():
        for row in rows:
            print("\t".join(" ".join(part.split()) for part in row))
        print(verdict)
        return
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name if name != "said" else "", overflow="fold")
    for row in rows:
        table.add_row(*(Text(part, STYLES.get(part, "")) for part in row))
    console = Console()
    console.print(table)
    console.print(Text(verdict, "green" if report.exact else "red"))


check_gateway_app = command("check-gateway", CheckGatewayCommand)
