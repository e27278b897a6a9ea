"""The routes of trajectories: begun, registered, rewarded, completed, failed, listed, read and deleted.

Agents that know nothing of training need the base URL that `/init_trajectory` answers; whoever scores them, the rest.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any
from urllib.parse import quote, urlsplit

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from headrace.data.errors import InvalidInput, shown
from headrace.data.step import check_finite, check_uid
from headrace.gateway.access import Caller, Role, tells_reward
from headrace.gateway.errors import Refusal
from headrace.gateway.gateway import Gateway
from headrace.gateway.http import decode_body, json_response, path_uid
from headrace.gateway.per_model import PerModelTrajectories
from headrace.gateway.request import checked_sampling
from headrace.gateway.routes.bodies import (
    CompleteTrajectoryBody,
    FailTrajectoryBody,
    InitTrajectoryBody,
    RegisterTrajectoryBody,
    RewardBody,
    TrajectoryStatesBody,
)
from headrace.gateway.sessions import SAMPLING_FIELD, Session, forced_sampling
from headrace.pool.errors import Gone, NotFound, WasForgotten
from headrace.pool.operation import Completion

#: First segments of our own routes: no trajectory can be called so.
RESERVED_UIDS = frozenset(
    {
        *("init_trajectory", "complete_trajectory", "fail_trajectory", "trajectories"),
        *("generate", "submit_steps", "compute_reward"),
        *("health", "ready", "stats", "metrics", "policy_version", "pause", "resume", "servers", "pool", "v1"),
        *("docs", "redoc", "openapi.json", "dashboard", "sessions"),
    }
)
#: Trajectories whose completion is remembered, some 400 bytes each, and for how many seconds, for clients that did not
#: hear of it.
MAX_COMPLETIONS = 20_000
COMPLETION_S = 900.0


def check_uids(gateway: Gateway, uid: str, prompt: str) -> None:
    """Refuses names for a new trajectory and its group that no path could name."""
    check_uid(uid, "trajectory_uid")
    check_uid(prompt, "prompt_uid")
    if uid in RESERVED_UIDS:
        raise InvalidInput(f"trajectory_uid is {uid!r}, which is the name of a route; choose another")
    for name, value in (("trajectory_uid", uid), ("prompt_uid", prompt)):
        if value in (".", ".."):  # clients take these out of a URL, even percent-encoded
            raise InvalidInput(f"{name} is {value!r}, which no URL can hold; choose another")
    gateway.models.check(uid)


class RememberedCompletions:
    """How trajectories ended, as their clients were told: one that did not hear of it ends its trajectory again, and by
    then a trainer may have it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, float | None, Completion]] = OrderedDict()  # when first

    def __len__(self) -> int:
        return len(self._known)

    def answer(self, uid: str, reward: float | None, done: Completion) -> Completion:
        """What to answer where the pool says `done`: `late` only where the same end did not count before."""
        known = self._known.get(uid)
        if done.status == "late" and known is not None and known[1] == reward:
            return known[2]
        if done.status == "ok":
            now = self._clock()
            self._known[uid] = now, reward, done
            self._known.move_to_end(uid)
            while len(self._known) > MAX_COMPLETIONS or next(iter(self._known.values()))[0] < now - COMPLETION_S:
                self._known.popitem(last=False)
        return done


