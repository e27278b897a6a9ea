"""What an environment runs with: flags before the file, the file before `config_init`.

A value that cannot be is refused by the name it has where it was given: a flag, or a file and a key. So is a name that
is nearly one that is known; a file's key that is like none is warned of.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headrace.data.errors import InvalidInput
from headrace.envs.config import BaseEnvConfig
from headrace.envs.server.config import APIServerConfig, ServerBaseline
from headrace.files import FieldPath, dotted, explained, nearest

log = logging.getLogger("headrace.envs")

Model = TypeVar("Model", bound=BaseModel)
Servers = ServerBaseline | Sequence[APIServerConfig]
Values = Mapping[str, Any]

ENV, OPENAI = "env", "openai"
SWITCHES = ("slurm", "testing")


@dataclass(frozen=True, slots=True)
class Settings:
    env: BaseEnvConfig
    servers: Servers
    slurm: bool = False
    testing: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """What was said: in the file, by section, and by flags."""

    file: Values
    source: str
    env: Values
    openai: Values
    switches: Values

    @property
    def file_env(self) -> Values:
        found = self.file.get(ENV) or {}
        if not isinstance(found, Mapping):
            raise InvalidInput(f"{self.source}: {ENV} must be a mapping such as {{group_size: 8}}")
        return found

    @property
    def file_openai(self) -> list[Values]:
        """The servers of the file: one as a mapping, or a list of them."""
        found = self.file.get(OPENAI) or []
        servers = list(found) if isinstance(found, list) else [found]
        if not all(isinstance(server, Mapping) for server in servers):
            raise InvalidInput(
                f"{self.source}: {OPENAI} must be a mapping such as {{base_url: URL}}, or a list of them"
            )
        return servers


def settings(env: BaseEnvConfig, servers: Servers, given: Given) -> Settings:
    """Everything together, checked."""
    _known(given.file, (ENV, OPENAI, *SWITCHES), given.source)
    file = {name: given.file[name] for name in SWITCHES if name in given.file}
    switches = _layered(_Switches, {}, file, given.switches, given.source)
    found = _layered(type(env), _values(env), given.file_env, given.env, given.source, ENV)
    return Settings(found, _servers(servers, given), switches.slurm, switches.testing)


class _Switches(BaseModel):
    slurm: bool = False
    testing: bool = False


def _servers(defaults: Servers, given: Given) -> Servers:
    """One server is changed by file and flags; several of the file stand alone; flags cannot mean one of several."""
    file, flags = given.file_openai, given.openai
    several = len(file) > 1 or (not file and isinstance(defaults, Sequence) and len(defaults) > 1)
    if several and flags:
        raise InvalidInput(
            f"--{OPENAI}.{next(iter(flags))} is for one server, and there are several: "
            f"say it of each of them under {OPENAI}: in a file (--config)"
        )
    base = changed_server(defaults)
    if len(file) > 1:
        return [_layered(type(base), {}, one, {}, given.source, OPENAI, at) for at, one in enumerate(file)]
    if not file and not flags:
        return defaults
    found = _layered(type(base), _values(base), file[0] if file else {}, flags, given.source, OPENAI)
    return found if isinstance(defaults, APIServerConfig) else [found]


def changed_server(defaults: Servers) -> APIServerConfig:
    """The server that flags and file change: the one there is, or one with what several have in common."""
    if isinstance(defaults, APIServerConfig):
        return defaults
    if isinstance(defaults, ServerBaseline):
        return APIServerConfig(**_values(defaults))
    return defaults[0] if len(defaults) == 1 else type(defaults[0])() if defaults else APIServerConfig()


def _values(model: BaseModel) -> dict[str, Any]:
    return {name: _values(value) if isinstance(value, BaseModel) else value for name, value in model}


def _layered(model: type[Model], base: Values, file: Values, flags: Values, source: str, *section: str | int) -> Model:
    """A model of the values, flags first. `source` is what the file is called, and `section` where in it they stand."""
    if model.model_config.get("extra") != "allow":
        file = _known(file, model.model_fields, source, *section)
    try:
        return model.model_validate(_merged(_merged(base, file), flags), by_alias=True, by_name=True)
    except ValidationError as error:

        def named(path: FieldPath) -> str:
            where = dotted((*section, *path))
            if _holds(flags, path):
                return f"--{where}"
            return f"{source}: {where}" if _holds(file, path) else where

        raise InvalidInput("; ".join(explained(error, model, named))) from None


def _known(values: Values, names: Collection[str], source: str, *section: str | int) -> dict[str, Any]:
    """What of a file's values has a known name. One that is nearly known is a slip, and refused; others are warned of:
    files of Atropos' carry such keys, which it never minded."""
    for key in (key for key in values if key not in names):
        where, near = f"{source}: {dotted((*section, key))}", nearest(str(key), names)
        if near:
            raise InvalidInput(f"{where} is not known{near}")
        log.warning("%s is not known, and changes nothing", where)
    return {key: value for key, value in values.items() if key in names}


def _holds(values: Any, path: FieldPath) -> bool:
    """Whether what is wrong at a path was said by these values."""
    for part in path:
        if not isinstance(values, Mapping):
            break
        if part not in values:
            return False
        values = values[part]
    return bool(path)


def _merged(below: Values, above: Values) -> dict[str, Any]:
    """Mappings that both have are merged; of anything else, the one above counts."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
