"""Files that people write for a gateway (YAML, JSON or TOML): nothing in them is passed over in silence.

A key that stands twice, or that nobody knows, is an error that names it; an unknown one with the name that was meant.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.data.errors import InvalidInput, shown

T = TypeVar("T", bound=msgspec.Struct)
Table = dict[str, Any]


def read_table(path: Path) -> Table:
    """What a file holds, by its ending."""
    readers: dict[str, Callable[[str], Any]] = {".yaml": _yaml, ".yml": _yaml, ".json": _json, ".toml": tomllib.loads}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InvalidInput(f"{path} is read by its ending, which must be one of {', '.join(readers)}")
    try:
        found = reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # each format's own error is one
        raise InvalidInput(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise InvalidInput(f"{path} must hold names and what they stand for, not {shown(found)}")
    return found


def fitted(table: Any, kind: type[T], where: str) -> T:
    """A table as what it should be. `where` is its place, for whoever has to find it."""
    if not isinstance(table, dict):
        raise InvalidInput(f"{where} must be a table with some of {', '.join(_names(kind))}, not {shown(table)}")
    for name in table:
        known(str(name), _names(kind), f"{where}: key")
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{where}: {error}") from None


def known(name: str, names: Iterable[str], what: str) -> str:
    """The name, where it is one of those; otherwise an error with the nearest."""
    among = list(names)
    if name in among:
        return name
    near = difflib.get_close_matches(name, among, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(among) or 'none'}"
    raise InvalidInput(f"{what} {shown(name)} is unknown; {hint}")


def _names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return kind.__struct_fields__


def _json(text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> Table:
        found: Table = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"the key {shown(name)} stands twice")
            found[name] = value
        return found

    return json.loads(text, object_pairs_hook=once)


def _yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """PyYAML keeps the last of two like keys; here the second is an error."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for at, key in enumerate(keys):
                if key in keys[:at]:
                    raise ValueError(f"the key {shown(key)} stands twice{node.value[at][0].start_mark}")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
