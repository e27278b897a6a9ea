"""The rollout servers as one: an order goes in, exact tokens come out, whichever server sampled them.

What waits at the gate waits without an error; what a pause aborted comes back as one answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson

from headrace.data.step import INT32_MAX, check_count
from headrace.gateway.upstream.call import Call
from headrace.gateway.upstream.client import Client
from headrace.gateway.upstream.continuation import begins_anew, continues, joined, rest_of
from headrace.gateway.upstream.control import LEASE_S, Control
from headrace.gateway.upstream.dispatch import Dispatch
from headrace.gateway.upstream.errors import Failed
from headrace.gateway.upstream.fleet import Fleet
from headrace.gateway.upstream.gate import Gate
from headrace.gateway.upstream.options import Options
from headrace.gateway.upstream.patience import Patience
from headrace.gateway.upstream.server import Server
from headrace.gateway.upstream.types import Answer, Order, Sampled
from headrace.gateway.upstream.wire import Asked
from headrace.net.supervised import Supervised
from headrace.tokens.vocabulary import Vocabulary

T = TypeVar("T")

#: For how long an answer of /v1/models is good.
MODELS_S = 5.0


class Upstream:
    """Made and used in one event loop. `start` before the first order, `close` after the last."""

    def __init__(self, addresses: Iterable[str], options: Options) -> None:
        self.options = options
        self.counters: Counter[str] = Counter()
        self._gate = Gate()
        self._fleet = Fleet(addresses, options, self._gate)
        self._patient: set[Patience] = set()
        self._dispatch = Dispatch(self._fleet, options, self.counters)
        self._control = Control(self._fleet, self._gate, options, self._patient)
        self._client: Client | None = None
        self.watch = Supervised("the watch over the rollout servers", self._fleet.watch)
        self._models: tuple[float, dict[str, Any]] | None = None

    async def start(self, vocabulary: Vocabulary) -> None:
        """Verifies every server, each within `verify_s`; from then on, those that are down are probed."""
        await self._fleet.start(self._connected(), vocabulary)
        self.watch.start()

    async def root(self) -> tuple[str, str]:
        """Before `start`: a server's address and where its model lies, as soon as one answers."""
        return await self._fleet.root(self._connected())

    def _connected(self) -> Client:
        if self._client is None:
            self._client = self._control.client = self._dispatch.client = Client(self.options)
        return self._client

    async def close(self) -> None:
        await self.watch.stop()
        self._control.close()
        if self._client is not None:
            await self._client.close()
            self._client = None

    # -- sampling ------------------------------------------------------------------------------------------------------

    async def sample(self, order: Order) -> Answer:
        """A whole answer. Cancelling it aborts it upstream."""
        gate = self._gate
        if gate.closed:
            await gate.wait_open()
        with self._in_flight() as patience:
            try:
                aborts = gate.aborts
                call, choices = await self._dispatch.send(Asked.of(order), patience, Call.whole)
                if any(choice.finish_reason == "abort" for choice in choices):
                    choices = await together([self._whole(order, choice, aborts, call.server) for choice in choices])
            except asyncio.CancelledError:
                self.counters["aborted"] += 1
                raise
        oldest = min((version for choice in choices for _, version in choice.spans), default=call.version)
        return Answer(choices, call.server.address, oldest)

    async def _whole(self, order: Order, choice: Sampled, aborts: int, server: Server) -> Sampled:
        """A choice with what a pause cut off of it."""
        while choice.finish_reason == "abort":
            await self._asked_for(aborts, server)
            if begins_anew(order):
                choice.ids = []  # nobody saw it: it is sampled again from its beginning
            rest = rest_of(order, choice.index, choice.ids)
            if rest is None:
                choice.finish_reason = "length"
                break
            await self._gate.wait_open()
            aborts = self._gate.aborts
            self.counters["continued"] += 1
            with self._patience() as patience:
                call, more = await self._dispatch.send(Asked.of(rest), patience, Call.whole)
            server, choice = call.server, joined(choice, rest, more[0])
        return choice

    async def stream(self, order: Order) -> AsyncGenerator[Sampled, None]:
        """The pieces of an answer as they come. Closing it early aborts it upstream."""
        gate = self._gate
        if gate.closed:
            await gate.wait_open()
        asked = Asked.of(order)
        #: Of each choice, what was told so far; without a finish_reason while there is more to come.
        told = [Sampled(index, [], None, None) for index in range(asked.choices)]
        #: What is to be sampled, and the beginning of the answer that it continues.
        todo: list[tuple[Asked, Sampled | None]] = [(asked, None)]
        with self._in_flight() as patience:
            try:
                while todo:
                    part, before = todo.pop(0)
                    aborts, cut = gate.aborts, []
                    call, pieces = await self._dispatch.send(part, patience, Call.open)
                    try:
                        while pieces:
                            for piece in pieces:
                                if before is not None:
                                    continues(piece, before, part.order)
                                whole = told[piece.index]
                                whole.ids += piece.ids
                                whole.spans = piece.spans
                                if piece.finish_reason == "abort":
                                    await self._asked_for(aborts, call.server)
                                    piece.finish_reason = None
                                    cut.append(whole)
                                    if not piece.ids and not piece.text:
                                        continue
                                whole.finish_reason = piece.finish_reason
                                yield piece
                            pieces = await self._more(call)
                    finally:
                        call.close()
                    for whole in cut:
                        if whole.ids and begins_anew(order):
                            raise Failed(
                                "an answer that follows a grammar cannot go on after a pause's abort", "aborted"
                            )
                        rest = rest_of(order, whole.index, whole.ids)
                        if rest is None:
                            whole.finish_reason = "length"
                            yield Sampled(
                                whole.index, [], [], "", "length", spans=whole.spans, server=call.server.address
                            )
                        else:
                            self.counters["continued"] += 1
                            so_far = Sampled(whole.index, whole.ids.copy(), None, None, spans=whole.spans)
                            todo.append((Asked.of(rest), so_far))
                    if cut:
                        await gate.wait_open()
            except (asyncio.CancelledError, GeneratorExit):
                if any(whole.finish_reason is None for whole in told):
                    self.counters["aborted"] += 1
                raise

    async def _more(self, call: Call) -> list[Sampled]:
        try:
            return await call.more()
        except Failed as error:
            self._dispatch.failed(call.server, error)
            raise

    async def _asked_for(self, aborts: int, server: Server) -> None:
        """Returns where a pause asked for an abort; one that nobody asked for is a failure."""
        if not await self._gate.wait_abort(aborts, self.options.abort_grace_s):
            error = Failed(f"{server.address} aborted the answer", "aborted")
            self._dispatch.failed(server, error)
            raise error

    @contextmanager
    def _in_flight(self) -> Iterator[Patience]:
        self._gate.enter()
        try:
            with self._patience() as patience:
                yield patience
        finally:
            self._gate.leave()

    @contextmanager
    def _patience(self) -> Iterator[Patience]:
        patience = Patience(self.options.idle_s, self.options.call_s)
        self._patient.add(patience)
        try:
            yield patience
        finally:
            self._patient.discard(patience)

    # -- weights -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: str, lease_s: float = LEASE_S) -> None:
        """Holds new orders; those in flight end (`drain`), freeze (`keep`), or are cut and later continued. After
        `lease_s` without a `resume` it ends by itself, and `overdue` says so."""
        await self._control.pause(mode, lease_s)

    async def resume(self) -> None:
        await self._control.resume()

    @property
    def overdue(self) -> str | None:
        return self._control.overdue

    @property
    def paused(self) -> bool:
        return self._gate.closed

    @property
    def waiting(self) -> int:
        """Orders that wait for `resume`."""
        return self._gate.waiting

    @property
    def in_flight(self) -> int:
        return self._gate.in_flight

    def set_version(self, version: int, server: str | None = None) -> None:
        """What a server samples with from now on; without a server, what all do and those to come."""
        number = check_count(version, "version", most=INT32_MAX)
        if server is not None:
            self._fleet.find(server).version = number
            return
        self._fleet.version = number
        for known in self._fleet.servers.values():
            known.version = number

    async def note_versions(self, server: str | None = None) -> None:
        """After `set_version`: remembers which of the servers tell their version themselves."""
        servers = self._fleet.servers.values() if server is None else [self._fleet.find(server)]
        await asyncio.gather(*map(self._fleet.note_version, servers))

    @property
    def version(self) -> int:
        """The newest."""
        return max(self.versions.values(), default=self._fleet.version)

    @property
    def versions(self) -> dict[str, int]:
        return {server.address: server.version for server in self._fleet.servers.values()}

    # -- the servers ---------------------------------------------------------------------------------------------------

    async def add(self, address: str) -> None:
        """Takes a server in: verified now, or probed until it can be."""
        await self._fleet.add(address)

    async def remove(self, address: str) -> None:
        """Gives a server no new calls; those in flight end."""
        self._fleet.remove(address)

    async def models(self) -> dict[str, Any]:
        """What a server's /v1/models answers."""
        now = asyncio.get_running_loop().time()
        if self._models is not None and now < self._models[0]:
            return self._models[1]
        for server in self._fleet.up:
            assert self._client is not None
            try:
                status, data = await self._client.ask("GET", server.url("/v1/models"), None, self.options.verify_s)
                found = orjson.loads(data) if status == 200 else None
            except (Failed, ValueError) as error:
                self._fleet.down(server, f"/v1/models: {error}")
                continue
            if isinstance(found, dict):
                self._models = (now + MODELS_S, found)
                return found
        raise self._dispatch.none_left([])

    @property
    def ready(self) -> bool:
        """Whether an order would find a server."""
        return bool(self._fleet.up)

    @property
    def trouble(self) -> str | None:
        """Why nothing must be sampled: a mismatch that a probe found."""
        return self._fleet.trouble

    @property
    def missing(self) -> str | None:
        """Which servers are waited for, and why; None once one of them was up."""
        return self._fleet.missing

    @property
    def max_model_len(self) -> int | None:
        """The longest context that every server has."""
        return self._fleet.max_model_len

    @property
    def log_prob_mode(self) -> str | None:
        """Which log-probs the servers give, where a probe could tell."""
        return next((server.log_prob_mode for server in self._fleet.up if server.log_prob_mode != "unknown"), None)

    @property
    def model(self) -> str | None:
        """A served model's name."""
        return next((server.model for server in self._fleet.up), None)

    def describe(self) -> list[dict[str, Any]]:
        return self._fleet.describe()


async def together(parts: list[Awaitable[T]]) -> list[T]:
    """All of them, or the first error, after which none runs on."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
