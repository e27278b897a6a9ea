"""Tables that people write for a gateway: what is in them is known, or an error with the name that was meant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from headrace.data.errors import InvalidInput, shown
from headrace.files import nearest

T = TypeVar("T", bound=msgspec.Struct)


def fitted(table: Any, kind: type[T], where: str) -> T:
    """A table as what it should be. `where` is its place, for whoever has to find it."""
    names = kind.__struct_fields__
    if not isinstance(table, dict):
        raise InvalidInput(f"{where} must be a table with some of {', '.join(names)}, not {shown(table)}")
    for name in table:
        known(str(name), names, f"{where}: key")
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{where}: {error}") from None


def known(name: str, names: Iterable[str], what: str) -> str:
    """The name, where it is one of those; otherwise an error with the nearest."""
    among = list(names)
    if name in among:
        return name
    hint = nearest(name, among) or f"; known: {', '.join(among) or 'none'}"
    raise InvalidInput(f"{what} {shown(name)} is unknown{hint}")
