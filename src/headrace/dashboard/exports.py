"""What a filter shows, as a file for other tools. Every row says where it comes from.

- `steps` and `sequences`, as `.parquet` or `.jsonl`: the pool's own export, of those trajectories alone; a row has the
  trajectory, the call, the version and the curation of what is in it.
- `sft`: one conversation a branch, as `messages`.
- `preferences`: the best against the worst of each group, as `prompt`, `chosen` and `rejected`.

Steps that are quarantined or not trainable are in `steps` and `sequences`, where they are marked; a conversation whose
every answer is one of them is left out of the other two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import orjson

from headrace.dashboard.branches import Messages, branch, branch_messages
from headrace.data.errors import InvalidInput, shown
from headrace.data.trajectory import Trajectory
from headrace.pool.errors import Gone, NotFound
from headrace.pool.export import export
from headrace.rewards.recorded import SampleReader
from headrace.version import __version__

#: A file's content, and by which name and kind it is offered.
ExportFormat = Literal["steps.jsonl", "steps.parquet", "sequences.jsonl", "sequences.parquet", "sft", "preferences"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)

#: A trajectory's channel, prompt and uid.
Key = tuple[str, str, str]
ReadTrajectory = Callable[[str, str], Trajectory]


class ExportResult(msgspec.Struct, frozen=True):
    """What was written; `gone` trajectories had left the pool, `unread` could not be read back into messages, and
    `equal` groups had no best and worst."""

    rows: int
    trajectories: int
    gone: int = 0
    unread: int = 0
    equal: int = 0


def check_format(given: str) -> ExportFormat:
    """The format of that name. Raises `InvalidInput` where there is none."""
    for known in EXPORT_FORMATS:
        if given == known:
            return known
    raise InvalidInput(f"format is {shown(given)}; it is one of {', '.join(EXPORT_FORMATS)}")


def write_export(
    path: Path,
    what: ExportFormat,
    keys: list[Key],
    read: ReadTrajectory,
    *,
    reader: SampleReader | None,
    source: str,
    filters: dict[str, Any],
) -> ExportResult:
    """Writes trajectories to a file that ends in the format's suffix. Raises `InvalidInput` where they cannot be
    written so: conversations need a tokenizer, a file of steps has one channel."""
    if what in ("sft", "preferences"):
        if reader is None:
            raise InvalidInput(
                f"{what} needs a tokenizer, and none is known here; sequences have the tokens themselves"
            )
        about = {"headrace": __version__, "source": source, "filter": filters}
        conversations = _Conversations(read, reader, about)
        rows = conversations.sft(keys) if what == "sft" else conversations.preferences(keys)
        written = 0
        with path.open("wb") as file:
            for row in rows:
                file.write(orjson.dumps(row, default=str, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS))
                written += 1
        return ExportResult(written, len(keys), conversations.gone, conversations.unread, conversations.equal)
    channels = sorted({channel for channel, _, _ in keys})
    if len(channels) > 1:
        raise InvalidInput(f"a file of steps has one channel, and these are of {', '.join(channels)}; filter by one")
    unit: Literal["steps", "sequences"] = "steps" if what.startswith("steps") else "sequences"
    chosen = _Chosen([uid for _, _, uid in keys], read)
    done = export(chosen, path, channels[0] if channels else "train", unit)
    return ExportResult(done.rows, done.trajectories, done.gone)


class _Chosen:
    """Some trajectories, as the pool's export asks for them."""

    def __init__(self, uids: list[str], read: ReadTrajectory) -> None:
        self._uids, self._read = uids, read

    def list_trajectories(self, channel: str = "", **filters: Any) -> Any:
        at, limit = int(filters["cursor"]), int(filters["limit"])
        items = [{"trajectory_uid": uid} for uid in self._uids[at : at + limit]]
        return {"items": items, "next": at + limit if at + limit < len(self._uids) else None}

    def trajectory(self, trajectory_uid: str, channel: str | None = None) -> Trajectory:
        return self._read(channel or "", trajectory_uid)


