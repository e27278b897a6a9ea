"""`Sequence`: what a trainer learns from. One root-to-leaf path of a trajectory as one run of tokens.

In a tree every sampled token is a training target in exactly one Sequence: the first (by its leaf's step index) whose
path holds its step. Elsewhere it is context. Steps that are quarantined or curated away are context everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.data.block import (
    TOKEN_BYTES,
    Record,
    StepExtra,
    floats_array,
    ids_array,
)
from headrace.data.frame import Buffer
from headrace.data.guidance import Guidance, guidance_of
from headrace.data.packing import attach, attach_metadata
from headrace.data.step import REWARD_INFO, REWARD_SOURCE, FloatArray, IntArray
from headrace.data.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Span:
    """Where one step's response lies in a Sequence, and what it earned.

    `trained`: its tokens are targets here. `temperature` is the one that the recorded log-probs are of: the sampling
    temperature, or 1 where the step says that its log-probs are the model's raw ones.
    """

    step_index: int
    start: int
    end: int
    reward: float | None
    trained: bool
    finish_reason: str | None
    sampling: dict[str, Any] | None
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """Tokens of one path. The arrays have one entry for each token.

    `log_probs` is 0 for context and NaN for a sampled token whose log-prob was not recorded; `versions` is -1 for
    context. `reward` is the whole trajectory's: an outcome reaches every branch. `metadata` is the trajectory's, with
    whom the path's last reward is from and what it was made of (`reward_source`, `reward_extra_info`) where that is
    known. `multi_modal_data` is that of its last step that has any: of the Gateway's steps, every image of the prompt
    and where in `tokens` it stands. `guidance` is what the environment that made it says about its tokens.
    """

    tokens: IntArray
    loss_mask: npt.NDArray[np.bool_]
    log_probs: FloatArray
    versions: IntArray
    trajectory_uid: str
    prompt_uid: str
    reward: float | None
    spans: tuple[Span, ...]
    advantages: FloatArray | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    multi_modal_data: dict[str, Any] | None = None
    guidance: Guidance | None = None

    def __len__(self) -> int:
        return len(self.tokens)


def sequences_of(
    tree: TokenTree,
    trajectory_uid: str,
    prompt_uid: str,
    metadata: dict[str, Any] | None = None,
    blobs: Mapping[bytes, Buffer] | None = None,
) -> list[Sequence]:
    """The Sequences of one trajectory; paths on which nothing may be trained are left out. `blobs` are its media, and
    what its environment said at length."""
    parents = parents_of(tree)
    leaves = sorted(set(tree.records) - set(parents.values()))
    rewards = [record.head.reward for record in tree.records.values() if record.head.reward is not None]
    reward = float(sum(rewards)) if rewards else None
    taken: set[int] = set()
    found = []
    for leaf in leaves:
        chain = []
        at = leaf
        while at >= 0:
            chain.append(at)
            at = parents[at]
        chain.reverse()
        fresh = {index for index in chain if index not in taken and _trainable(tree.records[index])}
        taken.update(fresh)
        if fresh:
            made = _sequence(tree, chain, fresh, trajectory_uid, prompt_uid, reward, metadata or {}, blobs or {})
            media = _media(tree, chain, blobs or {})
            found.append(made if media is None else replace(made, multi_modal_data=media))
    return found


def parents_of(tree: TokenTree) -> dict[int, int]:
    """For each step the step that it continues: the longest whose prompt and response its prompt begins with, or -1.

    Where two steps sampled the same tokens, a continuation belongs to the later one. Images of one size have the same
    tokens: a step that says what it sees continues only one that saw the same.
    """
    seen = {index: _seen(record) for index, record in tree.records.items() if record.head.blobs}
    parents: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    ends = {-1: 0} | {index: record.end * TOKEN_BYTES for index, record in tree.records.items()}
    for index in sorted(tree.records, key=lambda i: (ends[i], i)):
        whole = tree.whole(index)
        limit = ends[index] - tree.records[index].head.n_response * TOKEN_BYTES
        parent = -1
        # Siblings may both match, where one sampled what the other was sampled from: each is followed.
        matching = [-1]
        while matching:
            at = matching.pop()
            start = ends[at]
            parent = max(parent, at, key=lambda i: (ends[i], i))
            for child in children.get(at, ()):
                if ends[child] <= limit and whole.startswith(tree.tail(child, start), start):
                    before, now = seen.get(child, []), seen.get(index)
                    if not now or now[: len(before)] == before:
                        matching.append(child)
        parents[index] = parent
        children.setdefault(parent, []).append(index)
    return parents


def _seen(record: Record) -> list[Any]:
    """A step's images, in the order in which they stand in its prompt; other media are not compared."""
    images = (record.head.unpack_extra().multi_modal_data or {}).get("images")
    return images if isinstance(images, list) else []


def _trainable(record: Record) -> bool:
    if not record.head.extra:
        return True
    extra = record.head.unpack_extra()
    return extra.trainable and extra.quarantined is None


def _media(tree: TokenTree, chain: list[int], blobs: Mapping[bytes, Buffer]) -> dict[str, Any] | None:
    for index in reversed(chain):
        media = tree.records[index].head.unpack_extra().multi_modal_data
        if media is not None:
            found: dict[str, Any] = attach(media, blobs)
            return found
    return None


def _temperature(extra: StepExtra) -> float:
    """What the recorded log-probs' logits were divided by. Greedy decoding (0) divides by nothing."""
    given = (extra.sampling or {}).get("temperature")
    if extra.metadata.get("log_probs") == "raw" or not isinstance(given, int | float) or not given > 0:
        return 1.0
    return float(given)


def _sequence(
    tree: TokenTree,
    chain: list[int],
    fresh: set[int],
    trajectory_uid: str,
    prompt_uid: str,
    reward: float | None,
    metadata: dict[str, Any],
    blobs: Mapping[bytes, Buffer],
) -> Sequence:
    tokens = ids_array(tree.whole(chain[-1]))
    mask = np.zeros(len(tokens), np.bool_)
    log_probs = np.zeros(len(tokens), np.float32)
    versions = np.full(len(tokens), -1, np.int32)
    spans = []
    about: dict[str, Any] = {}
    extra = StepExtra()
    for index in chain:
        record = tree.records[index]
        head = record.head
        extra = head.unpack_extra()
        if head.reward is not None:
            about = {name: extra.metadata[name] for name in (REWARD_SOURCE, REWARD_INFO) if name in extra.metadata}
        start, end = record.end - head.n_response, record.end
        mask[start:end] = index in fresh
        log_probs[start:end] = floats_array(record.log_probs) if head.has_log_probs else np.nan
        versions[start:end] = head.policy_version
        for first, version in extra.version_spans or ():
            versions[start + first : end] = version
        spans.append(
            Span(
                step_index=index,
                start=start,
                end=end,
                reward=head.reward,
                trained=index in fresh,
                finish_reason=extra.finish_reason,
                sampling=extra.sampling,
                temperature=_temperature(extra),
            )
        )
    told = {**metadata, **about} if about else metadata
    guidance = guidance_of(attach_metadata(extra.metadata, blobs), len(tokens))  # of the path's last step
    return Sequence(
        *(tokens, mask, log_probs, versions, trajectory_uid, prompt_uid, reward, tuple(spans), None, told),
        guidance=guidance,
    )