class TrajectoryRoutes:
    """The handlers, bound to one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.per_model = PerModelTrajectories(gateway)
        self._completions = RememberedCompletions()

    async def init_trajectory(self, request: Request) -> Response:
        """Begins a trajectory and answers its base_url."""
        gateway = self.gateway
        caller = gateway.access.caller(request, Role.AGENT)
        with caller.admitted():
            asked = decode_body(await gateway.body(request, caller), InitTrajectoryBody, empty=True)
            self._check_metadata(request, asked.metadata)
            return await self._begin(request, caller, asked)

    async def _begin(self, request: Request, caller: Caller, asked: InitTrajectoryBody) -> Response:
        gateway = self.gateway
        uid = asked.trajectory_uid if asked.trajectory_uid is not None else uuid.uuid4().hex
        prompt = asked.prompt_uid if asked.prompt_uid is not None else uid
        check_uids(self.gateway, uid, prompt)
        forced = checked_sampling(asked.sampling or {})
        if forced:
            asked = replace(asked, metadata={**(asked.metadata or {}), SAMPLING_FIELD: forced})
        if asked.trajectory_uid is not None:
            await self._open(caller, uid, prompt, asked)
        else:
            channel = caller.channel(asked.channel, gateway.models.default.channel)
            held, group = caller.uid(uid), caller.uid(prompt)
            await gateway.pool.aio.open(held, group, channel, asked.metadata, asked.n_rollouts)
            gateway.sessions.add(Session(held, group, channel, forced))
        base = f"{_reached(request)}/{quote(uid, safe='')}/{quote(prompt, safe='')}"
        return json_response({"trajectory_uid": uid, "prompt_uid": prompt, "base_url": base})

    async def register_trajectory(self, request: Request) -> Response:
        """Says which channel a trajectory belongs to, and what is known of it; begins one that is not there yet."""
        gateway = self.gateway
        caller = gateway.access.caller(request, Role.AGENT)
        uid, prompt = path_uid(request, "trajectory_uid"), path_uid(request, "prompt_uid")
        with caller.admitted():
            asked = decode_body(await gateway.body(request, caller), RegisterTrajectoryBody, empty=True)
            self._check_metadata(request, asked.metadata)
            check_uids(self.gateway, uid, prompt)
            await self._open(caller, uid, prompt, asked)
        return json_response({"status": "ok"})

    def _check_metadata(self, request: Request, metadata: dict[str, Any] | None) -> None:
        """A trajectory's metadata reaches its steps: to speak of their rewards needs the key that a reward needs."""
        if tells_reward(metadata):
            self.gateway.access.caller(request, Role.REWARD)

    async def _open(
        self, caller: Caller, uid: str, prompt: str, asked: InitTrajectoryBody | RegisterTrajectoryBody
    ) -> None:
        """Begins a trajectory under a name of its client's; one that is there stays, or moves if it has no steps."""
        gateway = self.gateway
        uid, prompt = caller.uid(uid), caller.uid(prompt)
        usual = caller.channel(asked.channel, gateway.models.default.channel)
        try:
            session: Session | None = await gateway.sessions.find(uid)
        except Gone as error:
            raise Refusal(f"{error}; choose another uid", 409, code="trajectory_complete") from None
        except NotFound:
            session = None
        if session is not None and session.complete:
            raise Refusal(f"trajectory {uid!r} is complete; choose another uid", 409, code="trajectory_complete")
        channel = session.channel if session is not None and asked.channel is None else usual
        await gateway.flushed(uid)
        await self.per_model.place(uid, prompt, channel, asked.metadata, asked.n_rollouts, keep=not caller.trusted)
        moves = session is not None and session.channel != channel
        told = asked.metadata, asked.n_rollouts
        await gateway.pool.aio.open(uid, prompt, channel, *told, move=moves, keep=not caller.trusted)
        if session is not None and (session.channel, session.prompt_uid) != (channel, prompt):
            session.channel, session.prompt_uid = channel, prompt  # a call under way goes with it
            await gateway.forget(uid)
        forced = forced_sampling(asked.metadata or {})
        if session is not None and forced:
            session.sampling = forced
            await gateway.forget(uid)
        gateway.sessions.add(session or Session(uid, prompt, channel, forced))

    async def reward(self, request: Request) -> Response:
        """Annotates a step, or the trajectory's last; `late` once its group was consumed, `kept` where a person's
        stands."""
        gateway = self.gateway
        caller = gateway.access.caller(request, Role.REWARD)
        uid = caller.uid(path_uid(request, "trajectory_uid"))
        with caller.admitted():
            asked = decode_body(await gateway.body(request, caller), RewardBody)
            check_finite(asked.reward, "reward")
            await gateway.flushed(uid)
            told = asked.reward, asked.step_index, asked.source, asked.info
            return json_response({"status": await self.per_model.reward(uid, *told)})

    async def complete_trajectory(self, request: Request) -> Response:
        """Ends a trajectory, with a reward where one is given."""
        gateway = self.gateway
        caller = gateway.access.caller(request, Role.REWARD)
        uid = caller.uid(path_uid(request, "trajectory_uid"))
        with caller.admitted():
            return await self._complete(
                uid, decode_body(await gateway.body(request, caller), CompleteTrajectoryBody, empty=True)
            )

    async def _complete(self, uid: str, asked: CompleteTrajectoryBody) -> Response:
        gateway = self.gateway
        if asked.reward is not None:
            check_finite(asked.reward, "reward")
        await gateway.flushed(uid)
        if asked.channel is not None:
            await self._check_channel(uid, asked.channel)
        gateway.models.check(uid)
        done = self._completions.answer(
            uid, asked.reward, await self.per_model.complete(uid, asked.reward, asked.min_steps)
        )
        if done.status == "unknown":
            raise Refusal(f"no trajectory {uid!r} to complete", 404, code="unknown_trajectory")
        await gateway.forget(uid)
        return json_response({"status": done.status, "steps": done.steps})

    async def fail_trajectory(self, request: Request) -> Response:
        """Ends a trajectory that failed, with the reason: its steps are dropped, and its group waits for another."""
        gateway = self.gateway
        caller = gateway.access.caller(request, Role.REWARD)
        uid = caller.uid(path_uid(request, "trajectory_uid"))
        with caller.admitted():
            asked = decode_body(await gateway.body(request, caller), FailTrajectoryBody)
            gateway.models.check(uid)
            await gateway.flushed(uid)
            done = await self.per_model.fail(uid, asked.reason)
            await gateway.forget(uid)
        gateway.counters.add("failed", done.status)
        return json_response({"status": done.status, "steps": done.steps})

    async def list_trajectories(self, request: Request) -> Response:
        """The caller's trajectories that no trainer has consumed, a page at a time."""
        gateway, given = self.gateway, request.query_params
        caller = gateway.access.caller(request, Role.REWARD)
        filters: dict[str, Any] = {"cursor": given.get("cursor") or 0, "limit": _count(given.get("limit", "100"))}
        if "prompt_uid" in given:
            filters["prompt_uid"] = caller.uid(given["prompt_uid"])
        if "complete" in given:
            if given["complete"] not in ("true", "false"):
                raise InvalidInput(f"complete is {shown(given['complete'])}; it must be true or false")
            filters["complete"] = given["complete"] == "true"
        with caller.admitted():
            channel = caller.channel(given.get("channel") or None, gateway.models.default.channel)
            page = await gateway.pool.aio.list_trajectories(channel, **filters)
        items = [named for row in page["items"] if (named := _as_named_by(caller, row)) is not None]
        return json_response({"items": items, "next": page["next"]})

    async def trajectory_states(self, request: Request) -> Response:
        """Where trajectories stand, by their uids, in that order: also those that are consumed, failed or dropped."""
        gateway = self.gateway
        caller = gateway.access.caller(request, Role.REWARD)
        with caller.admitted():
            asked = decode_body(await gateway.body(request, caller), TrajectoryStatesBody)
            channel = caller.channel(asked.channel, gateway.models.default.channel)
            uids = [caller.uid(uid) for uid in asked.trajectory_uids]
            found = await gateway.pool.aio.trajectory_states(uids, channel)
            ready = (await gateway.pool.aio.stats(channel))["groups"]["ready"]
        named = zip(asked.trajectory_uids, found, strict=True)
        kept = ("state", "complete", "steps", "reward")
        items = [{"trajectory_uid": uid} | {name: row[name] for name in kept if name in row} for uid, row in named]
        return json_response({"items": items, "ready_groups": ready})

    async def delete_trajectory(self, request: Request) -> Response:
        """Removes a trajectory and all of its steps for good; its group waits for another in its place. A request that
        comes again ends what the first one began."""
        gateway = self.gateway
        caller = gateway.access.caller(request, Role.REWARD)
        uid = caller.uid(path_uid(request, "trajectory_uid"))
        with caller.admitted():
            gateway.models.check(uid)
            await gateway.flushed(uid)
            try:
                await gateway.pool.aio.trajectory(uid)
            except WasForgotten:
                pass
            except Gone as error:
                raise Refusal(f"{error}; it can no longer be deleted here", 409, code="trajectory_complete") from None
            for model in gateway.models:
                await gateway.pool.aio.forget(model.uid_of(uid), erase=False)
            await gateway.pool.aio.forget(uid)  # what of all of them stands in files
            await gateway.forget(uid)
        return json_response({"status": "ok"})

    async def trajectory(self, request: Request) -> Response:
        """A trajectory and its steps, each with its whole prompt."""
        self.gateway.access.check(request, Role.ADMIN)
        uid = path_uid(request, "trajectory_uid")
        await self.gateway.recorder.flushed(uid)
        found = await self.gateway.pool.aio.trajectory(uid)
        return json_response(found.to_dict())

    async def _check_channel(self, uid: str, channel: str) -> None:
        try:
            session = await self.gateway.sessions.find(uid)
        except NotFound:
            return  # unknown or gone: the completion says which
        if session.channel != channel:
            raise Refusal(
                f"trajectory {uid!r} is in channel {session.channel!r}, not {channel!r}; complete it without a "
                "channel, or register it for the other before its first call",
                409,
                code="other_channel",
            )


