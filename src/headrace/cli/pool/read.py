"""`headrace pool stats`, `ls`, `show` and `export`: reading a pool, without changing it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from headrace.cli.common import (
    TargetCommand,
    cell,
    megabytes,
    on_terminal,
    opened_to_read,
    print_json,
    print_rows,
    remark,
)
from headrace.commands import Positional, Usage, command
from headrace.data.step import Step
from headrace.data.trajectory import Trajectory
from headrace.pool.config import DEFAULT_CHANNEL
from headrace.pool.errors import Gone
from headrace.pool.groups import FAILED

#: The counts of a channel's ledger, in the order in which they are shown.
LEDGER = ("submitted", "queued", "leased", "consumed", "dropped", "quarantined")
#: Levels of a tree of steps that are indented, each by up to four columns. Steps further down stay at the last of them
#: and name the step that they continue, so that a thousand turns are a thousand short lines.
MOST_LEVELS = 16


class PoolStatsCommand(TargetCommand):
    """The ledger (where every step that was ever submitted is now), the queues and how safe they are."""

    channel: str | None = Field(None, description="one channel only")
    as_json: bool = Field(False, alias="json", description="print JSON")

    def execute(self) -> None:
        with opened_to_read(self) as pool:
            found = pool.stats(self.channel)
        if self.as_json:
            print_json(found)
            return
        channels = found["channels"] if self.channel is None else {self.channel: found}
        rows = [{"channel": name, **_stats_row(stats)} for name, stats in channels.items()]
        if on_terminal():
            # A channel has more numbers than a terminal has columns: they stand below each other.
            names = [name for name in (rows[0] if rows else {}) if name != "channel"]
            rows = [{"": name, **{row["channel"]: row[name] for row in rows}} for name in names]
            print_rows(rows, ["", *channels], titles=["steps", *channels])
        else:
            print_rows(rows, list(rows[0]) if rows else ["channel"])
        if self.channel is None and found["desk"]["posted"]:
            counts = ", ".join(f"{found['desk'][name]} {name}" for name in ("queued", "buffered", "out", "served"))
            print(f"desk\t{counts}")
        print(f"durability\t{found['durability']}")
        if found["journal"] is not None:
            print(f"journal\t{found['journal']}\t{megabytes(found['journal_bytes'])}")


class PoolLsCommand(TargetCommand):
    """List what a channel holds, oldest first, a page at a time."""

    what: Positional[Literal["groups", "trajectories", "steps"]] = Field(
        "groups", description="groups, trajectories or steps"
    )
    channel: str = Field(DEFAULT_CHANNEL, description="the channel")
    state: str | None = Field(
        None,
        description="groups: waiting, ready or leased; trajectories: queued, leased, or failed (with why)",
    )
    prompt_uid: str | None = Field(None, description="of this group only")
    trajectory_uid: str | None = Field(None, description="trajectories and steps: this trajectory only")
    complete: bool | None = Field(None, description="trajectories that are complete, or not")
    min_reward: float | None = Field(None, description="trajectories with at least this reward")
    max_reward: float | None = Field(None, description="trajectories with at most this reward")
    trainable: bool | None = Field(None, description="steps that may be trained on, or not")
    quarantined: bool | None = Field(None, description="steps that are quarantined, or not")
    tag: str | None = Field(None, description="steps with this tag")
    limit: int = Field(100, ge=1, le=10_000, description="rows a page")
    cursor: str = Field("0", description="where the page begins: what the page before said")
    all_pages: bool = Field(False, alias="all", description="every page, one after the other")
    as_json: bool = Field(False, alias="json", description="print JSON")

    def execute(self) -> None:
        filters = self._filters()
        with opened_to_read(self) as pool:
            ask = {"groups": pool.list_groups, "trajectories": pool.list_trajectories, "steps": pool.list_steps}[
                self.what
            ]
            page = ask(self.channel, cursor=self.cursor, limit=self.limit, **filters)
            rows = page["items"]
            while self.all_pages and page["next"] is not None:
                page = ask(self.channel, cursor=page["next"], limit=self.limit, **filters)
                rows += page["items"]
        if self.as_json:
            print_json({"items": rows, "next": page["next"]})
            return
        failed = self.what == "trajectories" and self.state == FAILED
        print_rows(rows, (*COLUMNS[self.what], "reason") if failed else COLUMNS[self.what])
        if page["next"] is not None:
            remark(f"more with --cursor {page['next']}, or --all")

    def _filters(self) -> dict[str, Any]:
        """The filters that were given. Raises `Usage` for one that what is listed does not have."""
        given = {name: getattr(self, name) for name in sorted({name for names in FILTERS.values() for name in names})}
        given = {name: value for name, value in given.items() if value is not None}
        for name in given:
            if name not in FILTERS[self.what]:
                known = ", ".join(_flag(known) for known in FILTERS[self.what])
                raise Usage(f"{_flag(name)} does not filter {self.what}; these do: {known}")
        return given


class PoolShowCommand(TargetCommand):
    """One trajectory: which step continues which, what each cost in tokens and what it earned. Of one that failed: why,
    and how many steps it had."""

    trajectory_uid: Positional[str] = Field(description="the trajectory")
    channel: str | None = Field(None, description="the channel; without one all are searched")
    tokens: bool = Field(False, description="also the token ids that each step added")
    as_json: bool = Field(False, alias="json", description="print JSON")

    def execute(self) -> None:
        with opened_to_read(self) as pool:
            try:
                found: Trajectory = pool.trajectory(self.trajectory_uid, self.channel)
            except Gone:
                failed = _failed(pool, self.trajectory_uid, self.channel)
                if failed is None:
                    raise
                self._show(failed, [], as_json={})
                return
        rows = list(_step_rows(found, self.tokens))
        head = {
            "trajectory_uid": found.uid,
            "prompt_uid": found.prompt_uid,
            "channel": found.channel,
            "state": found.state,
            "complete": found.complete,
            "n_rollouts": found.n_rollouts,
            "reward": found.reward,
            "metadata": found.metadata,
        }
        self._show(head, rows, as_json={"sequences": len(found.sequences()), "steps": rows})

    def _show(self, head: dict[str, Any], rows: list[dict[str, Any]], as_json: dict[str, Any]) -> None:
        """Prints what is known of the whole, then its steps; `as_json` goes beside the head where JSON is asked for."""
        if self.as_json:
            print_json({**head, **as_json})
        elif on_terminal():
            Console().print(_tree(head, rows))
        else:
            for name, value in head.items():
                print(f"{name}\t{cell(value)}")
            for row in rows:
                print("  " * (_level(row) + 1) + _line(row))


class PoolExportCommand(TargetCommand):
    """Write what a channel holds, queued and leased, to a file: .parquet (needs the extra export) or .jsonl.

    steps: one row a step, with every field of Step. sequences: one row a root-to-leaf path, as a trainer gets it.
    """

    to: Path = Field(description="the file to write; it is replaced once the new one is whole")
    channel: str = Field(DEFAULT_CHANNEL, description="the channel")
    what: Literal["steps", "sequences"] = Field("steps", description="what a row is")

    def execute(self) -> None:
        from headrace.pool.export import export

        with opened_to_read(self) as pool:
            done = export(pool, self.to, self.channel, self.what)
        print(f"{done.rows} {self.what} of {done.trajectories} trajectories in {self.to} ({megabytes(done.bytes)})")
        if done.gone:
            remark(f"{done.gone} trajectories left the pool while it was read, and are not in the file")


#: The filters of each list. The pool refuses others too, but does not know the flags' names.
FILTERS: dict[str, tuple[str, ...]] = {
    "groups": ("state", "prompt_uid"),
    "trajectories": ("state", "prompt_uid", "trajectory_uid", "complete", "min_reward", "max_reward"),
    "steps": ("prompt_uid", "trajectory_uid", "trainable", "tag", "quarantined"),
}

#: The columns of each list.
COLUMNS: dict[str, tuple[str, ...]] = {
    "groups": (
        "prompt_uid", "state", "n_rollouts", "trajectories", "complete", "steps", "oldest_version", "deliveries",
    ),
    "trajectories": ("trajectory_uid", "prompt_uid", "state", "complete", "steps", "reward"),
    "steps": (
        "trajectory_uid", "step_index", "prompt_tokens", "response_tokens", "reward", "policy_version", "is_last",
        "finish_reason", "quarantined", "trainable", "quality", "tags", "note",
    ),
}  # fmt: skip


def _stats_row(stats: dict[str, Any]) -> dict[str, Any]:
    """One channel's numbers in one row."""
    return {
        **{name: stats["ledger"][name] for name in LEDGER},
        "balanced": stats["balanced"],
        **{f"groups {name}": count for name, count in stats["groups"].items()},
        "leases": stats["leases"],
        "policy version": stats["policy_version"],
        "closed": stats["closed"],
    }


