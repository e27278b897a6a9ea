"""`Models`: every model of one gateway by name. A name that nobody lists means the default."""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.data.errors import HeadraceError
from headrace.gateway.errors import Refusal
from headrace.gateway.models.policy import Policy, Shared
from headrace.gateway.models.provider import Provider
from headrace.gateway.models.spec import MARK, ModelsFile, ModelSpec, read_models
from headrace.gateway.settings import GatewaySettings


class _Named(msgspec.Struct):
    model: str | None = None


_decode = msgspec.json.Decoder(_Named).decode


class Models:
    def __init__(self, settings: GatewaySettings, shared: Shared) -> None:
        file = read_models(Path(settings.models)) if settings.models is not None else ModelsFile({})
        self._patterns = [(pattern, name) for name, spec in file.models.items() for pattern in spec.patterns]
        self._providers = {
            name: Provider(name, spec, settings) for name, spec in file.models.items() if not spec.recorded
        }
        self.default = _default(file, settings, shared)
        self._policies: dict[str, Policy] = {self.default.name: self.default}
        for name, spec in file.models.items():
            if spec.recorded and name != file.default:
                own = _own(settings, spec)
                self._policies[name] = Policy(
                    *(name, own, shared),
                    served=spec.served,
                    channel=file.channel(name),
                    beside=self.default,
                    trained=spec.mode == "train",
                )
        self._listed = list(file.models)

    def __iter__(self) -> Iterator[Policy]:
        """Those that are recorded, the default first."""
        return iter(self._policies.values())

    async def load(self) -> None:
        await asyncio.gather(*(policy.load() for policy in self))

    async def close(self) -> None:
        for policy in self:
            await policy.close()
        for provider in self._providers.values():
            await provider.close()

    async def pause(self, mode: str, name: str | None, lease_s: float) -> None:
        """Holds the calls of one recorded model, or of all; where one cannot be held, none is."""
        held: list[Policy] = []
        try:
            for policy in self._concerned(name):
                await policy.upstream.pause(mode, lease_s)
                held.append(policy)
        except HeadraceError:
            for policy in held:
                await policy.upstream.resume()
            raise

    async def resume(self, name: str | None) -> None:
        for policy in self._concerned(name):
            await policy.upstream.resume()

    def _concerned(self, name: str | None) -> list[Policy]:
        return list(self) if name is None else [self.asked(name)]

    # -- by name -------------------------------------------------------------------------------------------------------

    def called(self, name: str) -> Policy:
        """The recorded model that a call's name means."""
        if not self._listed:
            return self.default
        return self._policies.get(self._meant(name), self.default)

    @property
    def passing(self) -> bool:
        """Whether there are models that calls are only passed on to."""
        return bool(self._providers)

    def provider(self, body: bytes) -> Provider | None:
        """Whom a body is to be passed on to; None where it is recorded, or no call at all."""
        if not self._providers:
            return None
        try:
            name = _decode(body).model
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None  # what is wrong with it is for its dialect to say
        return None if name is None else self._providers.get(self._meant(name))

    def asked(self, name: str | None) -> Policy:
        """The recorded model of that very name; without one, the default."""
        if name is None:
            return self.default
        found = self._policies.get(name)
        if found is None:
            recorded = ", ".join(policy.name for policy in self if policy.name) or "none"
            raise Refusal(f"no recorded model {name!r}; there are: {recorded}", 404, code="unknown_model")
        return found

    def listed(self, served: dict[str, Any]) -> dict[str, Any]:
        """What `/v1/models` answers: what the default's servers say, and the names of the file."""
        cards = served.get("data")
        known = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
        there = {card.get("id") for card in known}
        more = [{"id": name, "object": "model", "created": 0, "owned_by": "headrace"} for name in self._listed]
        return {**served, "data": [*known, *(card for card in more if card["id"] not in there)]}

    def servers(self) -> list[dict[str, Any]]:
        """The rollout servers of all that are recorded; where there are several, each says of which."""
        return [
            {**found, **({"policy": policy.name} if self._listed else {})}
            for policy in self
            for found in policy.upstream.describe()
        ]

    def gauges(self) -> dict[str, tuple[str, list[tuple[dict[str, str], float]]]]:
        """What Prometheus reads of each; where there are several, by model."""
        up, events, versions = [], [], []
        for policy in self:
            own = {"model": policy.name} if self._listed else {}
            upstream = policy.upstream
            versions.append((own, float(upstream.version)))
            up += [({**own, "server": s["address"]}, float(s["state"] == "up")) for s in upstream.describe()]
            events += [({**own, "event": name}, float(n)) for name, n in sorted(upstream.counters.items())]
        return {
            "policy_version": ("the newest policy version", versions),
            "server_up": ("1 where a rollout server takes calls", up),
            "upstream": ("what happened on the way to rollout servers", events),
        }

    def check(self, uid: str) -> None:
        """Refuses a trajectory's name under which another model's steps are kept."""
        for policy in self.default.others:
            if uid.endswith(MARK + policy.name):
                raise Refusal(
                    f"trajectory_uid is {uid!r}: what ends in {MARK + policy.name!r} holds the steps of that model; "
                    f"call and end {uid.removesuffix(MARK + policy.name)!r}",
                    400,
                    code="reserved_uid",
                )

    def _meant(self, name: str) -> str:
        if name in self._policies or name in self._providers:
            return name
        return next((meant for pattern, meant in self._patterns if fnmatch.fnmatchcase(name, pattern)), "")


def _default(file: ModelsFile, settings: GatewaySettings, shared: Shared) -> Policy:
    if file.default is None:
        return Policy("", settings, shared)
    spec = file.models[file.default]
    own = _own(settings, spec)
    return Policy(file.default, own, shared, served=spec.served, channel=file.channel(file.default))


def _own(settings: GatewaySettings, spec: ModelSpec) -> GatewaySettings:
    """The settings of one model."""
    given = {**settings.model_dump(), **spec.changes(), "models": None}
    if spec.key_env is not None or spec.servers:
        given["upstream_key"] = spec.key()  # the flags' key is for the flags' servers
    return GatewaySettings(**given)
