"""Submitting steps: which of them are new, which are retries, which contradict, which come too late.

Deciding is pure: it reads the state, and leaves it as it found it. All or nothing: one contradiction, and no step is
taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from headrace.data.block import TOKEN_BYTES, Block, Record, StepHead, pack_extra
from headrace.data.errors import InvalidInput, shown
from headrace.data.packing import large_value, pack
from headrace.data.step import REWARD_INFO, REWARD_SOURCE, Step
from headrace.data.tree import TokenTree
from headrace.pool import facts as f
from headrace.pool.channel import Channel
from headrace.pool.config import DEFAULT_CHANNEL, Limits
from headrace.pool.errors import Conflict, PoolClosed, PoolFull
from headrace.pool.groups import DIGEST, OPEN, TrajectoryState, fingerprint, is_persons_reward
from headrace.pool.operation import Change, MustWait, Plan, Receipt
from headrace.pool.state import State
from headrace.pool.views import check_arrays_loaded, with_bases


class _Block(Change[Receipt], frozen=True):
    block: Block
    channel: str = DEFAULT_CHANNEL


class SubmitBlock(_Block, frozen=True, kw_only=True):
    """Takes all the steps of a block, or none."""

    name = "submit"
    waits = True

    timeout: float | None = None

    def arguments(self) -> dict[str, Any]:
        return {"channel": self.channel, "timeout": self.timeout}

    def steps(self) -> Block:
        return self.block

    def plan(self, state: State, now: float) -> Plan:
        _check_size(self.block, state.limits)
        plan = plan_submit(state.look(self.channel), self.block, now, state.holds_blob)
        _check_indices(plan.reply.indices, state.limits)
        return plan

    def gave_up(self) -> None:
        raise PoolFull(f"channel {self.channel!r} had no room within {self.timeout} s; nothing was taken")


def submit_steps(
    steps: Sequence[Step | dict[str, Any]], channel: str = DEFAULT_CHANNEL, *, timeout: float | None = None
) -> SubmitBlock:
    """Takes all the steps, or none. `timeout` bounds the wait for room (`overflow="block"`)."""
    if isinstance(steps, Step | dict | str) or not hasattr(steps, "__len__"):
        raise InvalidInput(f"steps must be a list of steps, not {shown(steps)}")
    return SubmitBlock(pack(steps), channel, timeout=timeout)


def submit_step(
    step: Step | dict[str, Any], channel: str = DEFAULT_CHANNEL, *, timeout: float | None = None
) -> SubmitBlock:
    """`submit_steps` for one step."""
    return submit_steps([step], channel, timeout=timeout)


def plan_submit(channel: Channel, block: Block, now: float, known_blob: Callable[[bytes], bool]) -> Plan:
    """Which steps of a block are taken, as a plan whose reply is a `Receipt`. `Conflict` or `InvalidInput` where one
    cannot be taken, `PoolFull` or `MustWait` where there is no room: none is taken then. `MustLoad` where what they are
    compared with is to be read first."""
    if channel.closed:
        raise PoolClosed(f"channel {channel.name!r} was shut down; nothing was taken")
    if _all_new(channel, block):
        _make_room(channel, {head.prompt_uid for head in block.heads})
        for head in block.heads:
            if head.step_index < 0 or head.policy_version < 0 or not head.created_at:
                _settle_head(head, max(head.step_index, 0), channel, now)
        return _taken(channel, block, now, [head.step_index for head in block.heads], known_blob)
    return _Intake(channel, now).plan(block, known_blob)


def _check_size(block: Block, limits: Limits) -> None:
    """`InvalidInput` where a submit is larger than the limits."""
    if len(block.heads) > limits.max_submit_steps:
        raise InvalidInput(
            f"{len(block.heads)} steps in one submit; at most {limits.max_submit_steps} are taken: send them in parts"
        )
    size = len(block.ids) + len(block.log_probs) + sum(map(len, block.blobs.values()))
    size += sum([len(head.extra) for head in block.heads])
    if size > limits.max_submit_mb * 1e6:
        raise InvalidInput(
            f"a submit of {size / 1e6:.1f} MB; at most {limits.max_submit_mb} MB are taken: send it in parts"
        )
    most = max([head.keep + head.n_prompt + head.n_response for head in block.heads], default=0)
    if most > limits.max_step_tokens:
        at = next(at for at, head in enumerate(block.heads) if head.keep + head.n_prompt + head.n_response == most)
        raise InvalidInput(f"step {at} has {most} tokens; at most {limits.max_step_tokens} are taken")
    _check_indices([head.step_index for head in block.heads], limits)


def _check_indices(indices: Sequence[int], limits: Limits) -> None:
    """Those that producers gave, before they are looked at, and those that the pool assigned."""
    most = max(indices, default=0)
    if most >= limits.max_trajectory_steps:
        raise InvalidInput(
            f"step {indices.index(most)}: step_index is {most}; a trajectory has at most "
            f"{limits.max_trajectory_steps} steps; none of the {len(indices)} steps was taken"
        )


def _all_new(channel: Channel, block: Block) -> bool:
    """The common case, in which no step can touch another: one step each of trajectories never heard of."""
    if channel.expected_late:
        return False
    uids = {head.trajectory_uid for head in block.heads if head.base < 0}
    return (
        len(uids) == len(block.heads)
        and channel.trajectories.keys().isdisjoint(uids)
        and channel.tombstones.keys().isdisjoint(uids)
    )


def _settle_head(head: StepHead, index: int, channel: Channel, now: float) -> None:
    """Fills in what the producer left to the pool."""
    head.step_index = index
    if head.policy_version < 0:
        head.policy_version = channel.version
    if not head.created_at:
        head.created_at = now


def _make_room(channel: Channel, prompts: set[str]) -> None:
    """Holds a submit back where the channel is full and nothing may be dropped for it."""
    config = channel.config
    if config.overflow == "drop_oldest":
        return
    new = sum(1 for prompt in prompts if prompt not in channel.open_groups)
    if not new or len(channel.groups) + new <= config.max_queue_size:
        return
    if new > config.max_queue_size or config.overflow == "reject":
        raise PoolFull(
            f"channel {channel.name!r} holds {len(channel.groups)} of {config.max_queue_size} groups "
            f"and this submit brings {new} more; "
            "nothing was taken: fetch some, or raise max_queue_size"
        )
    raise MustWait


def check_room(channel: Channel, prompt: str) -> None:
    """The same for an announced trajectory, which has no way to wait."""
    try:
        _make_room(channel, {prompt})
    except MustWait:
        raise PoolFull(
            f"channel {channel.name!r} holds {len(channel.groups)} of {channel.config.max_queue_size} groups; "
            f"there is no room to open {prompt!r}: try again once some were fetched"
        ) from None


def _taken(channel: Channel, block: Block, now: float, indices: list[int], known_blob: Callable[[bytes], bool]) -> Plan:
    if block.blobs:
        fresh = {digest: blob for digest, blob in block.blobs.items() if not known_blob(digest)}
        block = Block(block.heads, block.ids, block.log_probs, fresh)
    return Plan([_appended(channel, now, block.heads)], block, Receipt(len(indices), 0, 0, tuple(indices)))


def _appended(channel: Channel, now: float, heads: list[StepHead]) -> f.Appended:
    """The fact that takes steps in."""
    numbers = _group_numbers(channel, heads)
    behind = max(numbers, default=-1) + 1
    # Where one of the groups that are there ends, what follows it must not take a number that a later step was given.
    mixed = min(numbers, default=behind) < channel.next_seq < behind
    return f.Appended(channel.name, now, numbers, behind if mixed else -1)


def _group_numbers(channel: Channel, heads: list[StepHead]) -> tuple[int, ...]:
    """The number of each step's group: its trajectory's, its prompt's, or that of a new one."""
    prompts = {head.prompt_uid for head in heads}
    if (
        len(prompts) == len(heads)
        and channel.open_groups.keys().isdisjoint(prompts)
        and channel.trajectories.keys().isdisjoint([head.trajectory_uid for head in heads])
    ):
        return tuple(range(channel.next_seq, channel.next_seq + len(heads)))
    numbers: list[int] = []
    new: dict[str, int] = {}
    for head in heads:
        trajectory = channel.trajectories.get(head.trajectory_uid)
        group = trajectory.group if trajectory is not None else channel.open_groups.get(head.prompt_uid)
        numbers.append(group.seq if group is not None else new.setdefault(head.prompt_uid, channel.next_seq + len(new)))
    return tuple(numbers)


