"""Which server an order goes to, and where next when that one fails: each at most once.

Only an order of whose answer nobody has seen anything may come here again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from headrace.gateway.upstream.balance import balance_by
from headrace.gateway.upstream.call import Busy, Call
from headrace.gateway.upstream.client import Client
from headrace.gateway.upstream.errors import Failed, NoServer, Refused
from headrace.gateway.upstream.fleet import Fleet
from headrace.gateway.upstream.options import Options
from headrace.gateway.upstream.patience import Patience
from headrace.gateway.upstream.server import Server
from headrace.gateway.upstream.wire import Asked
from headrace.gateway.upstream.wire_completions import Completions
from headrace.gateway.upstream.wire_generate import Generate

T = TypeVar("T")

#: Failures after which a server is not used before a probe found it well.
DOWN = frozenset({"unreachable", "status", "denied", "hang", "cut"})
#: Failures that say no more than that no server could be had.
NOBODY = frozenset({"unreachable", "status", "busy"})


class Dispatch:
    def __init__(self, fleet: Fleet, options: Options, counters: Counter[str]) -> None:
        self.client: Client | None = None
        self._fleet, self._options, self._counters = fleet, options, counters
        self._balance = balance_by(options.balance)
        self._completions, self._generate = Completions(), Generate()
        self._most_bytes = int(options.max_answer_mb * 2**20)

    async def send(self, asked: Asked, patience: Patience, exchange: Callable[[Call], Awaitable[T]]) -> tuple[Call, T]:
        """What the exchange with one of the servers gave, and the call that it came by."""
        tried: list[Server] = []
        errors: list[Failed] = []
        while True:
            candidates = [server for server in self._fleet.up if server not in tried] if tried else self._fleet.up
            if asked.order.images:
                candidates = self._with_images(asked, candidates)
            if not candidates:
                raise self.none_left(errors)
            server = self._balance.pick(candidates, asked.order.sticky)
            call = self._call(server, asked, patience)
            if tried:
                self._counters["retries"] += 1
            tried.append(server)
            try:
                return call, await exchange(call)
            except Failed as error:
                call.close()
                self.failed(server, error)
                errors.append(error)
                if error.kind == "late":
                    raise
            except Refused:
                call.close()
                self._counters["refused"] += 1
                raise
            except BaseException:
                call.close()
                raise

    def _call(self, server: Server, asked: Asked, patience: Patience) -> Call:
        assert self.client is not None, "start() comes before the first order"
        self._counters["calls"] += 1
        if server.generate and self._generate.can(asked.order):
            url, wire = server.generate_url, self._generate
            return Call(self.client, server, url, wire, asked, patience, self._most_bytes)
        return Call(self.client, server, server.completions_url, self._completions, asked, patience, self._most_bytes)

    def _with_images(self, asked: Asked, servers: Sequence[Server]) -> list[Server]:
        """Those of the servers that take a prompt with images."""
        missing = self._generate.missing(asked.order)
        if missing:
            raise Refused(
                f"a prompt with images is sampled without {', '.join(missing)}: leave it out", 400, missing[0]
            )
        able = [server for server in servers if server.generate]
        if servers and not able:
            raise Refused(
                f"{servers[0].address} takes no images: it has no /inference/v1/generate (vLLM 0.32 has it with "
                "--enable-scale-out)"
            )
        return able

    def failed(self, server: Server, error: Failed) -> None:
        server.failures += 1
        self._counters[f"failed_{error.kind}"] += 1
        if error.kind in DOWN:
            self._fleet.down(server, str(error))

    def none_left(self, errors: list[Failed]) -> NoServer | Failed:
        nonsense = [error for error in errors if error.kind not in NOBODY]
        if nonsense:
            return nonsense[-1]
        self._counters["no_server"] += 1
        waits = [error.retry_after_s for error in errors if isinstance(error, Busy) and error.retry_after_s is not None]
        reasons = [str(error) for error in errors] or [
            f"{server.address} is {server.state}: {server.reason}" for server in self._fleet.servers.values()
        ]
        said = "; ".join(reasons) or "none is configured"
        return NoServer(f"no rollout server can take this call: {said}", min(waits, default=self._options.probe_s))
