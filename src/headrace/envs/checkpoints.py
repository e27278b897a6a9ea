"""An environment's own state, as JSON in the trainer's checkpoint folder: `env_checkpoints/NAME/step-N.json`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson

from headrace.data.errors import InvalidInput

_NAME = re.compile(r"step-(\d+)\.json")


class Checkpoints:
    def __init__(self, checkpoint_dir: str, name: str) -> None:
        self.folder = Path(checkpoint_dir) / "env_checkpoints" / name

    def save(self, step: int, data: dict[str, Any]) -> Path:
        """Writes a checkpoint, there whole or not at all."""
        place = self.folder / f"step-{step}.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        made = place.with_suffix(".part")
        made.write_bytes(orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS))
        made.rename(place)
        return place

    def load(self, step: int) -> dict[str, Any] | None:
        """The newest checkpoint that is not of a later step than this; None where there is none."""
        found = [int(match[1]) for path in self.folder.glob("step-*.json") if (match := _NAME.fullmatch(path.name))]
        of = max((saved for saved in found if saved <= step), default=None)
        if of is None:
            return None
        place = self.folder / f"step-{of}.json"
        try:
            data = orjson.loads(place.read_bytes())
        except orjson.JSONDecodeError as error:
            raise InvalidInput(f"{place} is no checkpoint: {error}; delete it to go on from the one before") from error
        if not isinstance(data, dict):
            raise InvalidInput(f"{place} must hold an object of attributes, not {type(data).__name__}")
        return data
