"""Operations that only look: one trajectory, numbers, events, and pages of groups, trajectories and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec

from headrace.data.block import Record
from headrace.data.errors import InvalidInput, shown
from headrace.data.step import check_count, check_finite, check_text, check_uid
from headrace.data.trajectory import Trajectory
from headrace.pool.channel import Channel
from headrace.pool.config import DEFAULT_CHANNEL
from headrace.pool.errors import Gone, NotFound, WasForgotten
from headrace.pool.groups import FAILED, FULL, OPEN, GroupState, TrajectoryState
from headrace.pool.operation import Read
from headrace.pool.state import Event, State
from headrace.pool.views import check_loaded, trajectory_view

Row = dict[str, Any]

#: Where a row stands: its group's number, then a trajectory's place in the group, then a step's index. As a cursor it
#: is a text such as `12-0-3`; groups that come or go between two pages do not move the others.
Position = tuple[int, ...]

#: Rows that one page may have, and that are looked at for it: more would be an answer of megabytes, and a lock held for
#: as long.
MAX_PAGE_ROWS = 10_000


class ReadTrajectory(Read[Trajectory], frozen=True):
    """The `Trajectory` as it stands; `NotFound` where it is unknown or gone."""

    name = "trajectory"
    any_channel = True

    trajectory_uid: str
    channel: str | None = None

    def read(self, state: State, now: float) -> Trajectory:
        return _trajectory(state, self.trajectory_uid, self.channel)


class ReadTrajectoryStates(Read[list[Row]], frozen=True):
    """Where trajectories of a channel stand, in the order of their uids, at most 10,000 of them: `trajectory_uid`,
    `state`, and `complete`, `steps` and `reward` of those that are there. The state is `queued` or `leased`; of one
    that is gone `consumed`, `failed`, or why its group was dropped (`stale`, `capacity`, `timeout`, ...); or `unknown`.
    """

    name = "trajectory_states"

    trajectory_uids: list[str]
    channel: str = DEFAULT_CHANNEL

    def read(self, state: State, now: float) -> list[Row]:
        return _trajectory_states(state.look(self.channel), self.trajectory_uids)


class ReadStats(Read[dict[str, Any]], frozen=True):
    """The ledger, queue and configuration of one channel, or of all; see docs/pool.md."""

    name = "stats"
    any_channel = True

    channel: str | None = None

    def read(self, state: State, now: float) -> dict[str, Any]:
        return _stats(state, self.channel)


class ReadEvents(Read[list[Event]], frozen=True):
    """What happened from `cursor` on: drops, late rewards, redeliveries, versions, ..., oldest first."""

    name = "events"

    cursor: int = 0
    limit: int = 1000

    def read(self, state: State, now: float) -> list[Event]:
        return _events(state, self.cursor, self.limit)


class ListGroups(Read[dict[str, Any]], frozen=True):
    """A page of a channel's groups."""

    name = "list_groups"

    channel: str
    filters: dict[str, Any]

    def read(self, state: State, now: float) -> dict[str, Any]:
        return _groups_page(state, self.channel, self.filters)


class ListTrajectories(ListGroups, frozen=True):
    """A page of a channel's trajectories."""

    name = "list_trajectories"

    def read(self, state: State, now: float) -> dict[str, Any]:
        return _trajectories_page(state, self.channel, self.filters)


class ListSteps(ListGroups, frozen=True):
    """A page of a channel's steps."""

    name = "list_steps"

    def read(self, state: State, now: float) -> dict[str, Any]:
        return _steps_page(state, self.channel, self.filters)


def list_groups(channel: str = DEFAULT_CHANNEL, **filters: Any) -> ListGroups:
    """A page of groups: `{"items": [...], "next": cursor or None}`. Filters: state, prompt_uid, cursor, limit. Where a
    filter fits few, a page may be shorter than `limit`, even empty: the listing has ended once `next` is None."""
    return ListGroups(channel, filters)


