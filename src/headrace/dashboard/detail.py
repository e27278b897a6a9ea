"""One trajectory as people look at it: its steps, a branch as a conversation, and a step's tokens. Pure.

What is shown is bounded, however long a trajectory is: steps and tokens come in pages, and long texts are cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from msgspec.structs import replace

from headrace.dashboard.branches import (
    Messages,
    branch_difference,
    branch_messages,
    environment_messages,
    shown_message,
)
from headrace.dashboard.earned import token_advantages
from headrace.dashboard.follow import record_of
from headrace.dashboard.pictures import Pictures
from headrace.dashboard.records import (
    BranchDifference,
    ShownConversation,
    StepRecord,
    StepTokens,
    TrajectoryDetail,
)
from headrace.data.block import Record, floats_array
from headrace.data.errors import InvalidInput
from headrace.data.json import text_keys
from headrace.data.packing import unpack
from headrace.data.trajectory import Trajectory
from headrace.pool.errors import NotFound
from headrace.rewards.recorded import SampleReader
from headrace.tokens import Renderer
from headrace.trainer.advantages import Floats

#: Steps of a page, tokens of a page, branches that are named.
MAX_STEPS, MAX_TOKENS, MAX_LEAVES = 200, 2_000, 200
#: Characters of a message, and messages of a conversation (the last ones), that are shown.
MAX_CHARACTERS, MAX_MESSAGES = 20_000, 200
#: Tokens of a branch that are read back into messages: more would take seconds.
MAX_READ_TOKENS = 500_000
#: Bytes of metadata that are shown, as JSON.
MAX_METADATA = 100_000
#: Up to here a browser knows every whole number; it reads a greater one as the nearest that it knows.
MAX_EXACT = 2**53


def detail(trajectory: Trajectory, offset: int = 0, limit: int = MAX_STEPS) -> TrajectoryDetail:
    """A trajectory with a page of its steps."""
    parents = trajectory.parents
    indexes = sorted(trajectory.tree.records)
    leaves = sorted(set(indexes) - set(parents.values()))
    page = indexes[offset : offset + min(limit, MAX_STEPS)]
    return TrajectoryDetail(
        trajectory=record_of(trajectory),
        metadata=_shown_metadata(trajectory.metadata),
        steps=[_step(trajectory.tree.records[index], parents[index]) for index in page],
        total_steps=len(indexes),
        leaves=leaves[:MAX_LEAVES],
        total_leaves=len(leaves),
    )


def step_tokens(
    trajectory: Trajectory,
    step_index: int,
    offset: int | None,
    limit: int,
    renderer: Renderer | None,
    group: Mapping[str, Floats] | None = None,
) -> StepTokens:
    """A run of a step's tokens. Without an offset it begins shortly before the response. `group` is what the steps of
    its group's trajectories earned, by their uids. Raises `NotFound` where there is no such step."""
    record = _record(trajectory, step_index)
    tree = trajectory.tree
    step = unpack(record, tree.prompt(step_index) if record.head.base >= 0 else None, trajectory.blobs)
    prompt, total = len(step.prompt_ids), len(step.prompt_ids) + len(step.response_ids)
    begin = max(0, prompt - limit // 4) if offset is None else offset
    if begin < 0 or not 1 <= limit <= MAX_TOKENS:
        raise InvalidInput(f"offset is {begin} and limit {limit}; an offset is at least 0, a limit 1 to {MAX_TOKENS}")
    ids = np.concatenate([step.prompt_ids, step.response_ids])[begin : begin + limit].tolist()
    log_probs: list[float | None] = [None] * total
    if step.rollout_log_probs is not None:
        log_probs[prompt:] = [None if math.isnan(value) else value for value in step.rollout_log_probs.tolist()]
    versions = [-1] * prompt + [step.policy_version or 0] * len(step.response_ids)
    for first, version in step.version_spans or ():
        versions[prompt + first :] = [version] * (total - prompt - first)
    may = step.trainable and step.quarantined is None
    sampled, advantages_from = token_advantages(trajectory, step_index, group or {})
    advantages: list[float | None] | None = None
    if sampled is not None and may:
        advantages = [*[None] * prompt, *sampled][begin : begin + limit]
    elif not may:
        advantages_from = "it is not trained on"
    return StepTokens(
        step_index=step_index,
        offset=begin,
        total=total,
        prompt_tokens=prompt,
        ids=ids,
        text=None if renderer is None else [renderer.vocabulary.decode([one]) for one in ids],
        log_probs=log_probs[begin : begin + limit],
        trained=[may and begin + at >= prompt for at in range(len(ids))],
        versions=versions[begin : begin + limit],
        advantages=advantages,
        advantages_from=advantages_from,
    )


def conversation(trajectory: Trajectory, leaf: int, reader: SampleReader | None) -> ShownConversation:
    """A branch as messages; none, with the reason, where it cannot be read back. Raises `NotFound` for no step."""
    record = _record(trajectory, leaf)
    parents = trajectory.parents
    difference = _difference(trajectory, leaf, reader, parents)
    said = environment_messages(trajectory, leaf)
    if said is not None:
        return _shown(leaf, said, difference, "As the environment sent it.")
    if reader is None:
        return ShownConversation(leaf, None, why_none="no tokenizer is known here", difference=difference)
    length = record.end
    if length > MAX_READ_TOKENS:
        return ShownConversation(leaf, None, why_none=f"the branch has {length} tokens; see the tokens of its steps")
    try:
        found = branch_messages(trajectory, leaf, reader, parents, images=True)
    except Exception as error:  # templates and parsers of strangers may raise anything
        why_none = f"it cannot be read back: {type(error).__name__}: {error}"[:500]
        return ShownConversation(leaf, None, why_none=why_none, difference=difference)
    return _shown(leaf, found, difference, None)


def with_few_images(found: ShownConversation, most: int) -> ShownConversation:
    """A conversation that holds at most `most` characters of images; the others are named."""
    messages = []
    for message in found.messages or ():
        images = []
        for image in message.images:
            size = len(image.url or "")
            images.append(image if size <= most else replace(image, url=None, about=f"{image.about}: not in this file"))
            most -= size if size <= most else 0
        messages.append(replace(message, images=tuple(images)))
    return replace(found, messages=messages) if found.messages is not None else found


def _shown(leaf: int, messages: Messages, difference: BranchDifference | None, source: str | None) -> ShownConversation:
    pictures = Pictures()
    shown = [shown_message(message, MAX_CHARACTERS, pictures) for message in messages[-MAX_MESSAGES:]]
    left_out = len(messages) - len(shown)
    return ShownConversation(leaf, shown, left_out=left_out, source=source, difference=difference)


def _difference(
    trajectory: Trajectory, leaf: int, reader: SampleReader | None, parents: dict[int, int]
) -> BranchDifference | None:
    longest = max(one.end for one in trajectory.tree.records.values())
    try:
        return branch_difference(trajectory, leaf, reader if longest <= MAX_READ_TOKENS else None, parents)
    except Exception:  # templates and parsers of strangers may raise anything: they differ by tokens then
        return branch_difference(trajectory, leaf, None, parents)


def _record(trajectory: Trajectory, index: int) -> Record:
    record = trajectory.tree.records.get(index)
    if record is None:
        raise NotFound(f"trajectory {trajectory.uid!r} has no step {index}")
    return record


def _step(record: Record, parent: int) -> StepRecord:
    head, extra = record.head, record.head.unpack_extra()
    mean = None
    if packed := record.log_probs:
        values = floats_array(packed)
        known = values[~np.isnan(values)]
        mean = float(known.mean()) if len(known) else None
    return StepRecord(
        step_index=head.step_index,
        parent=parent,
        prompt_tokens=head.keep + head.n_prompt,
        response_tokens=head.n_response,
        reward=head.reward,
        version=head.policy_version or 0,
        finish_reason=extra.finish_reason,
        quarantined=extra.quarantined,
        trainable=extra.trainable,
        quality=extra.quality,
        tags=tuple(extra.tags),
        note=extra.note,
        created_at=head.created_at,
        mean_log_prob=mean,
    )


def _shown_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata whose values have a JSON form that a browser reads as it is, cut to what a page shows."""
    found: dict[str, Any] = {}
    room = MAX_METADATA
    for name, value in metadata.items():
        text = orjson.dumps(text_keys(value), default=repr).decode()
        if len(text) > room:
            found[name] = f"{text[:200]}… ({len(text)} characters)"
        else:
            found[name] = _exact(orjson.loads(text))
        room -= min(len(text), room)
    return found


def _exact(value: Any) -> Any:
    """A JSON value with its whole numbers beyond `MAX_EXACT` as text."""
    if isinstance(value, dict):
        return {name: _exact(inside) for name, inside in value.items()}
    if isinstance(value, list):
        return [_exact(inside) for inside in value]
    return str(value) if isinstance(value, int) and abs(value) > MAX_EXACT else value