def _count(given: str) -> int:
    if not (given.isascii() and given.isdecimal() and len(given) <= 9):
        raise InvalidInput(f"limit is {shown(given)}; it must be a number of rows")
    return int(given)


def _as_named_by(caller: Caller, row: dict[str, Any]) -> dict[str, Any] | None:
    """A row of a listing under the names that its caller has for it; None where it is not the caller's."""
    own = caller.uid("") if caller.tenant is not None else ""
    names = {name: row[name] for name in ("trajectory_uid", "prompt_uid")}
    try:
        if not all(name.startswith(own) and caller.uid(name.removeprefix(own)) == name for name in names.values()):
            return None
    except Refusal:
        return None  # a tenant's
    return {**row, **{field: name.removeprefix(own) for field, name in names.items()}}


def _reached(request: Request) -> str:
    """The address under which the caller reached us; its connection's own where it named none, or all of ours
    (`0.0.0.0`), which from another machine would be that machine's."""
    host = request.headers.get("host")
    if not host or _is_unspecified(host):
        address, port = request.scope.get("server") or ("127.0.0.1", None)
        named = f"[{address}]" if ":" in address else address
        named = "127.0.0.1" if _is_unspecified(named) else named
        host = f"{named}:{port}" if port else named
    return f"{request.scope.get('scheme', 'http')}://{host}"


def _is_unspecified(host: str) -> bool:
    try:
        return ip_address(urlsplit(f"//{host}").hostname or "").is_unspecified
    except ValueError:  # a name
        return False
