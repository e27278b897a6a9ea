"""The files that people write for a gateway: `--models` and `--tenants`, read and checked.

What is unknown or wrong is refused with `InvalidInput`, naming the file, the entry and the key. A batch never mixes two
policies: every recorded model has a channel of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from headrace import files
from headrace.data.errors import InvalidInput, shown
from headrace.data.keys import configured_key, usable_key
from headrace.data.step import check_uid
from headrace.files import nearest
from headrace.gateway.upstream.options import Balancing, LogProbModeAsked, WireAsked
from headrace.gateway.upstream.server import normal_address
from headrace.pool.config import DEFAULT_CHANNEL

T = TypeVar("T", bound=msgspec.Struct)


def fitted(table: Any, kind: type[T], where: str) -> T:
    """A table of a file as the struct `kind`; raises `InvalidInput`, with its place `where`, for any other."""
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
    """The name, where it is one of `names`; raises `InvalidInput` with the nearest otherwise."""
    among = list(names)
    if name in among:
        return name
    hint = nearest(name, among) or f"; known: {', '.join(among) or 'none'}"
    raise InvalidInput(f"{what} {shown(name)} is unknown{hint}")


# -- models ------------------------------------------------------------------------------------------------------------

#: Stands between the name of a trajectory or channel and the model whose steps it holds.
MODEL_SEPARATOR = "@"

#: What a provider may be asked for unless its model says otherwise: calls of models, nothing of its account.
DEFAULT_PASSED_PATHS = frozenset(
    {
        *("chat/completions", "completions", "responses", "messages", "messages/count_tokens"),
        *("embeddings", "rerank", "score", "moderations"),
    }
)

#: A path of `paths`: names that mean themselves wherever they are sent. None of them is `.` or `..`.
_PATH = re.compile(r"(?!\.{1,2}(?:/|$))[\w.~:@-]+(?:/(?!\.{1,2}(?:/|$))[\w.~:@-]+)*", re.ASCII)

Names = str | list[str]
Length = Annotated[int, msgspec.Meta(ge=1)]


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model.

    mode        `train` is recorded; `record` is kept and never trained on; `pass` is forwarded and not recorded
    addresses   its rollout servers, or the one address of a provider; those of --vllm-addresses where none are given
    served      the name that its servers know it by, such as a LoRA adapter's; their first where none is given
    tokenizer   its tokenizer's folder; that of --tokenizer-path where none is given, and where there is none, the root
                that its server tells
    channel     where its steps go, for trajectories that name no channel
    key_env     the environment variable that holds its servers' key
    pattern     other names that mean it, with * and ?
    paths       of a provider: what it may be asked for, behind `/v1`; the calls of SDKs where none are given
    The rest is what the flags of the same names say, for this model alone.
    """

    mode: Literal["train", "record", "pass"] = "train"
    addresses: Names | None = None
    served: str | None = None
    tokenizer: str | None = None
    channel: str | None = None
    key_env: str | None = None
    pattern: Names | None = None
    paths: Names | None = None
    prompt_length: Length | None = None
    response_length: Length | None = None
    history: Literal["bridge", "template"] | None = None
    renderer: str | None = None
    chat_template: str | None = None
    balance: Balancing | None = None
    wire: WireAsked | None = None
    logprobs_mode: LogProbModeAsked | None = None

    @property
    def recorded(self) -> bool:
        """Whether its calls make steps."""
        return self.mode != "pass"

    @property
    def servers(self) -> list[str]:
        """Its `addresses`, one by one, with their scheme; empty where the flags' are meant."""
        return [given if "://" in given else f"http://{given}" for given in _listed(self.addresses)]

    @property
    def patterns(self) -> list[str]:
        """Its `pattern`, one by one."""
        return _listed(self.pattern)

    @property
    def passed(self) -> frozenset[str]:
        """The paths that are passed on to a provider."""
        return DEFAULT_PASSED_PATHS if self.paths is None else frozenset(map(_behind_v1, _listed(self.paths)))

    def key(self) -> str | None:
        """The key for its servers, None without `key_env`; raises `InvalidInput` where the variable is not set."""
        if self.key_env is None:
            return None
        found = configured_key(None, self.key_env)
        if found is None:
            raise InvalidInput(f"key_env names {self.key_env}, which is not set in the environment")
        return found

    def changes(self) -> dict[str, Any]:
        """The flags that it changes, by the names of `GatewaySettings`."""
        given = {
            "vllm_addresses": ",".join(self.servers) or None,
            "tokenizer_path": self.tokenizer,
            **{name: getattr(self, name) for name in _FLAGS},
        }
        return {name: value for name, value in given.items() if value is not None}


