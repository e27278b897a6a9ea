"""What an environment runs with: flags win over the file, the file over `config_init`.

The model validates the merged values together. An invalid value is reported by where it was given: a flag, or a file
and a key. A name that is close to a known one is an error; an unknown key of a file that is close to none is a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headrace.data.errors import InvalidInput
from headrace.envs.server.config import APIServerConfig, ServerBaseline
from headrace.envs.types import BaseEnvConfig
from headrace.files import FieldPath, dotted, explained, nearest

log = logging.getLogger("headrace.envs")

Model = TypeVar("Model", bound=BaseModel)
Servers = ServerBaseline | Sequence[APIServerConfig]
Values = Mapping[str, Any]

#: Sections of the file, and prefixes of the flags.
ENV, OPENAI = "env", "openai"
#: Settings beside the sections.
SWITCHES = ("slurm", "testing")


@dataclass(frozen=True, slots=True)
class EnvSettings:
    """What an environment is made with."""

    env: BaseEnvConfig
    servers: Servers
    slurm: bool = False
    testing: bool = False


@dataclass(frozen=True, slots=True)
class GivenSettings:
    """The values of the file, and of the flags by section."""

    file: Values
    source: str
    env: Values
    openai: Values
    switches: Values

    @property
    def file_env(self) -> Values:
        """The file's configuration of the environment. Raises `InvalidInput` where it is no mapping."""
        found = self.file.get(ENV) or {}
        if not isinstance(found, Mapping):
            raise InvalidInput(f"{self.source}: {ENV} must be a mapping such as {{group_size: 8}}")
        return found

    @property
    def file_openai(self) -> list[Values]:
        """The file's servers, given as one mapping or a list of them."""
        found = self.file.get(OPENAI) or []
        servers = list(found) if isinstance(found, list) else [found]
        if not all(isinstance(server, Mapping) for server in servers):
            raise InvalidInput(
                f"{self.source}: {OPENAI} must be a mapping such as {{base_url: URL}}, or a list of them"
            )
        return servers


def merge_settings(env: BaseEnvConfig, servers: Servers, given: GivenSettings) -> EnvSettings:
    """The validated settings. Raises `InvalidInput`, which names the flag, or the file and key, of an invalid value."""
    _known(given.file, (ENV, OPENAI, *SWITCHES), given.source)
    file = {name: given.file[name] for name in SWITCHES if name in given.file}
    switches = _layered(_Switches, {}, file, given.switches, given.source)
    found = _layered(type(env), _values(env), given.file_env, given.env, given.source, ENV)
    return EnvSettings(found, _servers(servers, given), switches.slurm, switches.testing)


class _Switches(BaseModel):
    slurm: bool = False
    testing: bool = False


def _servers(defaults: Servers, given: GivenSettings) -> Servers:
    """One server is changed by file and flags; several in the file replace the defaults, and take no flags."""
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
    """The server that flags and file change: the only one, or one of what several have in common."""
    if isinstance(defaults, APIServerConfig):
        return defaults
    if isinstance(defaults, ServerBaseline):
        return APIServerConfig(**_values(defaults))
    return defaults[0] if len(defaults) == 1 else type(defaults[0])() if defaults else APIServerConfig()


def _values(model: BaseModel) -> dict[str, Any]:
    return {name: _values(value) if isinstance(value, BaseModel) else value for name, value in model}


def _layered(model: type[Model], base: Values, file: Values, flags: Values, source: str, *section: str | int) -> Model:
    """The model of the values; flags win. `source` is the file's name, `section` where in it the values are."""
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
    """The file's values with known names. A name close to a known one is an error, any other a warning: Atropos ignores
    unknown keys, and files written for it have some."""
    for key in (key for key in values if key not in names):
        where, near = f"{source}: {dotted((*section, key))}", nearest(str(key), names)
        if near:
            raise InvalidInput(f"{where} is not known{near}")
        log.warning("%s is not known, and changes nothing", where)
    return {key: value for key, value in values.items() if key in names}


def _holds(values: Any, path: FieldPath) -> bool:
    """Whether these values hold the path, or a value that it would lead through."""
    for part in path:
        if not isinstance(values, Mapping):
            break
        if part not in values:
            return False
        values = values[part]
    return bool(path)


def _merged(below: Values, above: Values) -> dict[str, Any]:
    """Both together: mappings are merged, of other values the one above wins."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
