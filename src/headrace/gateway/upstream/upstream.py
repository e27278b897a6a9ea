"""`Upstream`: the rollout servers of one model as the rest of a gateway sees them: sample, stream, pause, versions.

An answer that a pause cut off is continued by another request for the rest of it, and the two are joined into one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson

from headrace.data.step import INT32_MAX, check_count
from headrace.gateway.upstream.dispatch import Dispatch, ServerCall
from headrace.gateway.upstream.errors import NoRolloutServer, RolloutServerFailed, UpstreamRefused
from headrace.gateway.upstream.fleet import Fleet
from headrace.gateway.upstream.flush_clock import FlushClock
from headrace.gateway.upstream.gate import Deadline, Gate
from headrace.gateway.upstream.http_client import UpstreamClient
from headrace.gateway.upstream.options import UpstreamOptions
from headrace.gateway.upstream.pause import PAUSE_LEASE_S, PauseControl
from headrace.gateway.upstream.server import UpstreamServer
from headrace.gateway.upstream.streamed import StreamedAnswer, StreamPump, Taker, hand_on, join_spans
from headrace.gateway.upstream.types import SampledAnswer, SampledChoice, UpstreamRequest
from headrace.gateway.upstream.wire import EncodedRequest, join_pieces
from headrace.net.supervised import Supervised
from headrace.tokens.vocabulary import Vocabulary

T = TypeVar("T")

#: Seconds for which an answer of /v1/models is served again: agents ask for it at their start, many at once.
MODELS_CACHE_S = 5.0
#: Turns of the loop in which a stream that is let go reads its socket, wakes, and counts what came.
CATCH_UP_TURNS = 4
#: Parameters whose state a server keeps for one request only (a grammar, penalties for what was sampled before): an
#: answer under them cannot be continued by another request, and is sampled again from its beginning.
RESTARTING_PARAMS = (
    *("structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("presence_penalty", "frequency_penalty"),
)


class Upstream:
    """All rollout servers of one model: samples requests, pauses around a change of weights, knows their versions.

    Made and used in one event loop. `start` comes before the first request, `close` after the last."""

    def __init__(self, addresses: Iterable[str], options: UpstreamOptions) -> None:
        self.options = options
        self.counters: Counter[str] = Counter()
        self._gate = Gate()
        self._fleet = Fleet(addresses, options, self._gate)
        self._deadlines: set[Deadline] = set()
        self._dispatch = Dispatch(self._fleet, options, self.counters)
        self._control = PauseControl(self._fleet, self._gate, options, self._deadlines)
        self._client: UpstreamClient | None = None
        self.watch = Supervised("the watch over the rollout servers", self._fleet.watch)
        self._models: tuple[float, dict[str, Any]] | None = None
        self._flush_clock = FlushClock()
        self._streams: set[ServerCall] = set()
        self._gate.closing = self._hurry

    async def start(self, vocabulary: Vocabulary) -> None:
        """Verifies every server, each within `verify_s`; from then on, those that are down are probed."""
        await self._fleet.start(self._connected(), vocabulary)
        self.watch.start()

    async def root(self) -> tuple[str, str]:
        """Before `start`: a server's address and where its model lies, as soon as one answers."""
        return await self._fleet.root(self._connected())

    def _connected(self) -> UpstreamClient:
        if self._client is None:
            self._client = self._control.client = self._dispatch.client = UpstreamClient(self.options)
        return self._client

    async def close(self) -> None:
        """Ends its tasks and connections; a pause is not ended."""
        await self.watch.stop()
        self._control.close()
        if self._client is not None:
            await self._client.close()
            self._client = None

    # -- sampling ------------------------------------------------------------------------------------------------------

    async def sample(self, request: UpstreamRequest) -> SampledAnswer:
        """Samples a whole answer. Cancelling it aborts the call on the server.

        Raises `UpstreamRefused`, `RolloutServerFailed` or `NoRolloutServer`."""
        gate = self._gate
        if gate.closed:
            await gate.wait_open()
        gate.enter()
        deadline = Deadline(self.options.idle_s, self.options.call_s)
        self._deadlines.add(deadline)
        try:
            aborts = gate.aborts
            call, choices = await self._dispatch.send(EncodedRequest.of(request), deadline, ServerCall.whole)
            if "abort" in [choice.finish_reason for choice in choices]:
                choices = await gather_or_cancel(
                    [self._whole(request, choice, aborts, call.server) for choice in choices]
                )
        except asyncio.CancelledError:
            self.counters["aborted"] += 1
            raise
        finally:
            self._deadlines.discard(deadline)
            deadline.close()
            gate.leave()
        oldest = min((version for choice in choices for _, version in choice.spans), default=call.version)
        return SampledAnswer(choices, call.server.address, oldest)

    async def _whole(
        self, request: UpstreamRequest, choice: SampledChoice, aborts: int, server: UpstreamServer
    ) -> SampledChoice:
        """A choice that a pause cut off, completed by further calls."""
        while choice.finish_reason == "abort":
            await self._await_abort(aborts, server)
            if must_restart(request):
                choice.ids = []  # nobody saw it: it is sampled again from its beginning
            rest = rest_of(request, choice.index, choice.ids)
            if rest is None:
                choice.finish_reason = "length"
                break
            await self._gate.wait_open()
            aborts = self._gate.aborts
            self.counters["continued"] += 1
            with self._deadline() as deadline:
                call, more = await self._dispatch.send(EncodedRequest.of(rest), deadline, ServerCall.whole)
            server, choice = call.server, join_choices(choice, rest, more[0])
        return choice

    async def stream(self, request: UpstreamRequest, take: Taker, flush_s: float = 0.0) -> None:
        """Samples an answer, and has `take` told the pieces as they come; with `flush_s`, after the first, what has
        come of a choice within so many seconds as one. Cancelling it aborts the call on the server.

        Raises like `sample`, and what `take` raises."""
        gate = self._gate
        if gate.closed:
            await gate.wait_open()
        encoded = EncodedRequest.of(request)
        answer = StreamedAnswer(request, encoded.choices, take)
        #: What is to be sampled, and the beginning of the answer that it continues.
        todo: list[tuple[EncodedRequest, SampledChoice | None]] = [(encoded, None)]
        with self._in_flight() as deadline:
            try:
                while todo:
                    part, before = todo.pop(0)
                    answer.continue_with(part.request, before)
                    cut = await self._stream_part(answer, part, deadline, flush_s)
                    for whole in cut:
                        if whole.ids and must_restart(request):
                            raise RolloutServerFailed(
                                "an answer that follows a grammar cannot go on after a pause's abort", "aborted"
                            )
                        rest = rest_of(request, whole.index, whole.ids)
                        if rest is None:
                            await hand_on(answer.end(whole))
                        else:
                            self.counters["continued"] += 1
                            so_far = SampledChoice(whole.index, whole.ids.copy(), None, None, spans=whole.spans)
                            todo.append((EncodedRequest.of(rest), so_far))
                    if cut:
                        await gate.wait_open()
            except (RolloutServerFailed, UpstreamRefused, NoRolloutServer):
                raise
            except BaseException:
                if any(whole.finish_reason is None for whole in answer.choices):
                    self.counters["aborted"] += 1
                raise

    async def _stream_part(
        self, answer: StreamedAnswer, part: EncodedRequest, deadline: Deadline, flush_s: float
    ) -> list[SampledChoice]:
        """Streams what one request brings; the choices that a pause cut off."""
        aborts = self._gate.aborts
        cut: list[SampledChoice] = []
        call, pieces = await self._dispatch.send(part, deadline, ServerCall.open)
        if flush_s:
            pieces = join_pieces(pieces)
        pump = StreamPump(answer, call, deadline, self._gate, self._flush_clock, flush_s)
        self._streams.add(call)
        try:
            while True:
                for piece in pieces:
                    if piece.finish_reason == "abort":
                        await self._await_abort(aborts, call.server)
                        piece.finish_reason = None
                        cut.append(answer.choice_of(piece))
                        if not piece.ids and not piece.text:
                            continue
                    await hand_on(answer.add(piece))
                if call.ended:
                    await call.read_tail()
                    return cut
                going_on = any(whole.finish_reason is None and whole not in cut for whole in answer.choices)
                try:
                    pieces = await pump.run(gathers=going_on)
                except RolloutServerFailed as error:
                    self._dispatch.failed(call.server, error)
                    raise
        finally:
            self._streams.discard(call)
            call.close()

    async def _await_abort(self, aborts: int, server: UpstreamServer) -> None:
        """Returns where a pause asked for an abort; raises `RolloutServerFailed` for one that nobody asked for."""
        if not await self._gate.wait_abort(aborts, self.options.abort_grace_s):
            error = RolloutServerFailed(f"{server.address} aborted the answer", "aborted")
            self._dispatch.failed(server, error)
            raise error

    @contextmanager
    def _in_flight(self) -> Iterator[Deadline]:
        self._gate.enter()
        try:
            with self._deadline() as deadline:
                yield deadline
        finally:
            self._gate.leave()

    @contextmanager
    def _deadline(self) -> Iterator[Deadline]:
        deadline = Deadline(self.options.idle_s, self.options.call_s)
        self._deadlines.add(deadline)
        try:
            yield deadline
        finally:
            self._deadlines.discard(deadline)
            deadline.close()

    # -- weights -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: str, lease_s: float = PAUSE_LEASE_S) -> None:
        """Holds new requests; those in flight end (`drain`), freeze (`keep`), or are cut and later continued. After
        `lease_s` without a `resume` it ends by itself, and `overdue` says so."""
        await self._control.pause(mode, lease_s)

    async def catch_up(self) -> None:
        """Before `set_version`: reads what streams have been sent so far, which the version until now sampled."""
        if self._streams:
            self._hurry()
            for _ in range(CATCH_UP_TURNS):
                await asyncio.sleep(0)

    def _hurry(self) -> None:
        for call in list(self._streams):
            call.hurry()

    async def resume(self) -> None:
        """Ends a pause, if there is one."""
        await self._control.resume()

    @property
    def overdue(self) -> str | None:
        """Why the last pause ended without a `resume`; None where it did not."""
        return self._control.overdue

    @property
    def paused(self) -> bool:
        """Whether new requests wait."""
        return self._gate.closed

    @property
    def waiting(self) -> int:
        """Requests that wait for `resume`."""
        return self._gate.waiting

    @property
    def in_flight(self) -> int:
        """Requests that were let through and have not ended."""
        return self._gate.in_flight

    def set_version(self, version: int, server: str | None = None, adapter: str | None = None) -> None:
        """Sets the policy version that a server samples with from now on, and by which of its LoRA adapters (None: by
        none); without a server, that of all, the version also of those that are added later."""
        number = check_count(version, "version", most=INT32_MAX)
        if server is None:
            self._fleet.version = number
        for known in self._fleet.servers.values() if server is None else [self._fleet.find(server)]:
            known.version, known.adapter = number, adapter

    async def note_versions(self, server: str | None = None) -> None:
        """After `set_version`: remembers which of the servers tell their version themselves."""
        servers = self._fleet.servers.values() if server is None else [self._fleet.find(server)]
        await asyncio.gather(*map(self._fleet.note_version, servers))

    @property
    def version(self) -> int:
        """The newest policy version of all servers."""
        return max(self.versions.values(), default=self._fleet.version)

    @property
    def versions(self) -> dict[str, int]:
        """Each server's policy version, by its address."""
        return {server.address: server.version for server in self._fleet.servers.values()}

    @property
    def adapters(self) -> dict[str, str | None]:
        """The LoRA adapter that each server samples with, by its address."""
        return {server.address: server.adapter for server in self._fleet.servers.values()}

    # -- the servers ---------------------------------------------------------------------------------------------------

    async def add(self, address: str) -> None:
        """Takes a server in: verified now, or probed until it can be."""
        await self._fleet.add(address)

    async def remove(self, address: str) -> None:
        """Gives a server no new calls; those in flight end."""
        self._fleet.remove(address)

    async def models(self) -> dict[str, Any]:
        """The answer of a server's /v1/models, a few seconds old at most; `NoRolloutServer` where none answers."""
        now = asyncio.get_running_loop().time()
        if self._models is not None and now < self._models[0]:
            return self._models[1]
        for server in self._fleet.up:
            assert self._client is not None
            try:
                status, data = await self._client.ask("GET", server.url("/v1/models"), None, self.options.verify_s)
                found = orjson.loads(data) if status == 200 else None
            except (RolloutServerFailed, ValueError) as error:
                self._fleet.down(server, f"/v1/models: {error}")
                continue
            if isinstance(found, dict):
                self._models = (now + MODELS_CACHE_S, found)
                return found
        raise self._dispatch.none_left([])

    @property
    def ready(self) -> bool:
        """Whether a request would find a server."""
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
        """The name by which a server that is up knows the model."""
        return next((server.model for server in self._fleet.up), None)

    def describe(self) -> list[dict[str, Any]]:
        """What `/servers` tells of each server."""
        return self._fleet.describe()