class _Conversations:
    """Trajectories read back into messages, with counts of those that could not be."""

    def __init__(self, read: ReadTrajectory, reader: SampleReader, about: dict[str, Any]) -> None:
        self._read, self._reader, self._about = read, reader, about
        self.gone = self.unread = self.equal = 0

    def sft(self, keys: Iterable[Key]) -> Iterator[dict[str, Any]]:
        """A row for each branch that may be learned from."""
        for channel, _, uid in keys:
            trajectory = self._get(channel, uid)
            if trajectory is None:
                continue
            for leaf in _leaves(trajectory):
                messages = self._messages(trajectory, leaf)
                if messages is not None:
                    yield {"messages": messages, "reward": trajectory.reward, "provenance": self._of(trajectory, leaf)}

    def preferences(self, keys: Iterable[Key]) -> Iterator[dict[str, Any]]:
        """A row for each group whose rewards differ: its best against its worst, each by its last branch."""
        groups: dict[tuple[str, str], list[str]] = {}
        for channel, prompt, uid in keys:
            groups.setdefault((channel, prompt), []).append(uid)
        for (channel, _), uids in groups.items():
            found = [one for uid in uids if (one := self._get(channel, uid)) is not None and one.reward is not None]
            found.sort(key=lambda one: (one.reward or 0.0, one.uid))
            if len(found) < 2 or found[0].reward == found[-1].reward:
                self.equal += 1
                continue
            worst, best = found[0], found[-1]
            leaves = [_leaves(one)[-1:] for one in (best, worst)]
            if not all(leaves):
                self.unread += 1
                continue
            good, bad = self._messages(best, leaves[0][0]), self._messages(worst, leaves[1][0])
            if good is None or bad is None:
                continue
            shared = _shared(good, bad)
            yield {
                "prompt": good[:shared],
                "chosen": good[shared:],
                "rejected": bad[shared:],
                "chosen_reward": best.reward,
                "rejected_reward": worst.reward,
                "provenance": {
                    "chosen": self._of(best, leaves[0][0]),
                    "rejected": self._of(worst, leaves[1][0]),
                },
            }

    def _get(self, channel: str, uid: str) -> Trajectory | None:
        try:
            return self._read(channel, uid)
        except (Gone, NotFound):
            self.gone += 1
            return None

    def _messages(self, trajectory: Trajectory, leaf: int) -> Messages | None:
        try:
            return branch_messages(trajectory, leaf, self._reader)
        except Exception:  # templates and parsers of strangers may raise anything
            self.unread += 1
            return None

    def _of(self, trajectory: Trajectory, leaf: int) -> dict[str, Any]:
        """Where a row comes from: the trajectory, and the calls of its branch."""
        steps = []
        for index in branch(trajectory, leaf):
            head = trajectory.tree.records[index].head
            extra = head.unpack_extra()
            step: dict[str, Any] = {
                "step_index": index,
                "call_id": extra.call_id,
                "policy_version": head.policy_version,
            }
            for name in ("quality", "note", "quarantined"):
                if getattr(extra, name) is not None:
                    step[name] = getattr(extra, name)
            if not extra.trainable:
                step["trainable"] = False
            if extra.tags:
                step["tags"] = list(extra.tags)
            steps.append(step)
        names = {"channel": trajectory.channel, "prompt_uid": trajectory.prompt_uid, "trajectory_uid": trajectory.uid}
        return {**self._about, **names, "state": trajectory.state, "reward": trajectory.reward, "steps": steps}


def _leaves(trajectory: Trajectory) -> list[int]:
    """The last steps of branches that have an answer which may be learned from."""
    parents = trajectory.parents
    ends = sorted(set(parents) - set(parents.values()))
    return [leaf for leaf in ends if any(_learnable(trajectory, index) for index in branch(trajectory, leaf))]


def _learnable(trajectory: Trajectory, index: int) -> bool:
    extra = trajectory.tree.records[index].head.unpack_extra()
    return extra.trainable and extra.quarantined is None


def _shared(first: Messages, second: Messages) -> int:
    """How many messages two conversations begin with alike; answers are never shared wholly."""
    count = 0
    for one, other in zip(first[:-1], second[:-1], strict=False):
        if one != other:
            break
        count += 1
    return count