#: Settings that a model may have of its own, under their own names.
_FLAGS = (
    *("prompt_length", "response_length", "history", "renderer", "chat_template", "balance", "wire", "logprobs_mode"),
)
#: What says nothing of a model that is only passed on to.
_RECORDED_ONLY = ("tokenizer", "channel", *_FLAGS)


class ModelsFile(msgspec.Struct, frozen=True):
    """All of a file. `default` takes the names that nobody lists; without it, the model of the flags does."""

    models: dict[str, ModelSpec]
    default: str | None = None

    def channel(self, name: str) -> str:
        """Where a recorded model's steps go, for trajectories that name no channel."""
        given = self.models[name].channel
        return given or (DEFAULT_CHANNEL if name == self.default else f"{DEFAULT_CHANNEL}{MODEL_SEPARATOR}{name}")


class _ModelsTable(msgspec.Struct):
    models: dict[str, Any]
    default: str | None = None


def read_models(path: Path) -> ModelsFile:
    """Reads and checks a `--models` file; raises `InvalidInput`, naming the file, the model and the key."""
    top = fitted(files.read(path), _ModelsTable, str(path))
    models = {name: fitted(given, ModelSpec, f"{path}: models.{name}") for name, given in top.models.items()}
    found = ModelsFile(models, top.default)
    try:
        _check(found)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None
    return found


def _check(found: ModelsFile) -> None:
    if found.default is not None:
        known(found.default, found.models, "default: model")
        if found.models[found.default].mode != "train":
            raise InvalidInput(
                f"default is {found.default!r}, which has mode {found.models[found.default].mode}; "
                "name one with mode train, and give the other a pattern such as '*'"
            )
    for name, spec in found.models.items():
        try:
            _check_one(name, spec)
        except InvalidInput as error:
            raise InvalidInput(f"models.{name}: {error}") from None
    taken = {} if found.default is not None else {DEFAULT_CHANNEL: "the model of --vllm-addresses"}
    for name in (name for name, spec in found.models.items() if spec.recorded):
        channel = found.channel(name)
        other = taken.setdefault(channel, repr(name))
        if other != repr(name):
            raise InvalidInput(
                f"models.{name}: channel {channel!r} is that of {other} too, and a batch would mix the two; "
                f"leave it out, and it is {DEFAULT_CHANNEL + MODEL_SEPARATOR + name!r}"
            )


def _check_one(name: str, spec: ModelSpec) -> None:
    check_uid(name, "the name")
    for at, address in enumerate(found := [normal_address(given) for given in _listed(spec.addresses)]):
        if address in found[:at]:
            raise InvalidInput(f"addresses names {address} twice; each server is one")
    spec.key()
    if spec.tokenizer is not None and not spec.tokenizer.strip():
        raise InvalidInput("tokenizer is empty; name a folder, or leave it out: its server tells it")
    if spec.recorded:
        if spec.channel is not None:
            check_uid(spec.channel, "channel")
        if spec.paths is not None:
            raise InvalidInput("paths says nothing of a model that is recorded; leave it out, or set mode: pass")
        return
    if len(spec.servers) != 1:
        raise InvalidInput(f"mode pass needs one address in addresses, not {shown(spec.addresses)}")
    for path in spec.passed:
        if not _PATH.fullmatch(path):
            raise InvalidInput(
                f"paths holds {shown(path)}; a path has names between single slashes, such as chat/completions"
            )
    for field in _RECORDED_ONLY:
        if getattr(spec, field) is not None:
            raise InvalidInput(f"{field} says nothing of a model with mode pass, which is not recorded; leave it out")