def _flag(name: str) -> str:
    """A filter as it is typed."""
    return f"--{name.replace('_', '-')}"


def _failed(pool: Any, uid: str, channel: str | None) -> dict[str, Any] | None:
    """What a pool tells of a trajectory that failed; None where it did not."""
    for name in [channel] if channel is not None else list(pool.stats()["channels"]):
        for row in pool.list_trajectories(name, state=FAILED, trajectory_uid=uid)["items"]:
            return {**{field: row[field] for field in ("trajectory_uid", "prompt_uid")}, "channel": name, **row}
    return None


def _step_rows(trajectory: Trajectory, tokens: bool) -> Iterator[dict[str, Any]]:
    """A row for each step, parents before children, with its depth in the tree and the tokens that it added."""
    steps = {step.step_index: step for step in trajectory.steps}
    children: dict[int, list[int]] = defaultdict(list)
    for index, parent in sorted(trajectory.parents.items(), reverse=True):
        children[parent].append(index)
    coming = [(index, -1, 0) for index in children[-1]]
    while coming:
        index, parent, depth = coming.pop()
        known = len(steps[parent].prompt_ids) + len(steps[parent].response_ids) if parent >= 0 else 0
        yield _step_row(steps[index], parent, depth, known, tokens)
        coming += [(child, index, depth + 1) for child in children[index]]


