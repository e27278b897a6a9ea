"""`Policy`: one model that is recorded, with its own rollout servers, tokenizer, parameters and versions.

It takes calls once its tokenizer is loaded and its servers were found to match.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.gateway.calls import Calls
from headrace.gateway.counters import Counters
from headrace.gateway.errors import not_ready
from headrace.gateway.models.renderers import Renderers
from headrace.gateway.models.spec import MARK
from headrace.gateway.planner import Planner
from headrace.gateway.recorder import Recorder
from headrace.gateway.redaction import Redaction
from headrace.gateway.sampling import Sampling
from headrace.gateway.sessions import Sessions
from headrace.gateway.settings import Settings
from headrace.gateway.upstream import Upstream, UpstreamOptions
from headrace.pool.config import DEFAULT_CHANNEL
from headrace.pool.embedded import DataPool
from headrace.pool.remote import RemotePool
from headrace.tokens import Renderer

log = logging.getLogger("headrace.gateway")

#: What is waited for before a model takes calls, as `/ready` says it.
FINDING = "waiting for a rollout server"
LOADING = "tokenizer still loading"
PROBING = "rollout servers being probed"


class Shared(msgspec.Struct, frozen=True, eq=False):
    """What the policies of one gateway have in common."""

    pool: DataPool | RemotePool
    sessions: Sessions
    recorder: Recorder
    counters: Counters
    redaction: Redaction
    renderers: Renderers


class Policy:
    """One recorded model. Its `name` is empty where it is the one of the command line's flags. Where nobody says where
    its tokenizer lies, its server does.

    The default's steps are the trajectory's own; those of any other are `apart`, in a trajectory `uid@name` of a
    channel of its own. `trained`: its steps may be in a batch.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        shared: Shared,
        *,
        served: str | None = None,
        channel: str = DEFAULT_CHANNEL,
        beside: Policy | None = None,
        trained: bool = True,
    ) -> None:
        """`beside`: the default, where it is another."""
        self.name = name
        self.channel = channel
        self.trained = trained
        self.others: list[Policy] = []  # the default knows those beside it
        self._beside = beside
        self._settings = settings
        self._shared = shared
        if beside is not None:
            beside.others.append(self)
        self.upstream = Upstream(
            settings.addresses,
            UpstreamOptions(
                balance=settings.balance,
                wire=settings.wire,
                log_prob_mode=settings.logprobs_mode,
                connect_s=settings.connect_s,
                idle_s=settings.idle_s,
                call_s=settings.call_s,
                api_key=settings.upstream_key,
                model=served,
            ),
        )
        self._calls: Calls | None = None
        self._stage = LOADING if settings.tokenizer_path is not None else FINDING
        self._tokenizer = settings.tokenizer_path or ""  # where it lies, and who said so
        #: Why it will never take calls.
        self.failure: Exception | None = None

    # -- its life ------------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Returns once it takes calls, but for its servers, or `failure` says why it never will."""
        settings, shared = self._settings, self._shared
        try:
            renderer = await self._renderer()
            self._stage = PROBING
            await self._adopt_version()
            await self.upstream.start(renderer.vocabulary)
        except ModuleNotFoundError as error:
            self.failure = error
            return
        except (HeadraceError, OSError) as error:
            self.failure = HeadraceError(self._own(str(error)))
            return
        except Exception as error:  # tokenizers' own errors have no type of their own
            log.debug("the tokenizer could not be loaded", exc_info=True)
            said = f"no tokenizer could be loaded from {self._tokenizer}: {type(error).__name__}: {error}"
            self.failure = HeadraceError(self._own(said))
            return
        planner = Planner(
            renderer,
            shared.sessions,
            Sampling(settings),
            shared.counters,
            mode=settings.history,
            shared=not isinstance(shared.pool, DataPool),
        )
        self._calls = Calls(
            *(planner, self.upstream, shared.sessions, shared.recorder, shared.counters, shared.redaction),
            trained=self.trained,
        )

    async def _renderer(self) -> Renderer:
        """What its tokenizer and template do, from the folder that was given or that its server tells."""
        given, load = self._settings.tokenizer_path, self._shared.renderers.load
        if given is not None:
            return await load(given, self._settings.renderer)
        self._shared.renderers.prepare()
        address, root = await self.upstream.root()
        self._tokenizer = f"{root} (the root of the model at {address})"
        self._stage = LOADING
        try:
            return await load(root, self._settings.renderer)
        except InvalidInput as error:
            raise InvalidInput(
                f"rollout server {address} says that its model's root is {root!r}, where there is no tokenizer on this "
                f"machine; give --tokenizer-path the model's folder ({error})"
            ) from error

    async def close(self) -> None:
        if self._calls is not None:
            self._calls.planner.close()
        await self.upstream.close()

    # -- its calls -----------------------------------------------------------------------------------------------------

    @property
    def loaded(self) -> bool:
        return self._calls is not None

    @property
    def why_not_ready(self) -> str | None:
        """As `/ready` says it; None from the moment on at which a call found a server."""
        missing = self.upstream.missing
        return self._why_no_calls or (f"Gateway not ready ({self._own(missing)})" if missing else None)

    @property
    def waits_for(self) -> str | None:
        """What is waited for, for whoever started it; None where `why_not_ready` is None."""
        if self._calls is None and self._stage == LOADING:
            return self._own(f"loading the tokenizer {self._tokenizer}")
        if self._calls is None and self._stage == PROBING:
            return self._own(f"probing {', '.join(self.upstream.versions)}")
        waits = self.upstream.trouble or self.upstream.missing
        return self._own(waits) if waits else None

    @property
    def _why_no_calls(self) -> str | None:
        """Why no call can be carried out, whatever servers there are."""
        if self.failure is not None:
            return f"Gateway not ready: {self.failure}"
        if self._calls is None:
            missing = self.upstream.missing if self._stage == FINDING else None
            return f"Gateway not ready ({self._own(missing or self._stage)})"
        trouble = self.upstream.trouble
        return f"Gateway not ready: {self._own(trouble)}" if trouble else None

    @property
    def calls(self) -> Calls:
        """What carries its calls out; `Refusal` until it can. A call that then finds no server up says so itself."""
        why = self._why_no_calls
        if why is not None or self._calls is None:
            raise not_ready(why or f"Gateway not ready ({self._stage})")
        return self._calls

    # -- where its steps go --------------------------------------------------------------------------------------------

    @property
    def apart(self) -> bool:
        return self._beside is not None

    def uid_of(self, uid: str) -> str:
        """The trajectory that holds its steps, for an agent's trajectory."""
        return f"{uid}{MARK}{self.name}" if self.apart else uid

    def channel_of(self, channel: str) -> str:
        """The channel that they go to, for an agent's trajectory in that one."""
        if self._beside is None:
            return channel
        return self.channel if channel == self._beside.channel else f"{channel}{MARK}{self.name}"

    def owns(self, channel: str) -> bool:
        """Whether its steps go to a channel; the default's go wherever no other's do."""
        if self._beside is None:
            return not any(other.owns(channel) for other in self.others)
        return channel == self.channel or channel.endswith(MARK + self.name)

    # -- its versions --------------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, Any]:
        return {"version": self.upstream.version, "servers": self.upstream.versions}

    async def set_version(self, version: int, server: str | None, *, tell_pool: bool) -> None:
        """What its servers, or one of them, sample with from now on. What the pool refuses holds nowhere."""
        upstream = self.upstream
        newest, before = upstream.version, upstream.versions
        upstream.set_version(version, server)
        try:
            if tell_pool:
                await self._tell_pool()
        except InvalidInput:
            upstream.set_version(newest)
            for address, known in before.items():
                upstream.set_version(known, address)
            raise
        await upstream.note_versions(server)

    async def _tell_pool(self) -> None:
        """The pool's channels learn the version; where there are several models, only those of this one."""
        pool, version = self._shared.pool.aio, self.upstream.version
        if not self.apart and not self.others:
            await pool.set_version(version)
            return
        for channel in {self.channel, *filter(self.owns, (await pool.stats()).get("channels", {}))}:
            await pool.set_version(version, channel)

    async def _adopt_version(self) -> None:
        """A restarted gateway goes on with the version that the pool knows, unless it was told one meanwhile."""
        try:
            stats = await self._shared.pool.aio.stats()
        except HeadraceError as error:
            log.warning("the pool's version is not known: %s", error)
            return
        if any(self.upstream.versions.values()):
            return
        known = [
            int(found.get("policy_version", 0)) for name, found in stats.get("channels", {}).items() if self.owns(name)
        ]
        self.upstream.set_version(max(known, default=0))

    def _own(self, said: str) -> str:
        """What is said of one of several models names it."""
        return said if not self.name else f"model {self.name!r}: {said}"
