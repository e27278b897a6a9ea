"""Keeps an index in step with a pool, in slices that are short for the pool.

A pool tells of no single step; but a group's row changes with all that happens in it (`touched`). So a sweep pages
through the groups' rows and reads the steps of those groups alone whose row is another than before. A group that is no
longer listed has left the pool, and the pool is asked what became of its trajectories.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headrace.dashboard.index import PRESENT, TrajectoryIndex
from headrace.dashboard.records import TrajectoryRecord
from headrace.dashboard.source import PoolSource
from headrace.data.trajectory import Trajectory

Row = dict[str, Any]

#: Rows read at a time. A pool answers within milliseconds, during which its other callers wait.
GROUPS_A_SLICE = 500
STEPS_A_SLICE = 250
STATES_A_SLICE = 500
#: Trajectories of a journal that are read at a time.
CONSUMED_A_SLICE = 100

#: A group's row, less its names: equal where nothing happened in it.
_WATCHED = ("state", "trajectories", "complete", "steps", "deliveries", "touched")


class PoolFollower:
    """`sweep` once brings the index up to date; what it found is remembered for the next."""

    def __init__(self, source: PoolSource, index: TrajectoryIndex) -> None:
        self._source, self._index = source, index
        self._groups: dict[str, dict[int, tuple[tuple[Any, ...], str]]] = {}
        self._uids: dict[tuple[str, int], tuple[str, ...]] = {}
        self._group_rows: dict[tuple[str, str], dict[int, Row]] = {}  # a prompt may have several groups at once
        self._consumed_read: dict[str, int] = {}
        self.stats: Row = {}
        #: Whether one sweep has gone through the whole pool.
        self.done_once = False

    def group_row(self, channel: str, prompt_uid: str) -> Row | None:
        """The pool's own row of a prompt's group, its newest; None where none is in the pool."""
        rows = self._group_rows.get((channel, prompt_uid))
        return None if rows is None else rows[max(rows)]

    def sweep(self) -> Iterator[None]:
        """One pass over the pool; it stands after each slice. Raises what the source raises; the next one goes on."""
        self._source.refresh()
        self.stats = self._source.stats()
        yield
        for channel in list(self.stats["channels"]):
            yield from self._sweep_channel(channel)
        self.done_once = True

    def _sweep_channel(self, channel: str) -> Iterator[None]:
        known = self._groups.setdefault(channel, {})
        listed: set[int] = set()
        cursor: str | None = "0"
        while cursor is not None:
            page = self._source.groups(channel, cursor, GROUPS_A_SLICE)
            cursor = page["next"]
            yield
            changed: dict[str, Row] = {}
            for row in page["items"]:
                listed.add(row["seq"])
                is_new = known.get(row["seq"]) != _seen(row)
                # Steps name their prompt, and not their group: two groups of one prompt are not read together.
                if not is_new or row["prompt_uid"] in changed:
                    yield from self._read_groups(channel, list(changed.values()))
                    changed = {}
                if is_new:
                    changed[row["prompt_uid"]] = row
                    known[row["seq"]] = ((), row["prompt_uid"])  # read again where reading fails
            yield from self._read_groups(channel, list(changed.values()))
        yield from self._settle(channel, [seq for seq in known if seq not in listed])
        yield from self._read_consumed(channel)

    def _read_groups(self, channel: str, groups: Sequence[Row]) -> Iterator[None]:
        """Reads the steps of groups that stand one after the other: pages from the first one's place on, past the last
        one's. Each group is put into the index once all of its steps were read."""
        waiting = {group["prompt_uid"]: group for group in groups}
        others = {prompt: self._uids_behind(channel, group) for prompt, group in waiting.items()}
        steps: dict[str, dict[str, list[Row]]] = {prompt: {} for prompt in waiting}
        cursor: str | None = str(groups[0]["seq"]) if groups else None
        while cursor is not None and waiting:
            left = sum(group["steps"] for group in waiting.values()) - sum(
                len(rows) for prompt in waiting for rows in steps[prompt].values()
            )
            page = self._source.steps(channel, cursor, min(STEPS_A_SLICE, max(1, left) + 8))
            for row in page["items"]:
                prompt, uid = row["prompt_uid"], row["trajectory_uid"]
                if prompt in waiting and uid not in others[prompt]:
                    steps[prompt].setdefault(uid, []).append(row)
            cursor = page["next"]
            begins = int(cursor.partition("-")[0]) if cursor is not None else None
            yield
            for prompt, group in list(waiting.items()):
                if begins is None or group["seq"] < begins:
                    del waiting[prompt]
                    yield from self._put_group(channel, group, steps.pop(prompt))

    def _uids_behind(self, channel: str, group: Row) -> set[str]:
        """The trajectories that are known to be in later groups of the same prompt: a page goes on to their steps."""
        later = [seq for seq in self._group_rows.get((channel, group["prompt_uid"]), ()) if seq > group["seq"]]
        return {uid for seq in later for uid in self._uids.get((channel, seq), ())}

    def _put_group(self, channel: str, group: Row, steps: dict[str, list[Row]]) -> Iterator[None]:
        """A group whose steps were read."""
        seq = group["seq"]
        self._group_rows.setdefault((channel, group["prompt_uid"]), {})[seq] = group
        state = "leased" if group["state"] == "leased" else "queued"
        for uid, rows in steps.items():
            self._index.put(record_of_rows(channel, state, uid, rows))
        left = [uid for uid in self._uids.get((channel, seq), ()) if uid not in steps]
        self._uids[channel, seq] = (*steps, *left)  # asked again where asking fails
        yield from self._retire(channel, left)
        self._uids[channel, seq] = tuple(steps)
        self._groups[channel][seq] = _seen(group)

    def _settle(self, channel: str, gone: Sequence[int]) -> Iterator[None]:
        """Asks what became of the trajectories of groups that have left, and forgets the groups once that is known."""
        yield from self._retire(channel, [uid for seq in gone for uid in self._uids.get((channel, seq), ())])
        for seq in gone:
            self._uids.pop((channel, seq), None)
            _, prompt = self._groups[channel].pop(seq)
            rows = self._group_rows.get((channel, prompt), {})  # none of a group that was never read
            rows.pop(seq, None)
            if not rows:
                self._group_rows.pop((channel, prompt), None)

    def _retire(self, channel: str, uids: Sequence[str]) -> Iterator[None]:
        for at in range(0, len(uids), STATES_A_SLICE):
            for row in self._source.states(channel, list(uids[at : at + STATES_A_SLICE])):
                if row["state"] not in PRESENT:  # it may be in another group by now
                    self._index.retire(channel, row["trajectory_uid"], _settled(row["state"]))
            yield

    def _read_consumed(self, channel: str) -> Iterator[None]:
        """What a journal still holds of what was consumed: read once, and again when more was."""
        consumed = self.stats["channels"][channel]["ledger"]["consumed"]
        if self._consumed_read.get(channel) == consumed:
            return
        for number, trajectory in enumerate(self._source.consumed(channel), 1):
            known = self._index.get(channel, trajectory.uid)
            if known is None or known.state != "consumed":
                self._index.put(record_of(trajectory))
            if number % CONSUMED_A_SLICE == 0:
                yield
        self._consumed_read[channel] = consumed


