"""All rollout servers, their health, and which of them takes a request.

A server takes requests only while it is `up`, and only a probe makes it that. Balancing is pure: what it looks at is
handed in, and nothing is awaited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from headrace.data.errors import InvalidInput, shown
from headrace.gateway.upstream.errors import RolloutServerFailed
from headrace.gateway.upstream.gate import Gate
from headrace.gateway.upstream.http_client import UpstreamClient
from headrace.gateway.upstream.options import Balancing, UpstreamOptions
from headrace.gateway.upstream.server import (
    ServerProbe,
    ServerState,
    Unfit,
    Unverified,
    UpstreamServer,
    model_root,
    normal_address,
)
from headrace.tokens.vocabulary import Vocabulary

log = logging.getLogger("headrace.gateway.upstream")

C = TypeVar("C", bound="Candidate")


class Candidate(Protocol):
    """A server, as far as balancing sees it."""

    @property
    def address(self) -> str: ...

    @property
    def in_flight(self) -> int: ...


class Balancer(Protocol):
    """Decides which server takes a request."""

    def pick(self, candidates: Sequence[C], sticky: str) -> C:
        """One of the candidates, of which there is at least one."""
        ...


class RoundRobin:
    """One server after the other."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, candidates: Sequence[C], sticky: str = "") -> C:
        at = self._next % len(candidates)
        self._next = at + 1
        return candidates[at]


class Sticky:
    """All requests with the same `sticky` key to one server, by rendezvous hashing: a server that leaves moves only its
    own. Requests without a key go round-robin.
    """

    def __init__(self) -> None:
        self._rest = RoundRobin()

    def pick(self, candidates: Sequence[C], sticky: str = "") -> C:
        if not sticky:
            return self._rest.pick(candidates)
        if len(candidates) == 1:
            return candidates[0]
        key = sticky.encode("utf-8", "surrogatepass")
        return max(candidates, key=lambda candidate: rendezvous_weight(candidate.address, key))


class LeastBusy:
    """The server with the fewest calls in flight; among equals, one after the other."""

    def __init__(self) -> None:
        self._among = RoundRobin()

    def pick(self, candidates: Sequence[C], sticky: str = "") -> C:
        least = min(candidate.in_flight for candidate in candidates)
        return self._among.pick([candidate for candidate in candidates if candidate.in_flight == least])


def rendezvous_weight(address: str, key: bytes) -> bytes:
    """A server's weight for a key; the server with the highest one has the key."""
    return blake2b(key, digest_size=8, key=blake2b(address.encode(), digest_size=16).digest()).digest()


def balancer_of(name: Balancing) -> Balancer:
    """The balancer of that name in the options."""
    found: dict[Balancing, type[Balancer]] = {"round-robin": RoundRobin, "sticky": Sticky, "least-busy": LeastBusy}
    return found[name]()


#: Seconds between two tries to learn a model's folder: short, since nothing else can start before it is known.
MODEL_ROOT_RETRY_S = 0.25


