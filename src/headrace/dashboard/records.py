"""What the dashboard shows, as typed records: they are made by the data side and sent as JSON as they are."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.dashboard.text_diff import Piece
from headrace.data.errors import InvalidInput, shown

#: By which trajectories are sorted. `number` is the order in which the index heard of them.
SortKey = Literal["number", "reward", "steps", "tokens", "version", "created_at"]
SORT_KEYS: tuple[SortKey, ...] = ("number", "reward", "steps", "tokens", "version", "created_at")
#: Rows of one page at most.
MAX_ROWS = 500


class TrajectoryRecord(msgspec.Struct, frozen=True, gc=False):
    """One trajectory without its tokens. `tokens` counts what was sampled; `prompt_tokens` is its longest prompt;
    `version` is the oldest of its steps'; `state` is `queued`, `leased`, `consumed`, `failed`, a drop's reason, or
    `gone` where the pool no longer knows."""

    uid: str
    prompt_uid: str
    channel: str
    state: str = "queued"
    complete: bool = False
    steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    reward: float | None = None
    version: int = 0
    created_at: float | None = None
    quarantined: int = 0
    tags: tuple[str, ...] = ()


class TrajectoryQuery(msgspec.Struct, frozen=True):
    """Which trajectories, in which order, which of them. `find` is a part of a uid or of a prompt's."""

    find: str = ""
    uid: str | None = None
    prompt_uid: str | None = None
    channel: str | None = None
    state: str | None = None
    tag: str | None = None
    complete: bool | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_version: int | None = None
    max_version: int | None = None
    sort: str = "number"
    descending: bool = True
    offset: int = 0
    limit: int = 50

    def __post_init__(self) -> None:
        if self.sort not in SORT_KEYS:
            raise InvalidInput(f"sort is {shown(self.sort)}; it is one of {', '.join(SORT_KEYS)}")
        if not 1 <= self.limit <= MAX_ROWS:
            raise InvalidInput(f"limit is {shown(self.limit)}; it is a number of rows, from 1 to {MAX_ROWS}")
        if self.offset < 0:
            raise InvalidInput(f"offset is {shown(self.offset)}; it is a number of rows to leave out, from 0 on")


class TrajectoryPage(msgspec.Struct, frozen=True):
    """Rows of a query; `total` counts all that fit, `indexed` all that are known."""

    rows: list[TrajectoryRecord]
    total: int
    indexed: int


class GroupRecord(msgspec.Struct, frozen=True):
    """The trajectories of one prompt. `waits_for` says why a group that is in the pool is not ready. `advantages` has
    an entry for each trajectory, None where there is nothing to compare it with; `parts`, what its reward is made of,
    by name, where that is known. `spread` is the sample's standard deviation, by which advantages are divided."""

    prompt_uid: str
    channel: str
    state: str
    n_rollouts: int | None
    trajectories: list[TrajectoryRecord]
    mean: float | None
    spread: float | None
    waits_for: str | None = None
    advantages: list[float | None] = []
    parts: list[dict[str, float]] = []


class GroupPage(msgspec.Struct, frozen=True):
    """Groups, newest first."""

    rows: list[GroupRecord]
    total: int


class ShownImage(msgspec.Struct, frozen=True):
    """An image, "[image N]" in its message's text. `url` is a `data:` URL; None where it is not shown, and `about` says
    why."""

    number: int
    url: str | None
    about: str


class ShownMessage(msgspec.Struct, frozen=True):
    """One message of a conversation. `cut` counts the characters that were left out of `content`."""

    role: str
    content: str
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    cut: int = 0
    images: tuple[ShownImage, ...] = ()


class StepRecord(msgspec.Struct, frozen=True):
    """One step without its tokens; `parent` is the step that it continues, -1 for a root."""

    step_index: int
    parent: int
    prompt_tokens: int
    response_tokens: int
    reward: float | None
    version: int
    finish_reason: str | None
    quarantined: str | None
    trainable: bool
    quality: float | None
    tags: tuple[str, ...]
    note: str | None
    created_at: float | None
    mean_log_prob: float | None


class TrajectoryDetail(msgspec.Struct, frozen=True):
    """One trajectory: a page of its steps, and the last steps of its branches."""

    trajectory: TrajectoryRecord
    metadata: dict[str, Any]
    steps: list[StepRecord]
    total_steps: int
    leaves: list[int]
    total_leaves: int


class BranchDifference(msgspec.Struct, frozen=True):
    """What made a branch: `words` say where it leaves the branch to the step `other`, and `pieces` are the two texts of
    the first message that differs, the other's as removed and this one's as added; none where no message does."""

    other: int
    token: int
    message: int | None
    words: str
    pieces: list[Piece] = []


class ShownConversation(msgspec.Struct, frozen=True):
    """A branch as messages, from its root to the step `leaf`; `left_out` counts messages before the first; `source`
    says where they are from, other than the branch's own tokens; `difference` is None for the first branch."""

    leaf: int
    messages: list[ShownMessage] | None
    left_out: int = 0
    why_none: str | None = None
    source: str | None = None
    difference: BranchDifference | None = None


class StepTokens(msgspec.Struct, frozen=True):
    """A run of a step's tokens, from `offset` of prompt and response on. The lists have an entry for each; a token of
    the prompt has no log-prob, and version -1; `text` is None without a tokenizer. `advantages` has None for a token
    that is not trained on, and is None where none are known; `advantages_from` says where they are from, or why not."""

    step_index: int
    offset: int
    total: int
    prompt_tokens: int
    ids: list[int]
    text: list[str] | None
    log_probs: list[float | None]
    trained: list[bool]
    versions: list[int]
    advantages: list[float | None] | None = None
    advantages_from: str = ""


class SurvivorRow(msgspec.Struct, frozen=True):
    """Trajectories of one range, by what became of them. `share` is consumed of those that are settled."""

    label: str
    known: int
    consumed: int
    dropped: int
    share: float | None


class SurvivorTable(msgspec.Struct, frozen=True):
    """What was submitted against what a trainer took, by one measure; `warning` where the ranges fare differently."""

    measure: str
    rows: list[SurvivorRow]
    warning: str | None = None


class Overview(msgspec.Struct, frozen=True):
    """Everything of the first view. `trouble` says why the pool does not answer; the rest is then what it said last."""

    title: str
    at: float
    trouble: str | None
    indexing: bool
    indexed: int
    ledger: dict[str, Any]
    balanced: bool
    channels: list[dict[str, Any]]
    rates: dict[str, float]
    waits: list[str]
    servers: list[dict[str, Any]]
    metrics_rows: int
    scored_groups: dict[str, Any] | None = None
