"""Flags of a configuration: `--env.group_size 8` for the field `group_size` of the model behind `env`.

A flag's value stays text where the field takes text, and is read as YAML (`[1, 2]`, `{a: 1}`) where the field holds a
list or a mapping. What it comes to is checked by the model, together with the values from elsewhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.data.errors import InvalidInput
from headrace.files import kinds

#: How None is written on a command line, where a field takes it.
NONE = ("None", "none", "null")
NUMBERS = (int, float)
#: What a type may be made of without being a list or a mapping.
PLAIN = (None, Union, UnionType, Literal, Annotated)
#: Fields whose values are nobody's business, however their names begin.
SECRET = "key"
#: Letters of a default in the help.
LONGEST = 60


def add_flags(
    group: argparse._ArgumentGroup, prefix: str, defaults: BaseModel, names: Collection[str] | None = None
) -> None:
    """A flag for each of the model's fields, or of those named. The help says the default that this environment has."""
    for path, field in _fields(type(defaults)):
        if names is not None and path[0] not in names:
            continue
        flag = f"--{prefix}.{'.'.join(path)}"
        says = (field.description or "").replace("%", "%%")
        default = _reached(defaults, path)
        if default not in (None, "") and not path[-1].endswith(SECRET):
            says = f"{says} (default: {_typed(default).replace('%', '%%')})".lstrip()
        options: dict[str, Any] = {"nargs": "?", "const": "true"} if _is_bool(field.annotation) else {}
        group.add_argument(
            flag, dest=flag, default=argparse.SUPPRESS, help=says, metavar=_metavar(field.annotation), **options
        )


def given_flags(found: Mapping[str, Any], prefix: str, model: type[BaseModel]) -> dict[str, Any]:
    """The values of those flags that were given, nested as the model's fields are."""
    values: dict[str, Any] = {}
    for path, field in _fields(model):
        flag = f"--{prefix}.{'.'.join(path)}"
        if flag in found:
            inner = values
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            inner[path[-1]] = _value(flag, found[flag], field.annotation)
    return values


def _fields(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every field by its path; a field that is a model of its own by its fields."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, (*above, name))
        else:
            yield (*above, name), field


def _value(flag: str, text: str, annotation: Any) -> Any:
    parts = kinds(annotation)
    if text in NONE and type(None) in parts:
        return None
    if any(kind is str or kind is Any for kind in (annotation, *_members(annotation))):
        return text
    if any(_is_container(kind) or get_origin(kind) not in PLAIN for kind in parts):
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            raise InvalidInput(f"{flag} {text!r} is no list or mapping such as [1, 2] or {{a: 1}}") from None
    return text


def _members(annotation: Any) -> tuple[Any, ...]:
    """The types of a union; none for a list or a mapping, whose inner types say nothing of how it is written."""
    origin = get_origin(annotation)
    return get_args(annotation) if origin is not None and not _is_container(origin) else ()


def _is_container(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, list | dict | tuple | set | frozenset | BaseModel)


def _is_bool(annotation: Any) -> bool:
    return annotation is bool or bool in _members(annotation)


def _metavar(annotation: Any) -> str:
    """What stands for the value in the help."""
    plain = [kind for kind in (_members(annotation) or (annotation,)) if kind is not type(None)]
    if _is_bool(annotation):
        return "true|false"
    for kind in [annotation, *plain]:
        if get_origin(kind) is Literal:
            return f"{{{','.join(map(str, get_args(kind)))}}}"
        if isinstance(kind, type) and issubclass(kind, Enum):
            return f"{{{','.join(str(member.value) for member in kind)}}}"
    if all(kind in NUMBERS for kind in plain):
        return "N"
    if Path in plain:
        return "PATH"
    return "TEXT" if str in plain or Any in plain else "YAML"


def _reached(values: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        values = getattr(values, name, None)
    return values


def _typed(value: Any) -> str:
    """A value as one would type it, cut short where it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    text = " ".join(str(value.value if isinstance(value, Enum) else value).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
