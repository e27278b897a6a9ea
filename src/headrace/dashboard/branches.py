"""A branch of a trajectory: its steps from the root to a leaf, and the conversation that they are. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from headrace.dashboard.records import ShownMessage
from headrace.data.trajectory import Trajectory
from headrace.rewards.recorded import SampleReader

Messages = list[dict[str, Any]]


def branch(trajectory: Trajectory, leaf: int) -> list[int]:
    """The steps from a branch's root to its leaf."""
    parents, found = trajectory.parents, [leaf]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found[::-1]


def branch_messages(trajectory: Trajectory, leaf: int, reader: SampleReader) -> Messages:
    """A branch as messages of OpenAI's form. Raises what templates and parsers raise."""
    tree = trajectory.tree
    spans = [
        (tree.records[index].end - tree.records[index].head.n_response, tree.records[index].end)
        for index in branch(trajectory, leaf)
    ]
    ids = memoryview(bytes(tree.whole(leaf))).cast("i").tolist()
    return reader.messages(ids[: spans[0][0]], spans, ids)


def shown_message(message: dict[str, Any], most: int) -> ShownMessage:
    """A message as it is shown: of each of its texts the first `most` characters."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else orjson.dumps(content, default=str).decode()
    reasoning = message.get("reasoning_content")
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return ShownMessage(
        role=message["role"],
        content=text[:most],
        reasoning=None if reasoning is None else reasoning[:most],
        calls=tuple((call["name"], call["arguments"][:most]) for call in calls),
        cut=max(0, len(text) - most),
    )
