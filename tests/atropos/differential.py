"""Compares another server's answers with the original's; what may differ is in one table, each with the reason.

An allowance is no blank cheque: it names the answers that the other server may give in the original's place. Where the
contract leaves ours open, the original's own answer stands among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.atropos.calls import Scenario, same
from tests.atropos.groups import group, served
from tests.atropos.player import UUID, Answer
from tests.atropos.words import NO_EXAMPLE, NOT_NUMBERS, NOT_READY, NOT_REGISTERED, RECEIVED, joined

NEWEST_FIRST = (
    "Batches leave oldest first; the original serves the newest cut first. `current_step` counts batches handed out."
)
WRONG_GROUP = "A group of unequal lengths (`tokens`, `masks`, `scores`), NaN or infinity: 422 that names the field."
RETRIED = "The same group posted again by a retry is queued once: by its `Idempotency-Key`"
UNKNOWN = "`/status-env` for an unknown environment: 404"
NOBODY = "all disconnected, or zero total weight: an answer, not a 500"
TRUNCATED = "Truncated gzip: 400."
AFTER_RESET = '`/batch` after a reset: the "not registered" answer.'
WARNING = "A second `/register` with other settings answers with a warning field instead of silence"
NEVER_SERVED = (
    "Groups that can never be served (larger than `batch_size`, no packing possible) are dead-lettered and counted"
)
BY_AGE = "Batches leave oldest first"  # and so do the groups of one, whose shares the original puts in front
FAILURE = '`{"status": "failure", "error"}`'
BY_QUERY = "(*ours*: a query parameter too)"
BY_POST = "text `Reset successful` (*ours*: `POST` too)"
MESSAGE = '`{"message": …}`'
OTHERS = "the original leaves the others out when M is 1, and raises an environment's `group_size`"
NULLS = "nulls before a trainer registered … -1 and -1 before … before any: …, each `[]`"
#: Faults of the original which ours is said to have none of, but which the contract's list does not name.
BRICKED = "Data posted before `/register` bricks it."
NEGATIVE = "A negative `env_id` disconnects the last environment."
STALLED = "stall the queue for ever; so does an environment with a minimum and no data."

#: Fields that ours adds to answers, where groups fit no batch: they are counted, and said.
BESIDE = ("warning", "dead_letters")


@dataclass(frozen=True)
class Allowed:
    """What another server may answer in the original's place: any of `answers`, as (status, body)."""

    sentence: str
    answers: tuple[tuple[int, Any], ...]

    def holds(self, answer: Answer) -> bool:
        return any(
            answer.status == status and (same(body, answer.body) or same(body, _without_words(answer.body)))
            for status, body in self.answers
        )


def _without_words(body: Any) -> Any:
    """An answer without what ours says beside the original's, of groups that fit no batch."""
    return {name: value for name, value in body.items() if name not in BESIDE} if isinstance(body, dict) else body


def _ok(sentence: str, *bodies: Any) -> Allowed:
    return Allowed(sentence, tuple((200, body) for body in bodies))


def _status(sentence: str, status: int) -> Allowed:
    return Allowed(sentence, ((status, ...),))


def _own(step: Any = ..., queued: Any = ..., own: Any = ..., largest: Any = ..., weight: Any = ...) -> dict[str, Any]:
    sizes = {"queue_size": queued, "self_queue_size": own, "max_group_size": largest}
    return {"current_step": step, "env_weight": weight, "unallocated_fraction": ..., **sizes}


def _sent(*firsts: int, size: int, env: int | None = 0) -> dict[str, Any]:
    return served(*(group(first, size, env) for first in firsts))


def _both(*answers: dict[str, Any]) -> dict[str, Any]:
    """The groups of several answers in one."""
    return {"batch": [one for answer in answers for one in answer["batch"]]}


