"""One model that is recorded, with its own rollout servers, tokenizer, parameters and versions.

It takes calls once its tokenizer is loaded and its servers were found to match. Each tokenizer is loaded once, in a
thread that nobody waits for at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import Any

import msgspec

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.gateway.config_files import MODEL_SEPARATOR
from headrace.gateway.counters import GatewayCounters
from headrace.gateway.errors import not_ready
from headrace.gateway.executor import CallExecutor
from headrace.gateway.planner import Planner
from headrace.gateway.recorder import Recorder
from headrace.gateway.redaction import Redaction
from headrace.gateway.request import SamplingRules
from headrace.gateway.sessions import Sessions
from headrace.gateway.settings import GatewaySettings
from headrace.gateway.upstream import Upstream, UpstreamOptions
from headrace.pool.config import DEFAULT_CHANNEL
from headrace.pool.embedded import DataPool
from headrace.pool.remote import RemotePool
from headrace.tokens import Renderer, load_renderer

log = logging.getLogger("headrace.gateway")


class RendererCache:
    """Loads renderers; models that name the same folder, family and template share one."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str | None], asyncio.Future[Renderer]] = {}
        self._importing: threading.Thread | None = None

    def prepare(self) -> threading.Thread:
        """Begins to import what any tokenizer needs, before it is known which one; what fails here fails in `load`.
        Returns the thread that imports, the same each time: transformers puts another module in its own place when its
        import ends, and a thread that imported it meanwhile would be left with the first, in which nothing is."""
        if self._importing is None:
            self._importing = threading.Thread(target=import_libraries, name="headrace-import", daemon=True)
            self._importing.start()
        return self._importing

    async def load(self, path: str, family: str, chat_template: str | None = None) -> Renderer:
        """The renderer of the tokenizer in a folder; raises what `load_renderer` raises."""
        asked = (path, family, chat_template)
        found = self._known.get(asked)
        if found is None:
            found = self._known[asked] = _load_in_thread(self.prepare(), *asked)
        return await asyncio.shield(found)


def import_libraries() -> None:
    """Imports what any tokenizer needs, for those who import it next; who needs what is missing says so."""
    with contextlib.suppress(ImportError):
        from transformers import AutoTokenizer  # noqa: F401


def _load_in_thread(
    importing: threading.Thread, path: str, family: str, chat_template: str | None
) -> asyncio.Future[Renderer]:
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Renderer] = loop.create_future()

    def told(outcome: Renderer | BaseException) -> None:
        if loaded.done():
            return
        if isinstance(outcome, BaseException):
            loaded.set_exception(outcome)
        else:
            loaded.set_result(outcome)

    def load() -> None:
        importing.join()
        try:
            outcome: Renderer | BaseException = load_renderer(path, family, chat_template)
        except BaseException as error:
            outcome = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(told, outcome)

    threading.Thread(target=load, name="headrace-tokenizer", daemon=True).start()
    return loaded


#: The name of the renderer that reads calls by the grammar alone; the others have a library's parser beside it.
TEMPLATE = "template"
#: What is waited for before a model takes calls, as `/ready` says it.
WAITING_FOR_SERVER = "waiting for a rollout server"
LOADING_TOKENIZER = "tokenizer still loading"
PROBING_SERVERS = "rollout servers being probed"


class SharedServices(msgspec.Struct, frozen=True, eq=False):
    """What the models of one gateway share."""

    pool: DataPool | RemotePool
    sessions: Sessions
    recorder: Recorder
    counters: GatewayCounters
    redaction: Redaction | None
    renderers: RendererCache