def list_trajectories(channel: str = DEFAULT_CHANNEL, **filters: Any) -> ListTrajectories:
    """Likewise of trajectories; filters also: trajectory_uid, complete, min_reward, max_reward. Those that failed, with
    why, are listed with `state="failed"` alone."""
    return ListTrajectories(channel, filters)


def list_steps(channel: str = DEFAULT_CHANNEL, **filters: Any) -> ListSteps:
    """Likewise of steps, without their tokens; filters also: trajectory_uid, trainable, tag, quarantined."""
    return ListSteps(channel, filters)


# -- numbers and events ------------------------------------------------------------------------------------------------


def _stats(state: State, channel: str | None) -> Row:
    """One channel's numbers, or every channel's under `channels` with the sums of their ledgers, and scored groups'."""
    if channel is not None:
        return _channel_stats(state.look(channel))
    rows = {name: _channel_stats(c) for name, c in state.channels.items()}
    total = {
        k: sum(row["ledger"][k] for row in rows.values())
        for k in ("submitted", "queued", "leased", "consumed", "quarantined")
    }
    total["dropped"] = sum(sum(row["ledger"]["dropped"].values()) for row in rows.values())
    balanced = state.scored.balanced and all(row["balanced"] for row in rows.values())
    return {"ledger": total, "balanced": balanced, "channels": rows, "desk": state.scored.stats()}


def _channel_stats(c: Channel) -> Row:
    first = c.waiting.first
    oldest = c.groups[first] if first is not None else None
    return {
        "ledger": c.ledger.as_dict(),
        "balanced": c.ledger.balanced,
        "groups": {
            "queued": len(c.waiting),
            "ready": len(c.ready[FULL]),
            "leased": len(c.groups) - len(c.waiting),
            "history": len(c.history),
        },
        "trajectories": len(c.trajectories),
        "leases": len(c.leases),
        "policy_version": c.version,
        "oldest_version": oldest.oldest if oldest else None,
        "closed": c.closed,
        "tombstones": len(c.tombstones),
        "counts": dict(c.ledger.counts),
        "config": msgspec.structs.asdict(c.config),
    }


def _events(state: State, cursor: int, limit: int) -> list[Event]:
    """The events kept, from `cursor` on."""
    check_count(cursor, "cursor")
    check_count(limit, "limit", 1)
    kept = state.events
    first = kept[0].cursor if kept else 0
    return list(islice(kept, max(0, cursor - first), max(0, cursor - first) + limit))


def _trajectory(state: State, uid: str, channel: str | None) -> Trajectory:
    """A trajectory in a channel, or in any; `Gone` where it was there, `NotFound` where not."""
    known = state.known_in.names(uid)
    # One that no channel knows any more may still be in the history of one that remembers few.
    names = [channel] if channel is not None else known or list(state.channels)
    for name in names:
        there = state.look(name)
        found = there.trajectories.get(uid) or next(
            (group.trajectories[uid] for group in there.history.values() if uid in group.trajectories), None
        )
        if found is not None:
            check_loaded([found])
            return trajectory_view(there, found)
    for there in (state.look(name) for name in names):
        if uid in there.failed:
            raise Gone(f"trajectory {uid!r} failed ({there.failed[uid].reason}): its content is gone")
        if uid in there.tombstones:
            reason = there.tombstones[uid].reason
            raise (WasForgotten if reason == "forgotten" else Gone)(
                f"trajectory {uid!r} is {reason}: its content is gone"
            )
    raise NotFound(f"no trajectory {uid!r}")


def _trajectory_states(there: Channel, uids: list[str]) -> list[Row]:
    """A row for each uid, whether the trajectory is there, gone or unknown."""
    if len(uids) > MAX_PAGE_ROWS:
        raise InvalidInput(f"trajectory_uids has {len(uids)} uids; at most {MAX_PAGE_ROWS} are told of at a time")
    return [_state_row(there, check_uid(uid, "trajectory_uid")) for uid in uids]


