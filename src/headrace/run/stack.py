"""Starts the services of a plan, each once those that it needs are there; watches them; begins again what dies.

A service that dies before it was ever ready is a mistake in its configuration, and ends the run with the end of its
log. One that was ready is begun again, after a pause that grows with each death in a row, and after too many in a row
the run ends too. `look` does one round of this and never waits, so that whoever calls it can show what happens
meanwhile.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from rich.console import Console

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.data.keys import configured_key
from headrace.data.visible import visible
from headrace.net.blocking_client import BlockingHttpClient
from headrace.net.http_answer import NoAnswer
from headrace.net.server import listener
from headrace.processes import Child, ChildDied, Processes
from headrace.run.services import ADMIN_KEY_VARIABLE, HOST, RunPlan, RunPorts, Service, key_variables

#: Seconds that all services together may take to be ready. Fifteen is usual on two cores; a machine that is busy with
#: other things has needed twenty times that, and a large model takes minutes to load.
START_TIMEOUT_S = 1800.0
#: Seconds that a service must have been ready for its next death to count as the first of a row.
STEADY_S = 60.0
#: Deaths in a row after which a service is given up.
MOST_DEATHS = 5
#: Seconds before a service is begun again: the first, and the most that doubling makes of it.
FIRST_DELAY_S, LAST_DELAY_S = 0.5, 10.0
#: Seconds that a service which never says that it is ready must have lived to count as one that was.
SILENT_S = 15.0
#: Seconds for which the gateway holds calls while a rollout server is away: its own bound, which outlives any restart.
HOLD_S = 900.0
#: Seconds between two looks at the services.
REFRESH_S = 0.25
#: Seconds that a control route of the gateway may take.
CONTROL_S = 30.0


class RestartPolicy:
    """Whether and when a service is begun again. Pure: the clock is an argument."""

    def __init__(self) -> None:
        self.deaths = 0
        self._ready_at: float | None = None

    def ready(self, now: float) -> None:
        """Notes that it has become ready."""
        self._ready_at = now

    def died(self, now: float) -> float | None:
        """Notes a death; returns the seconds to wait before the next start, or None where there is none."""
        if self._ready_at is None and not self.deaths:
            return None
        if self._ready_at is not None and now - self._ready_at >= STEADY_S:
            self.deaths = 0
        self._ready_at = None
        self.deaths += 1
        if self.deaths > MOST_DEATHS:
            return None
        delay: float = FIRST_DELAY_S * 2 ** (self.deaths - 1)
        return min(delay, LAST_DELAY_S)


@dataclass(slots=True)
class _Running:
    """A service and how far it is."""

    service: Service
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    child: Child | None = None
    state: Literal["waiting", "started", "listening", "ready", "ended"] = "waiting"
    not_before: float = 0.0
    begun_at: float | None = None
    #: Whether it was ended for good, and not by itself.
    dismissed: bool = False


class Stack:
    """The services of a run. `tell` is given a service's name and what is to be said of it; `died` and `back` are
    called when a service has died and will be begun again, and when it is ready again."""

    def __init__(
        self,
        services: Sequence[Service],
        processes: Processes,
        tell: Callable[[str, str], None],
        *,
        died: Callable[[Service], None] = lambda service: None,
        back: Callable[[Service], None] = lambda service: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = {service.name: _Running(service) for service in services}
        self._processes = processes
        self._tell, self._died, self._back, self._clock = tell, died, back, clock
        self._give_up = clock() + START_TIMEOUT_S
        #: How often each service was begun again.
        self.restarts = dict.fromkeys(self._parts, 0)

    def look(self) -> None:
        """Begins what may begin, notes what has become ready, begins again what has died. Raises `ChildDied` where that
        is to no avail, and `HeadraceError` where the start takes too long."""
        for part in self._parts.values():
            if part.child is None and part.state == "waiting":
                self._begin(part)
            elif part.child is not None:
                if part.child.code() is not None:
                    self._ended(part)
                elif part.state != "ready":
                    self._note_state(part)
        if self._give_up and not self.waiting_for:
            self._give_up = 0.0
        elif self._give_up and self._clock() > self._give_up:
            logs = ", ".join(str(part.child.log) for part in self._parts.values() if part.child is not None)
            names = ", ".join(self.waiting_for)
            raise HeadraceError(f"{names}: not ready within {START_TIMEOUT_S:g} s; what was said: {logs}")

    @property
    def waiting_for(self) -> list[str]:
        """Those that are neither ready nor ended."""
        return [name for name, part in self._parts.items() if part.state not in ("ready", "ended")]

    def is_ready(self, name: str) -> bool:
        """Whether a service is ready now."""
        return self._parts[name].state == "ready"

    def has_ended(self, name: str) -> bool:
        """Whether a service has ended by itself, as it should."""
        return self._parts[name].state == "ended"

    def hold(self, name: str) -> None:
        """Keeps a service from beginning until `release`."""
        self._parts[name].not_before = float("inf")

    def release(self, name: str) -> None:
        """Lets a service begin that was held."""
        self._parts[name].not_before = 0.0

    def end(self, name: str) -> None:
        """Ends a service for good: it does not begin again with another either."""
        part = self._parts[name]
        if part.child is not None and part.child in self._processes.children:
            self._processes.end(part.child)
        part.child, part.state, part.dismissed = None, "ended", True

    def _begin(self, part: _Running) -> None:
        met = all(self._reached(name, state) for name, state in part.service.after.items())
        if not met or self._clock() < part.not_before:
            return
        service = part.service
        again = service.again if part.begun_at is not None else ()
        part.child = self._processes.start_program(
            service.name, [*service.command, *again], env={**key_variables(), **service.env}, folder=service.folder
        )
        part.begun_at, part.state = self._clock(), "started"
        self._note_state(part)

    def _reached(self, name: str, state: str) -> bool:
        found = self._parts[name].state
        return found in ("ready", "ended") or found == state

    def _note_state(self, part: _Running) -> None:
        service, child = part.service, part.child
        assert child is not None
        if service.announces is None:
            if service.health is not None and not _healthy(service.health):
                return
        else:
            said = child.said()
            if not re.search(rf"^{service.announces} ready\b", said, re.MULTILINE):
                if re.search(rf"^{service.announces} listening\b", said, re.MULTILINE):
                    part.state = "listening"
                return
        part.state = "ready"
        if not _silent(service):
            part.policy.ready(self._clock())
        if self.restarts[service.name]:
            self._tell(service.name, "is back")
            self._back(service)
        else:
            self._tell(service.name, service.does)

    def _ended(self, part: _Running) -> None:
        child, service = part.child, part.service
        assert child is not None
        self._processes.end(child)
        part.child = None
        if child.code() == 0 and service.ends:
            part.state = "ended"
            return
        final = service.final and (child.code() or 0) > 0
        if _silent(service) and self._clock() - (part.begun_at or 0.0) >= SILENT_S:
            part.policy.ready(part.begun_at or 0.0)
        delay = None if final else part.policy.died(self._clock())
        try:
            child.check()
        except ChildDied as death:
            if delay is None:
                raise
            self._tell(service.name, f"{str(death).removeprefix(service.name + ' ')}; it begins again in {delay:g} s")
        self.restarts[service.name] += 1
        part.state, part.not_before = "waiting", self._clock() + (delay or 0.0)
        self._died(service)
        for name in service.takes_with:
            self._end_for(name, service)

    def _end_for(self, name: str, cause: Service) -> None:
        """Ends a service that must begin again since another has died, and lets it wait until that one is back. One
        that had ended by itself begins again too: the other needs what it does."""
        part = self._parts[name]
        if part.dismissed:
            return
        if part.child is not None or part.state == "ended":
            if part.child is not None:
                self._processes.end(part.child)
                part.child = None
            self._tell(name, f"begins again with {cause.name}")
            self.restarts[name] += 1
        part.state = "waiting"
        part.service = _also_after(part.service, cause.name)


def _silent(service: Service) -> bool:
    """Whether nothing tells when it is ready."""
    return service.announces is None and service.health is None


def _also_after(service: Service, name: str) -> Service:
    return replace(service, after={**service.after, name: "ready"})


def _healthy(address: str) -> bool:
    """Whether a server answers its health check with 200."""
    try:
        return BlockingHttpClient(address, timeout_s=1.0).request("GET", "/health").status == 200
    except NoAnswer:
        return False


class GatewayHold:
    """Has a gateway hold all calls while a rollout server is away, which comes back with other weights than the
    policy's: the next publish lets them go on. Its key is that of the environment, as the gateway's is."""

    def __init__(self, gateway: str) -> None:
        key = configured_key(None, ADMIN_KEY_VARIABLE)
        self._client = BlockingHttpClient(gateway, timeout_s=CONTROL_S, key=key)

    def hold(self) -> None:
        """Holds calls; those in flight on other servers freeze. A gateway that does not answer has none."""
        self._ask("POST", f"/pause?mode=keep&lease_s={HOLD_S:g}")

    def take_back(self, server: str) -> None:
        """Adds a server that has come back; one that the gateway still knows stays."""
        self._ask("POST", "/servers", {"address": server})

    def _ask(self, method: str, path: str, body: Mapping[str, str] | None = None) -> None:
        try:
            self._client.request(method, path, json=body)
        except NoAnswer:
            pass


class StartLog:
    """Prints what happens to a run's processes, a line each, with the seconds since it began."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began = time.monotonic()

    def tell(self, name: str, words: str) -> None:
        """Prints what is to be said of a process."""
        self.say(f"{self.seconds:6.1f} s  {name:<9} {words}")

    def say(self, words: str) -> None:
        """Prints a line, or what a process said in several."""
        self.console.print(visible(words, lines=True), markup=False, highlight=False, soft_wrap=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began


def run_stack(planned: RunPlan, processes: Processes, log: StartLog) -> Stack:
    """The stack of a plan. Where a rollout server dies, calls are held until the trainer has published its weights to
    the one that comes back: nothing is sampled from those that it begins with."""
    calls = GatewayHold(planned.gateway)

    def died(service: Service) -> None:
        if service.health is not None:
            calls.hold()

    def back(service: Service) -> None:
        if service.health is not None:
            calls.take_back(service.health)

    return Stack(planned.services, processes, log.tell, died=died, back=back)


def starting(stack: Stack, log: StartLog) -> None:
    """Waits until the trainer is ready, and shows what is waited for."""
    with log.console.status("", spinner_style="dim") as status:
        until(
            stack,
            lambda: stack.is_ready("trainer") or stack.has_ended("trainer"),
            lambda: status.update(f"{log.seconds:6.1f} s  waiting for {', '.join(stack.waiting_for)}"),
        )


def until(stack: Stack, met: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Looks after the stack until a condition is met; `meanwhile` is called after each look. Raises as `Stack.look`."""
    while not met():
        stack.look()
        meanwhile()
        time.sleep(REFRESH_S)


@contextmanager
def reserved_ports(servers: int, gateway: int = 0, host: str = HOST) -> Iterator[RunPorts]:
    """Ports for so many rollout servers, and for the gateway where none is given, that nobody else is given while the
    context lasts. Raises `InvalidInput` where the gateway's port is in use, or `host`, where it is to listen, is no
    address of this machine."""
    with ExitStack() as held:
        try:
            door = held.enter_context(listener(host, gateway))
            if gateway:
                door.listen()  # to bind is possible beside one that only bound; to listen is not
                door.close()
                door = held.enter_context(listener(host, gateway))
        except OSError as error:
            raise InvalidInput(
                f"gateway.port {gateway} cannot be listened on at {host}: {error.strerror}; name another, or 0 for a "
                "free one"
            ) from None
        doors = [held.enter_context(listener(HOST, 0)) for _ in range(servers)]
        ports = RunPorts(tuple(_port(door) for door in doors), _port(door))
        if sys.platform != "linux":  # elsewhere a bound socket keeps others from listening
            held.close()
        yield ports


def _port(bound: socket.socket) -> int:
    port: int = bound.getsockname()[1]
    return port
