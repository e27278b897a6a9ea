"""Metrics in wandb. Without a login the run is kept offline, to be synced later; nobody is ever asked for a key."""

from __future__ import annotations

import logging
import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.data.errors import HeadraceError
from headrace.extras import install_command
from headrace.metrics.row import Row, flat
from headrace.metrics.table import Table

log = logging.getLogger("headrace.metrics")

#: Any of these says how wandb is to be reached, or that it is not.
SAID = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
#: A run that wandb's servers do not answer for so long goes on offline.
ANSWER_S = 30.0


class Wandb:
    """One run, which is also `wandb.run`: what else is logged to wandb in this process lands in it."""

    def __init__(
        self, project: str | None, folder: Path, *, name: str | None = None, group: str | None = None, config: Row
    ) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise HeadraceError(f"metrics in wandb need it: {install_command('wandb')}") from error
        self._table = wandb.Table
        given: dict[str, Any] = {"project": project, "name": name, "group": group, "config": config, "resume": "allow"}
        given |= {"dir": folder, "settings": wandb.Settings(init_timeout=ANSWER_S)}
        if not logged_in():
            log.warning("wandb has no login here: the run is kept offline under %s (wandb sync sends it)", folder)
            self._run = wandb.init(**given, mode="offline")
            return
        try:
            self._run = wandb.init(**given)
        except wandb.errors.Error as error:
            log.warning("wandb does not answer (%s): the run is kept offline under %s", error, folder)
            self._run = wandb.init(**given, mode="offline")

    def write(self, row: Row) -> None:
        shown = {name: self._shown(value) for name, value in row.items() if not isinstance(value, str)}
        self._run.log({**flat(row), **{name: value for name, value in shown.items() if value is not None}}, row["step"])

    def close(self) -> None:
        self._run.finish()

    def _shown(self, value: Any) -> Any:
        """What wandb has a form of its own for; numbers are told apart from it, by `flat`."""
        if isinstance(value, Table):
            return self._table(columns=list(value.columns), data=[list(row) for row in value.data])
        return value if type(value).__module__.startswith("wandb") else None


def logged_in() -> bool:
    """Whether wandb would find out by itself how to reach its servers: by a variable, or a line of ~/.netrc."""
    if any(os.environ.get(name) for name in SAID):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            if path and netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
