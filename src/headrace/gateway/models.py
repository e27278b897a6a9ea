"""Every model of one gateway by name: those that are recorded, and providers that calls are only passed on to.

A name that nobody lists means the default. What is passed on is answered as the provider answers it, and not recorded:
it may be a judge, or somebody's API. The gateway's own keys never leave.
"""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.datastructures import Headers
from yarl import URL

from headrace.data.errors import HeadraceError
from headrace.gateway.config_files import MODEL_SEPARATOR, ModelsFile, ModelSpec, read_models
from headrace.gateway.errors import Refusal
from headrace.gateway.http import ResponseWriter
from headrace.gateway.served_model import ServedModel, SharedServices
from headrace.gateway.settings import GatewaySettings
from headrace.gateway.upstream.errors import RolloutServerFailed
from headrace.net.async_client import AsyncHttpClient
from headrace.net.http_answer import NoAnswer


class _Named(msgspec.Struct):
    model: str | None = None


_decode = msgspec.json.Decoder(_Named).decode


class Models:
    """The models of one gateway; iterating gives those that are recorded, the default first."""

    def __init__(self, settings: GatewaySettings, shared: SharedServices) -> None:
        file = read_models(Path(settings.models)) if settings.models is not None else ModelsFile({})
        self._patterns = [(pattern, name) for name, spec in file.models.items() for pattern in spec.patterns]
        self._providers = {
            name: Provider(name, spec, settings) for name, spec in file.models.items() if not spec.recorded
        }
        self.default = _default(file, settings, shared)
        self._recorded: dict[str, ServedModel] = {self.default.name: self.default}
        for name, spec in file.models.items():
            if spec.recorded and name != file.default:
                own = _own(settings, spec)
                self._recorded[name] = ServedModel(
                    *(name, own, shared),
                    served=spec.served,
                    channel=file.channel(name),
                    default=self.default,
                    trained=spec.mode == "train",
                )
        self._listed = list(file.models)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._recorded.values())

    async def load(self) -> None:
        """Returns once every recorded model takes calls, or its `failure` says why it never will."""
        await asyncio.gather(*(model.load() for model in self))

    async def close(self) -> None:
        """Lets go of all servers and providers."""
        for model in self:
            await model.close()
        for provider in self._providers.values():
            await provider.close()

    async def pause(self, mode: str, name: str | None, lease_s: float) -> None:
        """Pauses one recorded model, or all for None; where one cannot be paused, none is. `Refusal` (409) where a
        pause was ended while calls in flight were waited for: by a resume, or by its lease."""
        held: list[ServedModel] = []
        try:
            for model in self._concerned(name):
                await model.upstream.pause(mode, lease_s)
                held.append(model)
            if not all(model.upstream.paused for model in held):
                raise Refusal(
                    "the pause was ended before the calls in flight were: by a resume, or by its lease of "
                    f"{lease_s:g} s. Nothing is paused; ask again, with a longer lease_s or another mode",
                    409,
                    code="pause_ended",
                )
        except HeadraceError:
            for model in held:
                await model.upstream.resume()
            raise

    async def resume(self, name: str | None) -> None:
        """Resumes one recorded model, or all for None; raises `Refusal` where there is none of that name."""
        for model in self._concerned(name):
            await model.upstream.resume()

    def _concerned(self, name: str | None) -> list[ServedModel]:
        return list(self) if name is None else [self.get(name)]

    # -- by name -------------------------------------------------------------------------------------------------------

    def resolve(self, name: str) -> ServedModel:
        """The recorded model that a name in a call means; the default for names that nobody lists."""
        if not self._listed:
            return self.default
        return self._recorded.get(self._meant(name), self.default)

    @property
    def passing(self) -> bool:
        """Whether there are models that calls are only passed on to."""
        return bool(self._providers)

    def provider(self, body: bytes) -> Provider | None:
        """The provider that a call's body is to be passed on to; None where it is recorded, or no call at all."""
        if not self._providers:
            return None
        try:
            name = _decode(body).model
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None  # what is wrong with it is for its dialect to say
        return None if name is None else self._providers.get(self._meant(name))

    def get(self, name: str | None) -> ServedModel:
        """The recorded model of exactly that name, the default for None and ""; raises `Refusal` where there is
        none."""
        if not name:
            return self.default
        found = self._recorded.get(name)
        if found is None:
            recorded = ", ".join(model.name for model in self if model.name) or "none"
            raise Refusal(f"no recorded model {name!r}; there are: {recorded}", 404, code="unknown_model")
        return found

    def listed(self, served: dict[str, Any]) -> dict[str, Any]:
        """The answer of `/v1/models`: what the default's servers list, and the names of the file."""
        cards = served.get("data")
        known = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
        there = {card.get("id") for card in known}
        more = [{"id": name, "object": "model", "created": 0, "owned_by": "headrace"} for name in self._listed]
        return {**served, "data": [*known, *(card for card in more if card["id"] not in there)]}

    def servers(self) -> list[dict[str, Any]]:
        """The rollout servers of all that are recorded; where there are several, each says of which."""
        return [
            {**found, **({"policy": model.name} if self._listed else {})}
            for model in self
            for found in model.upstream.describe()
        ]

    def gauges(self) -> dict[str, tuple[str, list[tuple[dict[str, str], float]]]]:
        """Prometheus gauges of the recorded models; where there are several, labelled by model."""
        up, events, versions, unread = [], [], [], []
        for model in self:
            own = {"model": model.name} if self._listed else {}
            upstream = model.upstream
            versions.append((own, float(upstream.version)))
            unread.append((own, float(model.warning is not None)))
            up += [({**own, "server": s["address"]}, float(s["state"] == "up")) for s in upstream.describe()]
            events += [({**own, "event": name}, float(n)) for name, n in sorted(upstream.counters.items())]
        return {
            "policy_version": ("the newest policy version", versions),
            "server_up": ("1 where a rollout server takes calls", up),
            "upstream": ("what happened on the way to rollout servers", events),
            "calls_unread": ("1 where tool calls in the model's answers are not read", unread),
        }

    def check(self, uid: str) -> None:
        """Refuses a trajectory's name under which another model's steps are kept."""
        for model in self.default.others:
            suffix = MODEL_SEPARATOR + model.name
            if uid.endswith(suffix):
                raise Refusal(
                    f"trajectory_uid is {uid!r}: what ends in {suffix!r} holds the steps of that model; "
                    f"call and end {uid.removesuffix(suffix)!r}",
                    400,
                    code="reserved_uid",
                )

    def _meant(self, name: str) -> str:
        if name in self._recorded or name in self._providers:
            return name
        return next((meant for pattern, meant in self._patterns if fnmatch.fnmatchcase(name, pattern)), "")


