"""A task: one rollout of one row, with the names under which its trajectory is known.

The names are made of the row's place and the rollout's number alone, so that whoever starts again after a crash finds
what is already there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.data.errors import InvalidInput, shown
from headrace.files import nearest

#: Columns in which a row's conversation is looked for, where no column is named; the first that is there counts.
PROMPT_COLUMNS = ("messages", "prompt", "question")
#: Columns that only a reward may see, where a configuration names no others.
HIDDEN_COLUMNS = ("ground_truth", "reward_model")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout to play.

    row         the fields of the dataset's row, as JSON has them
    prompt_uid  the group of this row's rollouts
    rollout     which of the group's `n_rollouts` it is, from 0
    attempt     how often this rollout failed before
    hidden      the row's fields that agents are not shown
    prompt      the column that has the conversation; None looks through `PROMPT_COLUMNS`
    sampling    what every call of the trajectory is sampled with, whatever the agent asks for
    """

    row: dict[str, Any]
    prompt_uid: str
    rollout: int
    n_rollouts: int
    channel: str = "train"
    attempt: int = 0
    hidden: tuple[str, ...] = HIDDEN_COLUMNS
    prompt: str | None = None
    sampling: dict[str, Any] = {}

    @property
    def trajectory_uid(self) -> str:
        """The trajectory's name: another one for each attempt, the same after a restart."""
        return trajectory_uid_of(self.prompt_uid, self.rollout, self.attempt)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation that the row begins with; raises `InvalidInput` where it has none."""
        return messages_of(self.row, self.prompt)

    @property
    def metadata(self) -> dict[str, Any]:
        """What the trajectory is registered with: all of the row's fields. No agent's key reads it."""
        return self.row

    @property
    def shown_row(self) -> dict[str, Any]:
        """The row as an agent may see it: without the hidden fields."""
        return {name: value for name, value in self.row.items() if name not in self.hidden}


def trajectory_uid_of(prompt_uid: str, rollout: int, attempt: int) -> str:
    """The name of a rollout's attempt, whoever asks for it."""
    return f"{prompt_uid}-{rollout}-{attempt}"


def messages_of(row: Mapping[str, Any], column: str | None = None) -> list[dict[str, Any]]:
    """A row's conversation, in OpenAI's form: the column's list of messages, or its text as a user's message. Raises
    `InvalidInput`, naming the column and what it holds."""
    if column is None:
        column = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)
        if column is None:
            there = ", ".join(map(str, row)) or "none"
            raise InvalidInput(f"has none of the columns {', '.join(PROMPT_COLUMNS)}; its columns are {there}")
    elif row.get(column) is None:
        hint = nearest(column, map(str, row)) or f"; its columns are {', '.join(map(str, row)) or 'none'}"
        raise InvalidInput(f"has no column {column!r}{hint}")
    found = row[column]
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) and "role" in one for one in found):
        raise InvalidInput(
            f"column {column!r} must be a text or a list of messages such as "
            f"{{'role': 'user', 'content': '...'}}, not {shown(found)}"
        )
    return [dict(message) for message in found]
