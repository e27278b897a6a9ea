"""Named actors of a Ray cluster: joining the cluster, finding an actor by its address, and calls whose answer was lost.

An actor's address is `ray-actor://NAME?namespace=default&address=auto`.

Ray 2.60 lets only holders of the cluster's token in. On one machine the token file is found by itself; see docs/ray.md
for a cluster.
"""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import msgspec
import ray
import ray.exceptions as rayerr

from headrace.data.errors import HeadraceError, InvalidInput

DEFAULT_NAMESPACE = "default"
#: Seconds between two tries for an actor's name.
NAME_RETRY_S = 0.2
#: Times that a session of Ray's client (`ray://HOST:10001`) is asked for. Each is a process on the head that Ray gives
#: half a minute to begin: too little where several begin at once on a busy machine.
CLIENT_TRIES = 5
#: What Ray says where the cluster is there and that process did not begin in time.
NO_SESSION = "Initialization failure from server"
#: How an actor's address begins.
ACTOR_SCHEME = "ray-actor"

#: Answers lost to a dying or restarting actor: the call may be sent again.
LOST_ANSWERS = (rayerr.ActorUnavailableError, rayerr.ActorDiedError, rayerr.GetTimeoutError, rayerr.WorkerCrashedError)


class ClusterUnreachable(HeadraceError):
    """There is no Ray cluster at an address, or it lets this process not in."""

    code = "cluster_unreachable"


class ActorAddress(msgspec.Struct, frozen=True):
    """Where a named actor is: its name and namespace, and the cluster's address."""

    name: str
    namespace: str = DEFAULT_NAMESPACE
    cluster: str = "auto"

    def __str__(self) -> str:
        query = {"namespace": self.namespace, **({"address": self.cluster} if self.cluster != "auto" else {})}
        return f"{ACTOR_SCHEME}://{urllib.parse.quote(self.name, safe='')}?{urllib.parse.urlencode(query)}"

    @classmethod
    def read(cls, address: str) -> ActorAddress:
        """The parts of a `ray-actor://` address. Raises `InvalidInput` where it is none."""
        parts = urllib.parse.urlsplit(address)
        query = dict(urllib.parse.parse_qsl(parts.query))
        if parts.scheme != ACTOR_SCHEME or not parts.netloc or set(query) - {"namespace", "address"}:
            raise InvalidInput(f"{address!r}: an actor is {ACTOR_SCHEME}://NAME?namespace=default&address=auto")
        name = urllib.parse.unquote(parts.netloc)
        return cls(name, query.get("namespace", DEFAULT_NAMESPACE), query.get("address", "auto"))

    def handle(self) -> Any | None:
        """Joins the cluster and finds the actor; None where there is no actor of that name. Raises
        `ClusterUnreachable`."""
        join_cluster(self.cluster, self.namespace)
        try:
            return ray.get_actor(self.name, namespace=self.namespace)
        except ValueError:
            return None
        except Exception as error:
            if is_lost(error):
                raise ClusterUnreachable(f"the session with {self.cluster!r} ended: {error}") from error
            raise


def join_cluster(address: str | None, namespace: str) -> None:
    """Connects this process to the cluster, with the user's token where there is one. Raises `ClusterUnreachable`."""
    if ray.is_initialized():
        return
    _use_token()
    for left in reversed(range(CLIENT_TRIES)):
        try:
            ray.init(address=address or "auto", namespace=namespace, log_to_driver=False, configure_logging=False)
            return
        except (ConnectionError, RuntimeError, ValueError) as error:
            if left and NO_SESSION in str(error):
                continue
            raise ClusterUnreachable(
                f"no Ray cluster at {address!r}: {error}. Start one (`ray start --head`) or give its address; "
                "where it asks for a token, see docs/ray.md"
            ) from error


def _use_token() -> None:
    """Has Ray present the user's token, where there is one. By itself it does so for `auto` only, and an explicit
    host:port is refused with a bare connection error."""
    try:
        from ray._private.authentication import authentication_token_setup as setup

        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    except (ImportError, AttributeError, TypeError):
        pass  # another release of Ray; RAY_AUTH_MODE=token, set before the start, does the same


def is_lost(error: BaseException) -> bool:
    """Whether an answer was lost to an actor that dies or restarts, or to a session of Ray's client that ended: the
    call may be sent again, the latter by a handle that is found anew."""
    return isinstance(error, (*LOST_ANSWERS, ConnectionError)) or not ray.is_initialized()


def named_actor(start: Callable[[], Any], name: str, namespace: str, *, wait_s: float = 0.0) -> Any:
    """What `start` gives, the handle of a new actor of that name; a name that is taken is waited for `wait_s`: Ray ends
    the actors of a process that ended, but not at once. Raises `InvalidInput`."""
    give_up = time.monotonic() + wait_s
    while True:
        try:
            return start()
        except ValueError as error:
            if time.monotonic() >= give_up:
                raise InvalidInput(
                    f"an actor {name!r} runs in namespace {namespace!r} already; connect to it, stop it first, or take "
                    "another name"
                ) from error
            time.sleep(NAME_RETRY_S)


def cause_of(error: BaseException) -> str:
    """The last line of what made a call on an actor fail."""
    lines = str(error.__cause__ or error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