def _state_row(there: Channel, uid: str) -> Row:
    if (known := there.trajectories.get(uid)) is not None:
        return _trajectory_row(known)
    tomb = there.tombstones.get(uid)
    return {"trajectory_uid": uid, "state": "unknown" if tomb is None else tomb.reason}


def _groups_page(state: State, channel: str, filters: Row) -> Row:
    """A page of a channel's groups."""
    there = state.look(channel)
    f = _Filters(filters, state=None, prompt_uid=None)
    rows = (((seq,), _group_row(there, there.groups[seq])) for seq in sorted(there.groups) if (seq,) >= f.cursor)
    return _page(rows, f, lambda r: f.fits(r, "state") and f.fits(r, "prompt_uid"))


def _group_row(c: Channel, group: GroupState) -> Row:
    return {
        "seq": group.seq,
        "prompt_uid": group.uid,
        "state": "leased" if group.leased or group.lease else "ready" if group.bucket == FULL else "waiting",
        "n_rollouts": c.need(group),
        "trajectories": len(group.trajectories),
        "complete": len(group.counted),
        "steps": group.queued + group.leased,
        "oldest_version": group.oldest,
        "deliveries": group.deliveries,
        "touched": group.touched,
    }


def _trajectories_page(state: State, channel: str, filters: Row) -> Row:
    """A page of a channel's trajectories."""
    there = state.look(channel)
    known = ("state", "prompt_uid", "trajectory_uid", "complete", "min_reward", "max_reward")
    f = _Filters(filters, **dict.fromkeys(known))
    for name in ("min_reward", "max_reward"):
        if f.values[name] is not None:
            check_finite(f.values[name], name)

    def fits(row: Row) -> bool:
        reward = row["reward"]
        low, high = f.values["min_reward"], f.values["max_reward"]
        in_range = (low is None or (reward is not None and reward >= low)) and (
            high is None or (reward is not None and reward <= high)
        )
        return in_range and all(f.fits(row, name) for name in ("state", "prompt_uid", "trajectory_uid", "complete"))

    if f.values["state"] == FAILED:
        return _page(_failed(there, f), f, fits)
    only = there.trajectories.get(f.values["trajectory_uid"])
    found = (
        iter([((0, 0), only)] if only is not None else [])
        if f.values["trajectory_uid"]
        else _trajectories(there, f.cursor)
    )
    return _page(((at, _trajectory_row(t)) for at, t in found if at >= f.cursor), f, fits)


def _failed(there: Channel, f: _Filters) -> Iterator[tuple[Position, Row]]:
    """Trajectories that failed, in the order in which they did, each with its number among all of them."""
    only = f.values["trajectory_uid"]
    for uid in there.failed if only is None else [uid for uid in (only,) if uid in there.failed]:
        failed = there.failed[uid]
        if (failed.number,) >= f.cursor:
            yield (
                (failed.number,),
                {
                    "trajectory_uid": uid,
                    "prompt_uid": there.tombstones[uid].prompt,
                    "state": FAILED,
                    "complete": False,
                    "steps": failed.steps,
                    "reward": None,
                    "reason": failed.reason,
                    "at": failed.at,
                },
            )


def _trajectories(there: Channel, cursor: Position) -> Iterator[tuple[Position, TrajectoryState]]:
    """Trajectories from a cursor's on, each with its place."""
    for seq in sorted(seq for seq in there.groups if seq >= cursor[0]):
        for place, trajectory in enumerate(there.groups[seq].trajectories.values()):
            if (seq, place) >= cursor[:2]:
                yield (seq, place), trajectory


def _trajectory_row(t: TrajectoryState) -> Row:
    rewards = [r.head.reward for r in t.tree.records.values() if r.head.reward is not None]
    return {
        "trajectory_uid": t.uid,
        "prompt_uid": t.group.uid,
        "state": "leased" if t.group.lease else "queued",
        "complete": t.last != OPEN and len(t.tree) == t.last + 1,
        "steps": len(t.tree),
        "reward": sum(rewards) if rewards else None,
    }