class ServedModel:
    """One recorded model. Its `name` is empty where it is the one of the command line's flags. Where the settings name
    no tokenizer, the folder is asked of its server.

    The default model's steps go into the agent's own trajectory; those of any other into a trajectory `uid@name` of a
    channel of its own. `trained`: its steps may be in a batch.
    """

    def __init__(
        self,
        name: str,
        settings: GatewaySettings,
        shared: SharedServices,
        *,
        served: str | None = None,
        channel: str = DEFAULT_CHANNEL,
        default: ServedModel | None = None,
        trained: bool = True,
    ) -> None:
        """`default` is the gateway's default model, None where this is it."""
        self.name = name
        self.channel = channel
        self.trained = trained
        #: The other recorded models; only the default has any.
        self.others: list[ServedModel] = []
        self._default = default
        self._settings = settings
        self._shared = shared
        if default is not None:
            default.others.append(self)
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
        self._calls: CallExecutor | None = None
        self._loaded: Renderer | None = None
        self._stage = LOADING_TOKENIZER if settings.tokenizer_path is not None else WAITING_FOR_SERVER
        self._tokenizer = settings.tokenizer_path or ""  # where it lies, and who said so
        self._tools_warned = False
        #: Why it will never take calls.
        self.failure: Exception | None = None

    # -- start and end -------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Returns once it takes calls, but for its servers, or `failure` says why it never will."""
        settings, shared = self._settings, self._shared
        try:
            renderer = self._loaded = await self._renderer()
            self._stage = PROBING_SERVERS
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
            SamplingRules(settings),
            shared.counters,
            mode=settings.history,
            shared=not isinstance(shared.pool, DataPool),
        )
        self._calls = CallExecutor(
            *(planner, self.upstream, shared.sessions, shared.recorder, shared.counters, shared.redaction),
            trained=self.trained,
        )
        if self.warning is not None:
            log.warning("%s", self.warning)

    async def _renderer(self) -> Renderer:
        """Loads its tokenizer and template, from the folder that was given or that its server tells."""
        given, load = self._settings.tokenizer_path, self._shared.renderers.load
        if given is not None:
            return await load(given, self._settings.renderer, self._settings.chat_template)
        self._shared.renderers.prepare()
        address, root = await self.upstream.root()
        self._tokenizer = f"{root} (the root of the model at {address})"
        self._stage = LOADING_TOKENIZER
        try:
            return await load(root, self._settings.renderer, self._settings.chat_template)
        except InvalidInput as error:
            raise InvalidInput(
                f"rollout server {address} says that its model's root is {root!r}, where there is no tokenizer on this "
                f"machine; give --tokenizer-path the model's folder ({error})"
            ) from error

    async def close(self) -> None:
        """Lets go of its threads and servers."""
        if self._calls is not None:
            self._calls.planner.close()
        await self.upstream.close()

    # -- its calls -----------------------------------------------------------------------------------------------------

    @property
    def loaded(self) -> bool:
        """Whether its tokenizer is there, and its servers were probed."""
        return self._calls is not None

    @property
    def why_not_ready(self) -> str | None:
        """What `/ready` says; None once a call can be carried out and a server was up."""
        missing = self.upstream.missing
        return self._why_no_calls or (f"Gateway not ready ({self._own(missing)})" if missing else None)

    @property
    def waits_for(self) -> str | None:
        """What a start waits for, as the command line shows it; None where `why_not_ready` is None."""
        if self._calls is None and self._stage == LOADING_TOKENIZER:
            return self._own(f"loading the tokenizer {self._tokenizer}")
        if self._calls is None and self._stage == PROBING_SERVERS:
            return self._own(f"probing {', '.join(self.upstream.versions)}")
        waits = self.upstream.trouble or self.upstream.missing
        return self._own(waits) if waits else None

    @property
    def _why_no_calls(self) -> str | None:
        """Why no call can be carried out, whatever servers there are."""
        if self.failure is not None:
            return f"Gateway not ready: {self.failure}"
        if self._calls is None:
            missing = self.upstream.missing if self._stage == WAITING_FOR_SERVER else None
            return f"Gateway not ready ({self._own(missing or self._stage)})"
        trouble = self.upstream.trouble
        return f"Gateway not ready: {self._own(trouble)}" if trouble else None

    @property
    def calls(self) -> CallExecutor:
        """Carries out its calls; raises `Refusal` until it is loaded and its servers match. A call that then finds no
        server up fails by itself."""
        why = self._why_no_calls
        if why is not None or self._calls is None:
            raise not_ready(why or f"Gateway not ready ({self._stage})")
        return self._calls

    @property
    def warning(self) -> str | None:
        """What an agent misses although calls are taken: its tools, where this model's calls are not read."""
        renderer = self._loaded
        if renderer is None or renderer.name != TEMPLATE or not renderer.grammar.unread:
            return None
        return self._own(f"tool calls in answers are not read, and come back as text: {renderer.grammar.unread}")

    def tools_offered(self) -> str | None:
        """The warning for a call that offers tools; the first one is in the log too."""
        warning = self.warning
        if warning is not None and not self._tools_warned:
            self._tools_warned = True
            log.warning("an agent offers tools, but %s", warning)
        return warning

    @property
    def renderer(self) -> Renderer:
        """Its tokenizer and template; raises `Refusal` until they are loaded. No server need be up."""
        if self._loaded is None:
            raise not_ready(self._why_no_calls or f"Gateway not ready ({self._stage})")
        return self._loaded

    # -- where its steps go --------------------------------------------------------------------------------------------

    @property
    def is_default(self) -> bool:
        """Whether its steps go into the agent's own trajectory."""
        return self._default is None

    def uid_of(self, uid: str) -> str:
        """The trajectory that its steps go to, for an agent's trajectory `uid`."""
        return uid if self.is_default else f"{uid}{MODEL_SEPARATOR}{self.name}"

    def channel_of(self, channel: str) -> str:
        """The channel that its steps go to, for an agent's trajectory in `channel`."""
        if self._default is None:
            return channel
        return self.channel if channel == self._default.channel else f"{channel}{MODEL_SEPARATOR}{self.name}"

    def owns(self, channel: str) -> bool:
        """Whether its steps go to a channel; the default's go wherever no other's do."""
        if self._default is None:
            return not any(other.owns(channel) for other in self.others)
        return channel == self.channel or channel.endswith(MODEL_SEPARATOR + self.name)

    # -- its versions --------------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, Any]:
        """What `/policy_version` answers: the newest version, and each server's."""
        return {"version": self.upstream.version, "servers": self.upstream.versions}

    async def set_version(
        self, version: int, server: str | None, adapter: str | None = None, *, tell_pool: bool
    ) -> None:
        """Sets the version that its servers, or one of them, sample with from now on, and by which adapter. Where the
        pool refuses it (`InvalidInput`), nothing is changed."""
        upstream = self.upstream
        await upstream.catch_up()
        newest, before, adapters = upstream.version, upstream.versions, upstream.adapters
        upstream.set_version(version, server, adapter)
        try:
            if tell_pool:
                await self._tell_pool()
        except InvalidInput:
            upstream.set_version(newest)
            for address, known in before.items():
                upstream.set_version(known, address, adapters[address])
            raise
        await upstream.note_versions(server)

    async def _tell_pool(self) -> None:
        """Tells the pool's channels the version; where there are several models, only this one's."""
        pool, version = self._shared.pool.aio, self.upstream.version
        if self.is_default and not self.others:
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
        """A text about this model, with its name where there are several."""
        return said if not self.name else f"model {self.name!r}: {said}"
