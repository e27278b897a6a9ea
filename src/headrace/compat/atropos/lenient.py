"""Configurations that ignore unknown fields, as atroposlib's do, but with a warning."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from pydantic import BaseModel, model_validator

from headrace.files import nearest

log = logging.getLogger("headrace.compat")


class Lenient(BaseModel):
    """A model that ignores unknown fields; each is warned of once."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if not isinstance(given, dict) or cls.model_config.get("extra") == "allow":
            return given
        fields = {*cls.model_fields, *(field.alias for field in cls.model_fields.values() if field.alias)}
        for key in given.keys() - fields:
            _tell(cls.__name__, str(key), nearest(str(key), fields))
        return {key: value for key, value in given.items() if key in fields}


@cache
def _tell(name: str, key: str, near: str) -> None:
    """Warns once: a command makes an environment's configuration several times."""
    log.warning("%s has no field %s; it is passed over%s", name, key, near)
