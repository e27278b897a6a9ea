"""Files of every part: configurations that are read, Python files that are imported, lines that are appended, files
that are replaced whole, the format versions of those that outlive a release, the folder of caches, models' folders.

A configuration is YAML, JSON or TOML, read as one mapping and checked by a model. A key that stands twice is refused,
since one of its two values would be lost without a word. What a model does not know is answered with the nearest name
that it knows.
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar, get_args

import msgspec
import yaml
from pydantic import AfterValidator, BaseModel, ValidationError

from headrace.data.errors import InvalidInput, shown
from headrace.data.keys import UnusableKey, usable_key

Model = TypeVar("Model", bound=BaseModel)
Record = TypeVar("Record", bound=msgspec.Struct)
FieldPath = tuple[int | str, ...]
#: A model's field that holds a key, or nothing.
Key = Annotated[str | None, AfterValidator(usable_key)]

MERGE = "tag:yaml.org,2002:merge"
#: What a name on the hub can be: `name` or `owner/name`. Anything else is a path.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w-][\w.-]*)?")
#: The files of a model that are fetched: weights as safetensors, configuration, tokenizer and chat template.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")

#: What files held when another process read them, by their paths.
_handed_on: dict[str, dict[str, Any]] = {}


def hand_on(path: str, held: dict[str, Any]) -> None:
    """Has `read` return `held` for a path in this process: what its parent read there, should the file have changed
    since."""
    _handed_on[path] = held


def read(path: Path) -> dict[str, Any]:
    """The mapping in a file: JSON or TOML where its name ends so, YAML otherwise. An empty file is an empty mapping.
    Raises `InvalidInput` where it cannot be read or holds no mapping."""
    if str(path) in _handed_on:
        return copy.deepcopy(_handed_on[str(path)])
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".json":
            found = json.loads(text, object_pairs_hook=_unique)
        elif path.suffix.lower() == ".toml":
            found = tomllib.loads(text)
        else:
            found = yaml.load(text, _Loader)
    except IsADirectoryError as error:
        inside = next((f"name the file, such as {found}" for found in sorted(path.glob("*.y*ml"))), "name a file")
        raise InvalidInput(f"{path} is a folder; {inside}") from error
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InvalidInput(f"{path} must hold a mapping such as 'name: value', not {type(found).__name__}")
    return found


def checked(model: type[Model], values: Mapping[str, Any], source: object) -> Model:
    """Validates values as a model. Raises `InvalidInput`, which begins with `source` and names each wrong field."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InvalidInput(f"{source}: {'; '.join(explained(error, model))}") from None


def cache_folder() -> Path:
    """The user's folder for what can be made again: `$HEADRACE_CACHE`, or `headrace` in the system's cache folder."""
    if named := os.environ.get("HEADRACE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def expanded(path: str | Path) -> Path:
    """A path with the home folder that its `~` or `~user` means. Raises `InvalidInput` where that has none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InvalidInput(f"{shown(str(path))} names a home folder that is not known here; write it out") from error


def local_model_folder(model: str | Path) -> Path | None:
    """The folder of a model on this machine; None where `model` is no path but could be a name on Hugging Face's hub.
    Raises `InvalidInput` where it is neither."""
    path = expanded(model)
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise InvalidInput(f"{path.absolute()} is a file; a model is a folder, with a config.json")
    if not HUB_NAME.fullmatch(str(model)):
        raise InvalidInput(f"there is no folder {path.absolute()}")
    return None


def model_folder(model: str | Path) -> Path:
    """The folder of a model; one that only the hub has is fetched into the hub's cache, or found there. Raises
    `InvalidInput` where neither has it."""
    found = local_model_folder(model)
    if found is not None:
        return found
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=list(MODEL_FILES)))
    except (OSError, ValueError) as error:
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InvalidInput(
            f"there is no folder {Path(model).absolute()}, and no model {model} could be fetched from the hub: {why}"
        ) from error


def import_file(path: Path, name: str) -> ModuleType:
    """Imports a Python file as the module `name`, which is in `sys.modules` from then on. Raises `InvalidInput` where
    there is no such file, or its name is no Python file's, and whatever the file raises: then it is not there."""
    if not path.is_file():
        raise InvalidInput(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def put_on_path(folder: Path) -> None:
    """Has the modules of a folder found first, as those beside a script are by `python FILE`."""
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))