def _step_row(step: Step, parent: int, depth: int, known: int, tokens: bool) -> dict[str, Any]:
    row = {
        "step_index": step.step_index,
        "parent": parent if parent >= 0 else None,
        "depth": depth,
        "prompt_tokens": len(step.prompt_ids),
        "new_prompt_tokens": len(step.prompt_ids) - known,
        "response_tokens": len(step.response_ids),
        "reward": step.reward,
        "policy_version": step.policy_version,
        "is_last": step.is_last,
        "finish_reason": step.finish_reason,
        "quarantined": step.quarantined,
        "trainable": step.trainable,
        "quality": step.quality,
        "tags": list(step.tags),
        "note": step.note,
        "log_probs": step.rollout_log_probs is not None,
    }
    if tokens:
        row["new_prompt_ids"] = step.prompt_ids[known:].tolist()
        row["response_ids"] = step.response_ids.tolist()
        row["rollout_log_probs"] = None if step.rollout_log_probs is None else step.rollout_log_probs.tolist()
    return row


def _level(row: dict[str, Any]) -> int:
    """The level at which a step is shown."""
    depth: int = row["depth"]
    return min(depth, MOST_LEVELS - 1)


def _line(row: dict[str, Any]) -> str:
    """A step on one line: tokens and version, then what differs from an ordinary step."""
    after = f" after {row['parent']}" if row["depth"] >= MOST_LEVELS else ""
    parts = [
        f"step {row['step_index']}{after}: {row['prompt_tokens']} prompt (+{row['new_prompt_tokens']}) "
        f"+ {row['response_tokens']} response tokens, version {row['policy_version']}"
    ]
    if row["reward"] is not None:
        parts.append(f"reward {row['reward']:g}")
    if row["finish_reason"] is not None:
        parts.append(cell(row["finish_reason"]))
    if row["is_last"]:
        parts.append("last")
    if not row["log_probs"]:
        parts.append("no log-probs")
    if row["quarantined"] is not None:
        parts.append(f"quarantined ({cell(row['quarantined'])})")
    if not row["trainable"]:
        parts.append("not trainable")
    parts += [f"{name} {cell(row[name])}" for name in ("quality", "tags", "note") if row[name] not in (None, [])]
    line = ", ".join(parts)
    if "response_ids" in row:
        line += f" | {' '.join(map(str, row['new_prompt_ids']))} -> {' '.join(map(str, row['response_ids']))}"
    return line


def _tree(head: dict[str, Any], rows: list[dict[str, Any]]) -> Tree:
    """A trajectory as a tree for a terminal: each step below the one that it continues."""
    tree = Tree(Text("  ".join(f"{name} {cell(value)}" for name, value in head.items() if value not in (None, {}))))
    branches = [tree]
    for row in rows:
        del branches[_level(row) + 1 :]
        branches.append(branches[-1].add(Text(_line(row))))
    return tree


stats_app = command("stats", PoolStatsCommand)
ls_app = command("ls", PoolLsCommand)
show_app = command("show", PoolShowCommand)
export_app = command("export", PoolExportCommand)