def _behind_v1(path: str) -> str:
    return path.strip("/").removeprefix("v1/")


def _listed(given: Names | None) -> list[str]:
    parts = given.split(",") if isinstance(given, str) else given or []
    return [part.strip().rstrip("/") for part in parts if part.strip()]


# -- tenants -----------------------------------------------------------------------------------------------------------

#: What stands between a tenant's name and the uids that its keys name.
UID_SEPARATOR = "/"
#: A key that begins so is in the environment variable of the name behind it.
ENVIRONMENT_PREFIX = "env:"

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class TenantSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant.

    keys            its agents' keys; `env:NAME` is the value of a variable
    reward_keys     its keys for rewards and completions; without any, its agents' open those too, unless --reward-key
    channels        where its trajectories may go; the first is for those that name none
    calls_per_s     requests a second, of any kind; `burst` at once after a pause, otherwise a second's worth
    tokens_per_s    tokens a second, consumed and sampled, counted when a call has ended; a minute's may be saved up
    concurrency     requests under way at once
    max_body_mb     its largest request
    """

    keys: list[str]
    reward_keys: list[str] = []
    channels: list[str] = msgspec.field(default_factory=lambda: [DEFAULT_CHANNEL])
    calls_per_s: Positive | None = None
    burst: Count | None = None
    tokens_per_s: Positive | None = None
    concurrency: Count | None = None
    max_body_mb: Positive | None = None


class _TenantsTable(msgspec.Struct):
    tenants: dict[str, Any]


def read_tenants(path: Path) -> dict[str, TenantSpec]:
    """The tenants of a file by name, their keys in place; an error names the file, the tenant and the key."""
    top = fitted(files.read(path), _TenantsTable, str(path))
    found: dict[str, TenantSpec] = {}
    taken: dict[str, str] = {}
    for name, given in top.tenants.items():
        where = f"{path}: tenants.{name}"
        spec = fitted(given, TenantSpec, where)
        try:
            found[name] = _settled(name, spec)
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from None
        for key in (*found[name].keys, *found[name].reward_keys):
            other = taken.setdefault(key, name)
            if other != name or (found[name].keys + found[name].reward_keys).count(key) > 1:
                raise InvalidInput(f"{where}: one of its keys stands twice, the other time under {other!r}")
    return found


def _settled(name: str, spec: TenantSpec) -> TenantSpec:
    check_uid(name, "the name")
    if UID_SEPARATOR in name:
        raise InvalidInput(f"the name holds a {UID_SEPARATOR!r}, which ends it where its uids begin; choose another")
    if not spec.keys:
        raise InvalidInput("keys is empty; a tenant without a key can do nothing")
    if not spec.channels:
        raise InvalidInput("channels is empty; name those that its trajectories may go to, the usual one first")
    for channel in spec.channels:
        check_uid(channel, "channels")
    if spec.burst is not None and spec.calls_per_s is None:
        raise InvalidInput("burst says how much of calls_per_s may be saved up; give that too")
    keys, reward_keys = ([_key(key) for key in given] for given in (spec.keys, spec.reward_keys))
    return msgspec.structs.replace(spec, keys=keys, reward_keys=reward_keys)


def _key(given: str) -> str:
    if not given.startswith(ENVIRONMENT_PREFIX):
        found = usable_key(given, name="one of its keys")
    else:
        variable = given.removeprefix(ENVIRONMENT_PREFIX)
        found = configured_key(None, variable)
        if not found:
            raise InvalidInput(f"a key is {shown(given)}, and {variable} is not set in the environment")
    if not found:
        raise InvalidInput("a key is empty")
    return found