class Fleet:
    """The servers of one `Upstream` by address: who they are, which are up, and the probes that find out."""

    def __init__(self, addresses: Iterable[str], options: UpstreamOptions, gate: Gate) -> None:
        self._options, self._gate = options, gate
        #: Of a server that nobody told another.
        self.version = options.version
        self.servers: dict[str, UpstreamServer] = {}
        for address in addresses:
            self._known(normal_address(address))
        #: Those that take requests.
        self.up: tuple[UpstreamServer, ...] = ()
        #: Whether one of them was up before.
        self.found = False
        #: Whether all were verified once, and whether calls were possible since: from then on a server that does not
        #: match stops no call, and is left out alone.
        self._verified = self._settled = False
        self._look = asyncio.Event()
        self._client: UpstreamClient | None = None
        self._vocabulary: Vocabulary | None = None

    # -- membership ----------------------------------------------------------------------------------------------------

    def _known(self, address: str) -> UpstreamServer:
        return self.servers.setdefault(address, UpstreamServer(address, self.version))

    async def add(self, address: str) -> UpstreamServer:
        """Takes a server in and verifies it, unless it is there already; raises `InvalidInput` for no address."""
        server = self._known(normal_address(address))
        if server.state in ("new", "leaving"):
            self._set(server, "new", "not verified yet")
            await self.verify(server)
        return server

    def remove(self, address: str) -> None:
        """Gives a server no new calls; raises `InvalidInput` for one that is not there."""
        self._set(self.find(address), "leaving", "removed; its calls in flight end")
        self.prune()

    def prune(self) -> None:
        """Forgets servers that were removed and have no calls in flight any more."""
        for server in [s for s in self.servers.values() if s.state == "leaving" and not s.in_flight]:
            del self.servers[server.address]

    def find(self, address: str) -> UpstreamServer:
        """The server at an address; raises `InvalidInput`, with those that are known, for any other."""
        found = self.servers.get(normal_address(address))
        if found is None:
            known = ", ".join(self.servers) or "none"
            raise InvalidInput(f"{shown(address)} is no rollout server of this gateway; known: {known}")
        return found

    # -- health --------------------------------------------------------------------------------------------------------

    def down(self, server: UpstreamServer, reason: str) -> None:
        """Takes a server out until a probe, which begins at once, finds it well."""
        if server.state == "up":
            log.warning("rollout server %s is down: %s", server.address, reason)
            self._set(server, "down", reason)
            self._look.set()

    async def root(self, client: UpstreamClient) -> tuple[str, str]:
        """The address of the first server that answers, and where its model lies. Those that do not answer are asked
        until one does; `InvalidInput` where one does and does not say it."""
        while True:
            for server in list(self.servers.values()):
                try:
                    root = await model_root(client, server, self._options)
                except RolloutServerFailed as error:
                    self._judged(server, "down", str(error))
                    continue
                if root is None:
                    raise InvalidInput(f"rollout server {server.address} does not tell its model's root in /v1/models")
                self._set(server, "new", "not verified yet")
                return server.address, root
            await asyncio.sleep(MODEL_ROOT_RETRY_S)

    async def start(self, client: UpstreamClient, vocabulary: Vocabulary) -> None:
        """Verifies every server, each within `verify_s`, whatever becomes of it."""
        self._client, self._vocabulary = client, vocabulary
        await asyncio.gather(*(self.verify(server) for server in self.servers.values()))
        self._verified = True
        self._settle()

    async def watch(self) -> None:
        """Probes what is down or unfit, for as long as it runs; one that does not answer holds up no other."""
        probing: set[UpstreamServer] = set()

        async def probe(server: UpstreamServer) -> None:
            probing.add(server)
            try:
                await self.verify(server)
            finally:
                probing.discard(server)

        async with asyncio.TaskGroup() as probes:
            while True:
                try:
                    async with asyncio.timeout(self._options.probe_s):
                        await self._look.wait()
                except TimeoutError:
                    pass
                self._look.clear()
                await self._gate.opened()  # a paused server samples nothing, not even for a probe
                for server in list(self.servers.values()):
                    if server.state in ("new", "down", "paused", "unfit") and server not in probing:
                        probes.create_task(probe(server))
                self.prune()

    async def verify(self, server: UpstreamServer) -> None:
        """Probes a server, and sets its state by what was found: up, down, paused or unfit."""
        if self._client is None or self._vocabulary is None:
            return  # `start` will
        probe = ServerProbe(self._client, server, self._vocabulary, self._options)
        try:
            async with asyncio.timeout(self._options.verify_s):
                await probe.healthy()
                if await self._held_by_others(server, probe):
                    return
                found = await probe.verify()
                if server.numbered and found.version is None:
                    raise RolloutServerFailed(
                        f"it was started anew, with weights that are not version {server.version}; publish to it", "old"
                    )
                self._check_log_probs(server, found.log_prob_mode)
        except TimeoutError:
            self._judged(server, "down", f"the probe took longer than {self._options.verify_s:g} s (is it paused?)")
        except RolloutServerFailed as error:
            self._judged(server, "down", str(error))
        except Unfit as error:
            self._judged(server, "unfit", str(error))
        except Unverified as error:
            self._judged(server, "paused", str(error))
        else:
            server.model, server.max_model_len = found.model, found.max_model_len
            server.log_prob_mode, server.generate = found.log_prob_mode, found.generate
            if found.version is not None:
                # A gateway that was started anew learns here which adapter the version is sampled with.
                server.version, server.numbered, server.adapter = found.version, True, found.adapter
            self._judged(server, "up", None)

    async def _held_by_others(self, server: UpstreamServer, probe: ServerProbe) -> bool:
        """Whether a server is paused, which no pause of this gateway's is the reason for: its predecessor's was, which
        ended without a word, or a trainer's. Weights may be under way to it, so it is left alone for as long as a pause
        may take, and then let go on, unless it has weights that nobody verified (`Unverified`)."""
        now = asyncio.get_running_loop().time()
        if not await probe.paused():
            server.paused_since = None
            return False
        await probe.version()
        if server.paused_since is None:
            server.paused_since = now
        left_s = self._options.foreign_pause_s - (now - server.paused_since)
        if left_s > 0:
            self._judged(
                server, "paused", "it is paused, and not by this gateway: a publish ends that, else its time does"
            )
            return True
        log.error("rollout server %s stayed paused, and nobody ended it: it goes on", server.address)
        server.paused_since = None
        await probe.resume()
        return False

    async def note_version(self, server: UpstreamServer) -> None:
        """Notes whether a server with new weights says their version itself: one that did must be able to later."""
        if self._client is None or self._vocabulary is None:
            return
        try:
            probe = ServerProbe(self._client, server, self._vocabulary, self._options)
            async with asyncio.timeout(self._options.verify_s):
                server.numbered = await probe.version() is not None
        except (TimeoutError, RolloutServerFailed, Unverified) as error:
            log.debug("%s does not tell its version: %s", server.address, error)
        if server.state in ("down", "paused"):
            self._look.set()  # new weights may be what it was waiting for

    async def hold_unverified(self, servers: Iterable[UpstreamServer]) -> list[UpstreamServer]:
        """Of these, the servers that say that nobody verified their weights, or do not answer; they are taken out."""
        asked = list(servers)
        found = await asyncio.gather(*map(self._is_verified, asked))
        return [server for server, verified in zip(asked, found, strict=True) if not verified]

    async def _is_verified(self, server: UpstreamServer) -> bool:
        if self._client is None or self._vocabulary is None:
            return True  # it was not used yet, and `start` will ask
        try:
            async with asyncio.timeout(self._options.verify_s):
                await ServerProbe(self._client, server, self._vocabulary, self._options).version()
        except Unverified as error:
            self._judged(server, "paused", str(error))
            return False
        except (TimeoutError, RolloutServerFailed) as error:
            self.down(server, str(error) or "it did not say which version its weights have")
            return False
        return True

    def _judged(self, server: UpstreamServer, state: ServerState, reason: str | None) -> None:
        if server.state == "leaving":
            return
        changed, first = state != server.state, not self.found
        self._set(server, state, reason)
        if not self.found:
            return  # `missing` says why, and whoever waits for it tells it
        if changed and state == "up":
            log.info("rollout server %s is up", server.address)
        for known in self.servers.values() if first else [server]:
            if known.state in ("down", "paused", "unfit") and (first or changed):
                log.warning("rollout server %s is %s: %s", known.address, known.state, known.reason)

    def _set(self, server: UpstreamServer, state: ServerState, reason: str | None) -> None:
        server.state, server.reason = state, reason
        self.up = tuple(known for known in self.servers.values() if known.state == "up")
        self.found = self.found or bool(self.up)
        self._settle()

    def _settle(self) -> None:
        self._settled = self._settled or (self._verified and self.found and self.trouble is None)

    def _check_log_probs(self, server: UpstreamServer, mode: str) -> None:
        """Raises `Unfit` for a server that comes to others, is not like them, and must not stop them."""
        for other in self.up if self._settled else ():
            if other is not server and "unknown" not in (mode, other.log_prob_mode) and mode != other.log_prob_mode:
                raise Unfit(
                    f"it gives {mode} log-probs, {other.address} {other.log_prob_mode} ones; "
                    "start all with the same --logprobs-mode"
                )

    # -- what follows from it ------------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """Why nothing must be sampled: a server of another model, or different log-probs, that a start has found. None
        where nothing is, and once calls were possible."""
        if self._settled:
            return None
        for server in self.servers.values():
            if server.state == "unfit":
                return f"rollout server {server.address} does not match: {server.reason}"
        modes: dict[str, str] = {}
        for server in self.up:
            if server.log_prob_mode != "unknown":
                modes.setdefault(server.log_prob_mode, server.address)
        if len(modes) > 1:
            said = ", ".join(f"{address} {mode} ones" for mode, address in modes.items())
            return f"rollout servers give different log-probs: {said}; start all with the same --logprobs-mode"
        return None

    @property
    def missing(self) -> str | None:
        """The servers that a start waits for, each with its reason; None once one of them was up."""
        if self.found:
            return None
        there = list(self.servers.values())
        said = "; ".join(s.address if s.state == "new" else f"{s.address}: {s.reason}" for s in there)
        return f"waiting for {'rollout server' if len(there) == 1 else 'one of the rollout servers'} {said}"

    @property
    def max_model_len(self) -> int | None:
        """The longest context that every server that is up takes; None where none tells."""
        return min((server.max_model_len for server in self.up if server.max_model_len is not None), default=None)

    def describe(self) -> list[dict[str, Any]]:
        """What `/servers` tells of each server."""
        self.prune()
        return [server.describe() for server in self.servers.values()]