def _seen(row: Row) -> tuple[tuple[Any, ...], str]:
    return tuple(row[name] for name in _WATCHED), row["prompt_uid"]


def record_of_rows(channel: str, state: str, uid: str, rows: Sequence[Row]) -> TrajectoryRecord:
    """A trajectory's record out of the rows that a pool lists for its steps; at least one."""
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    times = [row["created_at"] for row in rows if row["created_at"] is not None]
    last = [row["step_index"] for row in rows if row["is_last"]]
    return TrajectoryRecord(
        uid=uid,
        prompt_uid=rows[0]["prompt_uid"],
        channel=channel,
        state=state,
        complete=bool(last) and len(rows) == last[-1] + 1,
        steps=len(rows),
        tokens=sum(row["response_tokens"] for row in rows),
        prompt_tokens=max(row["prompt_tokens"] for row in rows),
        reward=float(sum(rewards)) if rewards else None,
        version=min(row["policy_version"] or 0 for row in rows),
        created_at=min(times, default=None),
        quarantined=sum(row["quarantined"] is not None for row in rows),
        tags=_all_tags(row["tags"] for row in rows),
    )


def record_of(trajectory: Trajectory) -> TrajectoryRecord:
    """A trajectory's record out of the trajectory itself."""
    records = [record for _, record in sorted(trajectory.tree.records.items())]
    heads, extras = [record.head for record in records], [record.head.unpack_extra() for record in records]
    return TrajectoryRecord(
        uid=trajectory.uid,
        prompt_uid=trajectory.prompt_uid,
        channel=trajectory.channel,
        state=trajectory.state,
        complete=trajectory.complete,
        steps=len(heads),
        tokens=sum(head.n_response for head in heads),
        prompt_tokens=max((head.keep + head.n_prompt for head in heads), default=0),
        reward=trajectory.reward,
        version=min((head.policy_version or 0 for head in heads), default=0),
        created_at=min((head.created_at for head in heads), default=None),
        quarantined=sum(extra.quarantined is not None for extra in extras),
        tags=_all_tags(extra.tags for extra in extras),
    )


def _settled(state: str) -> str:
    return "gone" if state == "unknown" else state


def _all_tags(tags: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tag for those in tags for tag in those))