def check_place(path: Path) -> None:
    """Raises `InvalidInput` where no file can be written to a path, for want of its folder or as it is one: asked
    before the work whose result goes there."""
    if not path.parent.is_dir():
        raise InvalidInput(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise InvalidInput(f"{path} cannot be written: it is a folder; name a file")


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Replaces a file's content, so that readers see the old or the new one, never a part, also where this process is
    killed. `durable`: returns once it is on disk, and would outlive the machine's end too, which takes two fsyncs. One
    writer at a time."""
    draft = path.with_name(f"{path.name}.part")
    with draft.open("wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(draft, path)
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Returns once the names in a folder would outlive the machine's end."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def read_json(path: Path, kind: type[Record]) -> Record:
    """What a program has written into a file with `write_whole`: JSON of this type. Raises `InvalidInput` where it is
    something else, and `FileNotFoundError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error


class WrittenFormat(msgspec.Struct):
    """The `format_version` of a file that is a JSON object; those from before it was told have the first."""

    format_version: int = 1


def check_format(path: Path, data: bytes, newest: int, instead: str) -> None:
    """Raises `InvalidInput` where a file's `data` say that it is of a later format than `newest`, the last one that
    this release knows; `instead` says what to do then. Data that cannot be read are for whoever reads the rest."""
    try:
        written = msgspec.json.decode(data, type=WrittenFormat).format_version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if written > newest:
        raise InvalidInput(
            f"{path} is of format version {written}, and this release reads up to version {newest}; nothing was "
            f"changed: use the release that wrote it, or {instead}"
        )


def append(fd: int, data: bytes) -> None:
    """Appends all of the data, or raises `OSError` and appends nothing: readers of the file see whole lines."""
    before = os.fstat(fd).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError:
        os.ftruncate(fd, before)
        raise


def dotted(path: FieldPath) -> str:
    """A path of fields as configuration files name it: `pool.batch_size`."""
    return ".".join(map(str, path))


def explained(error: ValidationError, model: type[BaseModel], named: Callable[[FieldPath], str] = dotted) -> list[str]:
    """What pydantic found wrong, one sentence for each field; `named` turns a path of fields into its name."""
    found = []
    for line in error.errors():
        path, words = line["loc"], line["msg"].removeprefix("Value error, ")
        if line["type"] == "extra_forbidden":
            found.append(f"{named(path)} is not known{nearest(str(path[-1]), _fields(model, path[:-1]))}")
            continue
        secret = isinstance(line.get("ctx", {}).get("error"), UnusableKey)
        tells = isinstance(line["input"], str | int | float) and not secret
        given = f", not {shown(line['input'])}" if tells else ""
        where = named(path)
        found.append(f"{where}: {words}{given}" if where else words)
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known name that is most like `name`; empty where none is."""
    near = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _fields(model: type[BaseModel], path: FieldPath) -> Iterable[str]:
    """The names that the model at a path of fields knows."""
    for part in path:
        field = model.model_fields.get(str(part))
        if field is None:  # an index of a list, or a member of a union
            continue
        inner = [kind for kind in kinds(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            return ()
        model = inner[0]
    return model.model_fields


def kinds(annotation: Any) -> list[Any]:
    """An annotation and all types inside it: of `list[int] | None` also `list[int]`, `int` and `NoneType`."""
    return [annotation, *(kind for part in get_args(annotation) for kind in kinds(part))]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


class _Loader(yaml.SafeLoader):  # type: ignore[misc] # PyYAML has no types
    """YAML's safe types, and no key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            # Merged mappings (<<) may be overridden: that is what they are for.
            if key.tag != MERGE and isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} stands twice in one mapping", key.start_mark
                    )
                seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found
