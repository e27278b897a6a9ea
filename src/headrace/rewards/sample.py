"""What is scored (`Sample`), what comes out (`Score`), and why nothing did (`RewardFailure`).

A score is a finite number. Whatever else a source returns is a failure of that sample with a reason, and never a zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from headrace.data.errors import HeadraceError, InvalidInput, shown
from headrace.files import nearest

#: `timeout`: it took too long; `error`: it raised, or ended its process; `none`, `wrong_type`, `not_a_number`: what it
#: returned; `bad_answer`: a server's answer that is no verdict; `unavailable`: it could not be asked.
Reason = Literal["timeout", "error", "none", "wrong_type", "not_a_number", "bad_answer", "unavailable"]
#: Fields of a row that hold what the answer should be, the first of which counts where no column is named.
TRUTHS = ("ground_truth", "reward_model", "answer")
#: Keys of a returned mapping that hold its number, the first of which counts.
VALUES = ("score", "reward", "value")


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to be scored."""

    #: The conversation, the answer included, as OpenAI writes it.
    messages: list[dict[str, Any]] = []
    #: The last answer's text.
    text: str = ""
    prompt_ids: list[int] = []
    response_ids: list[int] = []
    ground_truth: Any = None
    #: The fields of the row that was asked about.
    metadata: dict[str, Any] = {}
    trajectory_uid: str | None = None
    prompt_uid: str | None = None
    #: Which step of the trajectory it is; None for the trajectory as a whole.
    step_index: int | None = None
    num_turns: int | None = None

    @property
    def data_source(self) -> str | None:
        """The row's `data_source`, which verl's functions choose by."""
        found = self.metadata.get("data_source")
        return None if found is None else str(found)

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """The conversation before the answer."""
        last = self.messages[-1] if self.messages else {}
        return self.messages[:-1] if last.get("role") == "assistant" else self.messages

    @classmethod
    def of_row(cls, row: Mapping[str, Any], *, ground_truth: str | None = None, **fields: Any) -> Sample:
        """A sample of a data set's row, which becomes its metadata; `fields` are the sample's others.

        The ground truth is in the column that `ground_truth` names; otherwise in `ground_truth`, in verl's
        `reward_model`, or in `answer`. Raises `InvalidInput` where a named column is missing.
        """
        return cls(ground_truth=_truth(row, ground_truth), metadata=dict(row), **fields)

    def with_truth(self, column: str | None) -> Sample:
        """The same with the ground truth of its row's column, which whoever made it need not have known; itself where
        none is named. Raises as `of_row`."""
        return self if column is None else msgspec.structs.replace(self, ground_truth=_truth(self.metadata, column))


def _truth(row: Mapping[str, Any], column: str | None) -> Any:
    if column is not None and column not in row:
        there = ", ".join(map(str, row)) or "none"
        near = nearest(column, map(str, row))
        raise InvalidInput(f"the row has no column {column!r} for the ground truth{near}; there are: {there}")
    for name in (column,) if column is not None else TRUTHS:
        found = row.get(name)
        if name == "reward_model" and isinstance(found, Mapping):
            found = found.get("ground_truth")
        if found is not None:
            return found
    return None


class Score(msgspec.Struct, frozen=True):
    """What an answer is worth: the number that is trained on, the numbers it is made of, and whatever else was told."""

    value: float
    parts: dict[str, float] = {}
    info: dict[str, Any] = {}

    @property
    def extra_info(self) -> dict[str, Any]:
        """Parts and info as one mapping: the `reward_extra_info` of the wire."""
        return {**self.info, **self.parts}


class RewardFailure(HeadraceError):
    """A sample that could not be scored: by which source (empty where none is to blame), why, and in its words."""

    code = "reward_failed"

    def __init__(
        self,
        detail: str,
        reason: Reason = "error",
        source: str = "",
        *,
        again: bool = True,
        after_s: float = 0.0,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.reason: Reason = reason
        self.source = source
        #: Whether another attempt could end otherwise.
        self.again = again
        #: Seconds before which a server asked not to be asked again.
        self.after_s = after_s

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}: {self.detail}" if self.source else self.detail

    def of(self, source: str) -> RewardFailure:
        """The same failure, of a named source."""
        return RewardFailure(self.detail, self.reason, source, again=self.again, after_s=self.after_s)


def score_of(returned: Any) -> Score:
    """The score that a source returned: a number (also numpy's or torch's; True is 1), a `Score`, or a mapping with
    `score` or `reward`, whose other numbers are parts and whose other fields are info.

    Raises `RewardFailure` for anything else: None, text, NaN, infinity.
    """
    if isinstance(returned, Score):
        parts = {name: number(value) for name, value in returned.parts.items()}
        return Score(number(returned.value), parts, returned.info)
    if isinstance(returned, Mapping):
        key = next((key for key in VALUES if key in returned), None)
        if key is None:
            raise RewardFailure(f"it returned a mapping without 'score' or 'reward': {shown(returned)}", "wrong_type")
        others = {str(name): value for name, value in returned.items() if name != key}
        parts = {name: float(value) for name, value in others.items() if _is_number(value)}
        return Score(number(returned[key]), parts, {name: value for name, value in others.items() if name not in parts})
    return Score(number(returned))


def number(value: Any) -> float:
    """A value as a finite number; raises `RewardFailure` where it is none."""
    if value is None:
        raise RewardFailure("it returned None; a score is a number", "none")
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if not isinstance(value, int | float):
        raise RewardFailure(f"it returned {shown(value)}, a {type(value).__name__}; a score is a number", "wrong_type")
    if not math.isfinite(value):
        raise RewardFailure(f"it returned {value}; a score is a finite number", "not_a_number")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