def _default(file: ModelsFile, settings: GatewaySettings, shared: SharedServices) -> ServedModel:
    if file.default is None:
        return ServedModel("", settings, shared)
    spec = file.models[file.default]
    own = _own(settings, spec)
    return ServedModel(file.default, own, shared, served=spec.served, channel=file.channel(file.default))


def _own(settings: GatewaySettings, spec: ModelSpec) -> GatewaySettings:
    """The settings of one model."""
    given = {**settings.model_dump(), **spec.changes(), "models": None}
    if spec.key_env is not None or spec.servers:
        given["upstream_key"] = spec.key()  # the flags' key is for the flags' servers
    return GatewaySettings(**given)


#: Headers that concern one connection only, and those that a request says anew.
HOP_HEADERS = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade"),
        "transfer-encoding",
    }
)
UNSENT_HEADERS = HOP_HEADERS | {"host", "content-length", "expect"}
KEY_HEADERS = ("authorization", "x-api-key")
OWN_HEADER_PREFIX = "x-headrace-"
#: Seconds that an idle connection is kept: a provider is far away, and connecting to it takes a while.
PROVIDER_KEEP_ALIVE_S = 15.0


class Provider:
    """A model that calls are passed on to as they are."""

    def __init__(self, name: str, spec: ModelSpec, settings: GatewaySettings) -> None:
        self.name = name
        (self._address,) = spec.servers
        self._served = spec.served
        self._passed = spec.passed
        self._key = spec.key()
        self._keyed = settings.keyed
        self._client = AsyncHttpClient(
            total_s=settings.call_s,
            connect_s=settings.connect_s,
            idle_s=settings.idle_s,
            keep_alive_s=PROVIDER_KEEP_ALIVE_S,
            verbatim=True,
        )

    async def forward(self, headers: Headers, rest: str, body: bytes, sending: ResponseWriter) -> None:
        """Sends a call on and its answer back, byte by byte; `rest` is its path behind the base URL.

        Raises `Refusal` for a path that is not passed on, `RolloutServerFailed` where the provider does not answer."""
        try:
            async with self._client.stream(
                "POST", self._url(rest), self._named(body), headers=self._sent(headers)
            ) as answer:
                await sending.relay(answer.status, [each for each in answer.headers if each[0] not in HOP_HEADERS])
                async for part in answer.parts():
                    await sending.pass_on(part)
            await sending.pass_on(b"", more=False)
        except NoAnswer as error:
            said = f"the provider of model {self.name!r} failed: {error.reason}"
            raise RolloutServerFailed(said, "unreachable") from error

    async def close(self) -> None:
        await self._client.close()

    def _url(self, rest: str) -> URL:
        """The provider's URL for a path. An address with a path is the SDK's whole base URL; to a bare one, `/v1` is
        added."""
        path, _, query = rest.partition("?")
        path = unquote(path).removeprefix("v1/")
        if path not in self._passed:
            raise Refusal(
                f"model {self.name!r} is passed on to its provider for {', '.join(sorted(self._passed))}, not for "
                f"{path[:200]!r}; `paths` of the model in the --models file says what else",
                404,
                code="path_not_passed",
            )
        base = self._address if URL(self._address).path.strip("/") else f"{self._address}/v1"
        return URL(f"{base}/{path}{f'?{query}' if query else ''}", encoded=True)

    def _named(self, body: bytes) -> bytes:
        """The body as it came, unless the provider knows the model by another name."""
        if self._served is None:
            return body
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return msgspec.json.encode({**fields, "model": self._served})

    def _sent(self, headers: Headers) -> dict[str, str]:
        """The agent's own headers. Its key goes along only where it cannot be one of the gateway's."""
        sent = {
            name: value
            for name, value in headers.items()
            if name not in UNSENT_HEADERS and not name.startswith(OWN_HEADER_PREFIX)
        }
        if self._key is None and not self._keyed:
            return sent
        used = [name for name in KEY_HEADERS if sent.pop(name, None) is not None] or ["authorization"]
        if self._key is not None:
            sent |= {name: f"Bearer {self._key}" if name == "authorization" else self._key for name in used}
        return sent