def _steps_page(state: State, channel: str, filters: Row) -> Row:
    """A page of a channel's steps, without their tokens."""
    there = state.look(channel)
    f = _Filters(filters, prompt_uid=None, trajectory_uid=None, trainable=None, tag=None, quarantined=None)

    def fits(row: Row) -> bool:
        tag, quarantined = f.values["tag"], f.values["quarantined"]
        return (
            all(f.fits(row, name) for name in ("prompt_uid", "trajectory_uid", "trainable"))
            and (tag is None or tag in row["tags"])
            and (quarantined is None or (row["quarantined"] is not None) == quarantined)
        )

    return _page(_steps(there, f), f, fits)


def _steps(there: Channel, f: _Filters) -> Iterator[tuple[Position, Row]]:
    only = f.values["trajectory_uid"]
    known: Iterator[tuple[Position, TrajectoryState]]
    if only is not None:
        known = iter([((0, 0), there.trajectories[only])] if only in there.trajectories else [])
    else:
        known = _trajectories(there, f.cursor)
    for place, trajectory in known:
        for index, record in sorted(trajectory.tree.records.items()):
            at = (*place, index)
            if at >= f.cursor:
                yield at, _step_row(record)


def _step_row(record: Record) -> Row:
    head, extra = record.head, record.head.unpack_extra()
    return {
        "trajectory_uid": head.trajectory_uid,
        "prompt_uid": head.prompt_uid,
        "step_index": head.step_index,
        "prompt_tokens": head.keep + head.n_prompt,
        "response_tokens": head.n_response,
        "reward": head.reward,
        "policy_version": head.policy_version,
        "is_last": head.is_last,
        "created_at": head.created_at,
        "finish_reason": extra.finish_reason,
        "quarantined": extra.quarantined,
        "trainable": extra.trainable,
        "quality": extra.quality,
        "tags": list(extra.tags),
        "note": extra.note,
    }


#: Filters that name something.
TEXT_FILTERS = frozenset({"state", "prompt_uid", "trajectory_uid", "tag"})


class _Filters:
    """The filters of a listing, checked by name; `cursor` and `limit` page through it."""

    def __init__(self, given: Row, **known: Any) -> None:
        known |= {"cursor": 0, "limit": 100}
        for name in given:
            if name not in known:
                raise InvalidInput(f"unknown filter {name!r}; known: {', '.join(known)}")
        self.values = known | given
        for name in TEXT_FILTERS & given.keys():
            if given[name] is not None:
                check_text(given[name], name)
        self.cursor = _position(self.values["cursor"] or 0)
        self.limit = check_count(self.values["limit"], "limit", 1)
        if self.limit > MAX_PAGE_ROWS:
            raise InvalidInput(f"limit is {shown(self.limit)}; at most {MAX_PAGE_ROWS} rows are given at a time")

    def fits(self, row: Row, name: str) -> bool:
        wanted = self.values[name]
        return wanted is None or row[name] == wanted


def _position(cursor: Any) -> Position:
    if not isinstance(cursor, str):
        return (check_count(cursor, "cursor"),)
    parts = cursor.split("-")
    if len(parts) > 3 or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        raise InvalidInput(f"cursor is {shown(cursor)}; give the `next` of the page before, such as 12-0-3")
    return tuple(map(int, parts))


def _page(rows: Iterator[tuple[Position, Row]], f: _Filters, fits: Callable[[Row], bool]) -> Row:
    items: list[Row] = []
    for looked_at, (at, row) in enumerate(rows):
        fitting = fits(row)
        if looked_at == MAX_PAGE_ROWS or (fitting and len(items) == f.limit):
            return {"items": items, "next": "-".join(map(str, at))}
        if fitting:
            items.append(row)
    return {"items": items, "next": None}