def must_restart(request: UpstreamRequest) -> bool:
    """Whether an answer that was cut cannot be continued, and must be sampled again from its beginning."""
    return any(request.sampling.get(name) or request.extra.get(name) for name in RESTARTING_PARAMS)


def rest_of(request: UpstreamRequest, index: int, ids: list[int]) -> UpstreamRequest | None:
    """The request for what is left of one choice after these tokens; None where `max_tokens` is reached."""
    sampling: dict[str, Any] = {**request.sampling, "n": 1}
    most = sampling.get("max_tokens")
    if isinstance(most, int):
        if most <= len(ids):
            return None
        sampling["max_tokens"] = most - len(ids)
    if isinstance(least := sampling.get("min_tokens"), int):
        sampling["min_tokens"] = max(0, least - len(ids))
    if isinstance(seed := sampling.get("seed"), int):
        # The same seed would draw the same numbers again; vLLM gives choice i the seed + i.
        sampling["seed"] = (seed + index + len(ids)) % 2**63
    prompt = np.concatenate([request.prompt, np.array(ids, np.int32)]) if ids else request.prompt
    call_id = f"{request.call_id}.{index}.{len(ids)}" if request.call_id else ""
    return msgspec.structs.replace(request, prompt=prompt, sampling=sampling, call_id=call_id)


def join_choices(cut: SampledChoice, rest: UpstreamRequest, more: SampledChoice) -> SampledChoice:
    """One choice out of its beginning and of what the request `rest` sampled."""
    if not cut.ids:
        return msgspec.structs.replace(more, index=cut.index)
    # A prompt that is not what was sent: whoever compares it will see that.
    changed = more.consumed is not None and more.consumed is not rest.prompt
    return SampledChoice(
        cut.index,
        cut.ids + more.ids,
        None if cut.log_probs is None or more.log_probs is None else cut.log_probs + more.log_probs,
        None,  # a character may lie across the cut: the two texts do not add up to that of all ids
        more.finish_reason,
        more.stop_reason,
        more.consumed if changed else cut.consumed,
        join_spans(cut.spans, len(cut.ids), more.spans),
        None if cut.tokens is None or more.tokens is None else cut.tokens + more.tokens,
        None if cut.top is None or more.top is None else cut.top + more.top,
        more.routed_experts,  # of the prompt as well, and so of the beginning
        more.server,
        continued=True,
    )


async def gather_or_cancel(parts: list[Awaitable[T]]) -> list[T]:
    """The results of all; at the first error, or when cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