#: By scenario, the number of the call in it, and the call.
ALLOWED: dict[tuple[str, int, str], Allowed] = {
    ("before_anybody_registered", 0, "GET /"): _ok(MESSAGE, {"message": ...}),
    ("before_anybody_registered", 8, "GET /status-env"): _status(UNKNOWN, 404),
    ("before_anybody_registered", 7, "POST /disconnect-env"): _ok(FAILURE, {"status": "failure", "error": ...}),
    ("weights", 10, "POST /disconnect-env"): _ok(FAILURE, {"status": "failure", "error": ...}),
    ("unknown_environments", 3, "GET /status-env"): _status(UNKNOWN, 404),
    ("nobody_is_connected", 5, "GET /status-env"): _ok(NOBODY, _own(0, 0, 0, 1)),
    ("no_weight_at_all", 3, "GET /status-env"): _ok(NOBODY, _own(0, 0, 0, 1)),
    ("another_trainer", 4, "POST /register"): _ok(WARNING, {"uuid": UUID, "warning": ...}),
    ("required_fields", 22, "GET /status-env?env_id=0"): _ok(BY_QUERY, _own(0, 0, 0, 1, 1.0)),
    ("a_retry_with_a_key", 5, "GET /status"): _ok(RETRIED, {"current_step": 0, "queue_size": 1}),
    ("two_batches_at_once", 8, "GET /batch"): _ok(NEWEST_FIRST, _sent(1, 2, size=4)),
    ("two_batches_at_once", 9, "GET /status"): _ok(NEWEST_FIRST, {"current_step": 1, "queue_size": 3}),
    ("two_batches_at_once", 10, "GET /status-env"): _ok(NEWEST_FIRST, _own(1, 3, 3, 4, 1.0)),
    ("two_batches_at_once", 11, "GET /batch"): _ok(NEWEST_FIRST, _sent(3, 4, size=4)),
    ("sizes_that_do_not_divide", 7, "GET /batch"): _ok(NEVER_SERVED, _sent(1, 3, size=3)),
    ("sizes_that_do_not_divide", 8, "GET /status"): _ok(NEVER_SERVED, {"current_step": 1, "queue_size": ...}),
    ("a_group_larger_than_the_batch", 8, "GET /batch"): _ok(NEVER_SERVED, _sent(2, 3, size=2, env=1)),
    ("any_combination_of_a_buffer", 8, "POST /scored_data"): _ok(
        NEVER_SERVED, {"status": "buffered", "buffer_size": 0}
    ),
    ("a_minimum_for_one_of_two", 14, "GET /batch"): _ok(
        BY_AGE, _both(_sent(1, 2, size=2), _sent(11, 12, size=2, env=1))
    ),
    ("minimum_with_other_sizes", 10, "GET /batch"): _ok(
        BY_AGE, _both(_sent(11, size=2, env=1), _sent(1, 2, 3, size=4), _sent(12, size=2, env=1))
    ),
    ("groups_of_one_leave_the_others_out", 7, "GET /status-env"): _ok(
        OTHERS, _own(0, 1, 1, 1, 0.5), _own(0, 3, 1, 1, 0.5)
    ),
    ("groups_of_one_leave_the_others_out", 8, "GET /status-env"): _ok(
        OTHERS, _own(0, 2, 2, 1, 0.5), _own(0, 3, 2, 1, 0.5)
    ),
    ("status_raises_the_group_size", 7, "GET /status-env"): _ok(
        OTHERS, _own(0, 1, 1, 8, 0.5), _own(0, 2, 2, 8, 0.5), _own(0, 4, 4, 8, 0.5)
    ),
    ("status_raises_the_group_size", 8, "POST /scored_data"): _ok(
        NEVER_SERVED, RECEIVED, {"status": "buffered", "buffer_size": 8}
    ),
    ("status_raises_the_group_size", 9, "POST /scored_data"): _ok(
        OTHERS, RECEIVED, {"status": "buffered", "buffer_size": 4}
    ),
    ("unequal_lengths", 3, "POST /scored_data"): _status(WRONG_GROUP, 422),
    ("unequal_lengths", 4, "GET /batch"): _ok(WRONG_GROUP, NOT_READY),
    ("unequal_lengths", 5, "POST /scored_data"): _status(WRONG_GROUP, 422),
    ("unequal_lengths", 6, "POST /scored_data"): _status(WRONG_GROUP, 422),
    **{(f"not_a_number_{text}", 3, "POST /scored_data"): _status(WRONG_GROUP, 422) for text in NOT_NUMBERS},
    **{(f"not_a_number_{text}", 4, "GET /batch"): _ok(WRONG_GROUP, NOT_READY) for text in NOT_NUMBERS},
    ("gzip_both_ways", 9, "POST /scored_data"): _status(TRUNCATED, 400),
    ("a_batch_after_a_reset", 3, "GET /batch"): _ok(AFTER_RESET, NOT_REGISTERED),
    ("reset_by_post", 2, "POST /reset_data"): _ok(BY_POST, "Reset successful"),
    ("reset_by_post", 3, "GET /info"): _ok(BY_POST, {"batch_size": -1, "max_token_len": ...}),
    ("reset", 10, "GET /info"): _ok(
        NULLS, {"batch_size": -1, "max_token_len": -1}, {"batch_size": -1, "max_token_len": 512}
    ),
    ("reset", 13, "GET /latest_example"): _ok(NULLS, NO_EXAMPLE, _sent(3, size=4)["batch"][0]),
    ("a_negative_environment", 4, "POST /disconnect-env"): _ok(NEGATIVE, {"status": "failure", "error": ...}),
    ("a_negative_environment", 5, "GET /status-env"): _ok(NEGATIVE, _own(0, 0, 0, 1, 0.5)),
    ("data_before_the_trainer", 4, "GET /info"): _ok(BRICKED, {"batch_size": 8, "max_token_len": 512}),
    ("data_before_the_trainer", 5, "GET /batch"): _ok(BRICKED, _sent(1, 2, size=4, env=None)),
    ("data_before_the_trainer", 6, "POST /register-env"): _ok(BRICKED, joined(0, "env_0", step=1)),
    ("a_minimum_and_no_data", 6, "GET /batch"): _ok(STALLED, NOT_READY, _sent(1, 2, size=4)),
}


def differences(scenario: Scenario, theirs: Sequence[Answer], ours: Sequence[Answer]) -> Iterator[str]:
    """What differs from the original's answers and is not allowed, in words; nothing where the two are as one."""
    for n, (call, original, other) in enumerate(zip(scenario.calls, theirs, ours, strict=True)):
        where = f"{scenario.name}[{n}] {call.method} {call.path}"
        allowed = ALLOWED.get((scenario.name, n, f"{call.method} {call.path}"))
        if allowed is not None:
            if not allowed.holds(other):
                found = f"{other.status} {other.body!r}"
                yield f"{where}: {found}, which is none of {allowed.answers!r}, although: {allowed.sentence}"
        elif other.status != original.status:
            yield f"{where}: status {other.status}, not the original's {original.status}"
        elif not same(original.body, _without_words(other.body)):
            yield f"{where}: {other.body!r}, not the original's {original.body!r}"
        elif original.status < 400 and other.headers != original.headers:
            yield f"{where}: {other.headers!r}, not the original's {original.headers!r}"
