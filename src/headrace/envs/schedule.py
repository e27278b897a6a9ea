"""When an environment starts work, holds, evaluates, saves and ends: pure functions of its configuration and status.

Work is held while the groups that wait for the trainer, plus those still being made, are more sequences than
`max_batches_offpolicy` batches, and starts again at or below that, so that data stays fresh. Work in flight is never
cut short: a hold only keeps new work from starting.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from headrace.envs.types import EvalHandlingEnum


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/status-env`. Fields that an older API does not have default to what changes nothing."""

    current_step: int
    queue_size: int
    env_weight: float = 1.0
    unallocated_fraction: float = 1.0
    self_queue_size: int = 0
    max_group_size: int = 1
    #: Why the groups posted last fit no batch, where they do not: they are counted as waiting.
    warning: str = ""
    #: The step at which the trainer ended, where it takes no more groups.
    ended_at: int | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits that hold: of the configuration, and of the trainer."""

    group_size: int
    batch_size: int
    max_batches_offpolicy: int
    total_steps: int
    max_workers: int
    eval_handling: EvalHandlingEnum = EvalHandlingEnum.STOP_TRAIN
    eval_limit_ratio: float = 0.5
    min_batch_allocation: float | None = None


@dataclass(frozen=True, slots=True)
class EnvLoad:
    """This environment's own work: items that run, groups being made or not yet in the status (`coming`), and whether
    finished groups wait for room in the sender (`full`)."""

    running: int
    coming: int
    evaluating: bool = False
    full: bool = False


def workers(rules: Rules, evaluating: bool) -> int:
    """How many items may run at once."""
    if evaluating and rules.eval_handling is EvalHandlingEnum.STOP_TRAIN:
        return 0
    if evaluating and rules.eval_handling is EvalHandlingEnum.LIMIT_TRAIN:
        return int(rules.max_workers * rules.eval_limit_ratio)
    return rules.max_workers


def held(rules: Rules, status: Status, load: EnvLoad) -> bool:
    """Whether enough groups wait for the trainer. A minimum allocation is filled however much others have queued."""
    if rules.batch_size < 1:
        return True
    limit = rules.max_batches_offpolicy * rules.batch_size
    if (status.queue_size + load.coming) * rules.group_size <= limit:
        return False
    share = limit * (rules.min_batch_allocation or 0.0)
    return (status.self_queue_size + load.coming) * rules.group_size > share if share else True


def may_start(rules: Rules, status: Status, load: EnvLoad) -> bool:
    """Whether one more item may be started."""
    return load.running < workers(rules, load.evaluating) and not load.full and not held(rules, status, load)


def finished(rules: Rules, status: Status) -> bool:
    """Whether the trainer has ended, or the batches handed out and waiting exceed all steps. Groups that fit no batch
    are not counted."""
    if status.ended_at is not None:
        return True
    waiting = 0 if status.warning else status.queue_size
    queued = waiting * rules.group_size // rules.batch_size if rules.batch_size > 0 else 0
    return status.current_step + queued > rules.total_steps


def crossed(before: int, now: int, every: int) -> int | None:
    """The last multiple of `every` in (before, now]; None where there is none, or `every` is below 1."""
    if every < 1 or now // every <= before // every:
        return None
    return now // every * every