class _Intake:
    """One submit that meets what is there, step by step. Trees are borrowed: what was added is taken out again."""

    def __init__(self, channel: Channel, now: float) -> None:
        self.channel = channel
        self.now = now
        self.trees: dict[str, TokenTree] = {}
        self.lasts: dict[str, int] = {}
        self.prompts: dict[str, str] = {}
        self.calls: dict[tuple[str, str], int] = {}
        self.added: list[tuple[TokenTree, Record]] = []
        self.facts: list[f.Fact] = []
        self.late: dict[str, int] = {}
        self.late_prompts: dict[str, str] = {}
        self.expected_late: dict[str, int] = {}
        self.duplicates = 0

    def plan(self, block: Block, known_blob: Callable[[bytes], bool]) -> Plan:
        if self.channel.memory.in_journal:
            check_arrays_loaded(self._compared(block))
        indices = []
        try:
            for at, record in enumerate(block.records()):
                try:
                    indices.append(self._take(record))
                except (Conflict, InvalidInput) as error:
                    raise type(error)(f"step {at}: {error}; none of the {len(block.heads)} steps was taken") from None
            records = [record for _, record in self.added]
            _make_room(
                self.channel,
                {r.head.prompt_uid for r in records if r.head.trajectory_uid not in self.channel.trajectories},
            )
        finally:
            for tree, record in reversed(self.added):
                tree.discard(record.head.step_index)
        facts: list[f.Fact] = []
        taken = None
        if records:
            used = {digest for record in records for digest in record.head.blobs}
            fresh = {d: b for d, b in block.blobs.items() if d in used and not known_blob(d)}
            taken = Block.of(records, fresh)
            facts.append(_appended(self.channel, self.now, taken.heads))
        facts += self.facts
        for uid, steps in self.late.items():
            facts.append(f.Refused(self.channel.name, self.now, uid, self.late_prompts[uid], steps))
        late = sum(self.late.values())
        return Plan(facts, taken, Receipt(len(records), self.duplicates, late, tuple(indices)))

    def _compared(self, block: Block) -> Iterator[Record]:
        """What is there and has the tokens that steps of a block are compared with: a step that comes again with its
        like, the prompt of a new one with its trajectory. One that says what it builds on is not searched for."""
        searched: set[str] = set()
        for head in block.heads:
            trajectory = self.channel.trajectories.get(head.trajectory_uid)
            if trajectory is None:
                continue
            tree, index = trajectory.tree, head.step_index
            if index < 0 and trajectory.calls and (call := head.peek().call_id) is not None:
                index = trajectory.calls.get(call, -1)
            if index in tree.records:
                yield from with_bases(tree, index)
                if head.base in tree.records:
                    yield from with_bases(tree, head.base)
            elif head.base < 0 and not trajectory.group.lease and head.trajectory_uid not in searched:
                searched.add(head.trajectory_uid)
                yield from tree.records.values()

    def _take(self, record: Record) -> int:
        channel, head = self.channel, record.head
        uid = head.trajectory_uid
        trajectory = channel.trajectories.get(uid)
        if trajectory is None and uid in channel.tombstones:
            return self._after_the_end(record)
        prompt = trajectory.group.uid if trajectory else self.prompts.setdefault(uid, head.prompt_uid)
        if head.prompt_uid != prompt:
            raise Conflict(f"trajectory {uid!r} belongs to group {prompt!r}, not {head.prompt_uid!r}")
        tree = self._tree(uid, trajectory)
        if trajectory is None and not len(tree) and self._is_expected_late(uid, prompt):
            return self._refuse(uid, prompt)
        index = self._index(record, trajectory, tree)
        if index in tree.records:
            return self._again(record, index, trajectory, tree)
        last = self._last(uid, trajectory)
        joins = (
            head.step_index < 0
            and trajectory is not None
            and self.now < trajectory.completed_at + channel.config.grace_s
        )
        if (trajectory is not None and trajectory.group.lease) or (last != OPEN and index > last and not joins):
            return self._refuse(uid, prompt)
        if head.is_last and tree.records and index < max(tree.records):
            raise Conflict(f"step {index} of {uid!r} says is_last, but step {max(tree.records)} is there")
        record = self._cut(record, index, tree)
        if last != OPEN and index > last:
            record.head.is_last = True  # it ended after `complete`, within the grace: now it is the last
        if record.head.is_last:
            self.lasts[uid] = index
        tree.add(record)
        self.added.append((tree, record))
        return index

    def _tree(self, uid: str, trajectory: TrajectoryState | None) -> TokenTree:
        tree = self.trees.get(uid)
        if tree is None:
            tree = self.trees[uid] = trajectory.tree if trajectory else TokenTree()
        return tree

    def _last(self, uid: str, trajectory: TrajectoryState | None) -> int:
        return self.lasts.get(uid, trajectory.last if trajectory else OPEN)

    def _index(self, record: Record, trajectory: TrajectoryState | None, tree: TokenTree) -> int:
        """The step index: the producer's, or that of its call, or the next."""
        head = record.head
        if head.step_index >= 0:
            return head.step_index
        call = head.peek().call_id
        if call is None:
            return max(tree.records, default=-1) + 1
        known = self.calls.get((head.trajectory_uid, call))
        if known is None and trajectory is not None and trajectory.calls is not None:
            known = trajectory.calls.get(call)
        if known is None:
            known = self.calls[head.trajectory_uid, call] = max(tree.records, default=-1) + 1
        return known

    def _cut(self, record: Record, index: int, tree: TokenTree) -> Record:
        """A copy without what the trajectory holds already; a producer that left that out itself is checked."""
        head = msgspec.structs.replace(record.head)
        _settle_head(head, index, self.channel, self.now)
        if head.base >= 0:
            base = tree.records.get(head.base)
            if base is None or head.keep > base.end:
                there = f"it has {base.end} tokens" if base else "it is not there"
                raise InvalidInput(
                    f"step {index} of {head.trajectory_uid!r} builds on {head.keep} tokens of step {head.base}: {there}"
                )
        elif tree.records:
            head.base, head.keep = tree.longest_prefix(record.ids[: head.n_prompt * TOKEN_BYTES])
            head.n_prompt -= head.keep
        left_out = 0 if record.head.base >= 0 else head.keep
        return Record(head, record.ids[left_out * TOKEN_BYTES :], record.log_probs)

    def _again(self, record: Record, index: int, trajectory: TrajectoryState | None, tree: TokenTree) -> int:
        """A step whose index is taken: the same content adds what it newly knows; other content is a conflict."""
        head, there = record.head, tree.records[index]
        uid = head.trajectory_uid
        own = record.ids[: head.n_prompt * TOKEN_BYTES]
        prompt = tree.path(head.base, head.keep) + own if head.base >= 0 and head.base in tree.records else own
        same = (
            record.response == there.response and record.log_probs == there.log_probs and prompt == tree.prompt(index)
        )
        if not same:
            raise Conflict(f"step {index} of {uid!r} is there with other ids or log-probs")
        self.duplicates += 1
        kept = is_persons_reward(there.head)
        reward = head.reward if head.reward is not None and head.reward != there.head.reward and not kept else None
        is_last = head.is_last and not there.head.is_last
        if is_last and index < max(tree.records):
            raise Conflict(f"step {index} of {uid!r} says is_last, but step {max(tree.records)} is there")
        extra = None
        if head.extra and head.extra != there.head.extra:
            old, new = there.head.unpack_extra(), head.unpack_extra()
            about = {name: old.metadata[name] for name in (REWARD_SOURCE, REWARD_INFO) if name in old.metadata}
            held = (None, *there.head.blobs)  # a value whose blob the step does not have would be lost
            brought = {name: value for name, value in new.metadata.items() if large_value(value) in held}
            merged = {**old.metadata, **brought, **(about if kept else {})}
            if merged != old.metadata:
                old.metadata = merged
                extra = pack_extra(old)
        if reward is None and not is_last and extra is None:
            return index
        if reward is not None and trajectory is not None and trajectory.handed_out(index):
            self.facts.append(f.LateReward(self.channel.name, self.now, uid, reward))
            reward = None
        if trajectory is None or any(tree is t and r is there for t, r in self.added):
            there.head.reward = reward if reward is not None else there.head.reward
            there.head.is_last = there.head.is_last or is_last
            there.head.extra = extra if extra is not None else there.head.extra
        elif trajectory.group.lease:
            return index
        elif reward is not None or is_last or extra is not None:
            self.facts.append(f.Amended(self.channel.name, self.now, uid, index, reward, is_last, extra))
        if is_last:
            self.lasts[uid] = index
        return index

    def _after_the_end(self, record: Record) -> int:
        """A step of a trajectory that is gone: a retry is a duplicate, anything else is too late."""
        head = record.head
        tomb = self.channel.tombstones[head.trajectory_uid]
        index = head.step_index
        if index < 0 and head.peek().call_id is not None:
            index = _position(tomb.digests, fingerprint(record))
        kept = tomb.digests[index * DIGEST : (index + 1) * DIGEST] if index >= 0 else b""
        if not kept or kept == bytes(DIGEST):
            return self._refuse(head.trajectory_uid, tomb.prompt)
        if kept != fingerprint(record):
            raise Conflict(
                f"step {index} of {head.trajectory_uid!r} was taken with other ids or log-probs, and is {tomb.reason}"
            )
        self.duplicates += 1
        return index

    def _is_expected_late(self, uid: str, prompt: str) -> bool:
        """Whether a new trajectory is one that a group which is gone was still waiting for."""
        if uid in self.late:
            return True
        if prompt in self.channel.open_groups:
            return False
        channel = self.channel
        left = self.expected_late.setdefault(
            prompt, channel.expected_late.count(prompt, self.now, channel.late_window_s)
        )
        self.expected_late[prompt] = left - 1
        return left > 0

    def _refuse(self, uid: str, prompt: str) -> int:
        self.late[uid] = self.late.get(uid, 0) + 1
        self.late_prompts[uid] = prompt
        return -1


def _position(digests: bytes, wanted: bytes) -> int:
    """Which step of a tombstone has the fingerprint; -1 where none does. A call's retry does not know its index."""
    return next((at // DIGEST for at in range(0, len(digests), DIGEST) if digests[at : at + DIGEST] == wanted), -1)
