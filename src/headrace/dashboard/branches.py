"""A branch of a trajectory: its steps from the root to a leaf, the conversation they are, and what made it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from headrace.dashboard.pictures import Pictures, content_text
from headrace.dashboard.records import BranchDifference, ShownMessage
from headrace.dashboard.text_diff import text_diff
from headrace.data.guidance import SCORED_GROUP
from headrace.data.packing import attach, attach_metadata
from headrace.data.trajectory import Trajectory
from headrace.data.tree import common_tokens
from headrace.rewards.recorded import SampleReader
from headrace.tokens.images import IMAGES_FIELD
from headrace.tokens.vocabulary import Vocabulary

Messages = list[dict[str, Any]]

#: Earlier branches that a branch is held against, the latest first.
MAX_EARLIER = 64


def branch(trajectory: Trajectory, leaf: int) -> list[int]:
    """The steps from a branch's root to its leaf."""
    return _branch(trajectory.parents, leaf)


def branch_messages(
    trajectory: Trajectory,
    leaf: int,
    reader: SampleReader,
    parents: dict[int, int] | None = None,
    *,
    images: bool = False,
) -> Messages:
    """A branch as messages of OpenAI's form. Raises what templates and parsers raise. `parents` are the trajectory's,
    where they are known already. With `images`, a content that holds recorded images is a list of texts and of parts
    `{"type": "image", "file": bytes}`."""
    tree = trajectory.tree
    steps = _branch(trajectory.parents if parents is None else parents, leaf)
    records = [tree.records[index] for index in steps]
    spans = [(record.end - record.head.n_response, record.end) for record in records]
    ids = memoryview(bytes(tree.whole(leaf))).cast("i").tolist()
    placed = _placed_images(trajectory, steps, ids) if images else []
    ids, spans = _folded(ids, spans, placed)
    found = reader.messages(ids[: spans[0][0]], spans, ids)
    return _with_images(found, placed, reader.vocabulary) if placed else found


def environment_messages(trajectory: Trajectory, leaf: int) -> Messages | None:
    """The conversation that an environment sent with a step of a scored group; None where it sent none."""
    metadata = attach_metadata(trajectory.tree.records[leaf].head.unpack_extra().metadata, trajectory.blobs)
    given = metadata.get("messages") if metadata.get(SCORED_GROUP) else None
    if not isinstance(given, list) or not given:
        return None
    fits = all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in given)
    return given if fits else None


def shown_message(message: dict[str, Any], most: int, pictures: Pictures | None = None) -> ShownMessage:
    """A message of any dialect as it is shown: of each of its texts the first `most` characters."""
    content = message.get("content")
    text, images = content_text(content, pictures or Pictures(0))
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        thoughts = [part["thinking"] for part in parts if isinstance(part.get("thinking"), str)]
        reasoning = "\n".join(thoughts) or None
    return ShownMessage(
        role=message["role"],
        content=text[:most],
        reasoning=reasoning[:most] if isinstance(reasoning, str) else None,
        calls=tuple((name, arguments[:most]) for name, arguments in _calls(message, parts)),
        cut=max(0, len(text) - most),
        images=tuple(images),
    )


def branch_difference(
    trajectory: Trajectory, leaf: int, reader: SampleReader | None, parents: dict[int, int]
) -> BranchDifference | None:
    """Where a branch leaves the one before it that it shares most tokens with; None for a trajectory's first branch.
    Raises what templates and parsers raise."""
    tree = trajectory.tree
    earlier = sorted(index for index in set(parents) - set(parents.values()) if index < leaf)[-MAX_EARLIER:]
    if not earlier:
        return None
    own = tree.whole(leaf)
    shared = {other: common_tokens(own, tree.whole(other)) for other in earlier}
    other = max(earlier, key=lambda index: (shared[index], index))
    token, taken = shared[other], set(_branch(parents, other))
    begun = next((index for index in _branch(parents, leaf) if index not in taken), None)
    if begun is None:
        return None  # the other one goes on from it
    first = tree.records[begun]
    if token >= first.end - first.head.n_response:
        words = f"Step {first.head.step_index} was sampled from a prompt that the branch to step {other} has too:"
    else:
        words = f"The prompt of step {first.head.step_index} is not what the branch to step {other} holds:"
    if reader is None:
        return BranchDifference(other, token, None, f"{words} they differ from token {token} on.")
    pair = [branch_messages(trajectory, index, reader, parents) for index in (other, leaf)]
    at = next((n for n, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
    texts = [message_text(messages[at]) if at < len(messages) else "" for messages in pair]
    roles = [messages[at]["role"] if at < len(messages) else None for messages in pair]
    if roles == [None, None]:
        return BranchDifference(
            other, token, None, f"{words} the same messages, written in other tokens from token {token} on."
        )
    if None in roles:
        words += f" one ends where the other goes on with message {at + 1} ({roles[0] or roles[1]})."
    elif roles[0] != roles[1]:
        words += f" message {at + 1} is of {roles[1]} here, and of {roles[0]} there."
    else:
        words += f" message {at + 1} ({roles[1]}) is the first that differs."
    return BranchDifference(other, token, at, words, text_diff(*texts))


def message_text(message: dict[str, Any]) -> str:
    """All that a message says, as one text: reasoning, content and calls."""
    found = shown_message(message, 10**9)
    calls = [f"{name}({arguments})" for name, arguments in found.calls]
    return "\n".join(part for part in (found.reasoning, found.content, *calls) if part)


def _branch(parents: dict[int, int], leaf: int) -> list[int]:
    found = [leaf]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found[::-1]


def _calls(message: dict[str, Any], parts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The tool calls of a message, OpenAI's or Anthropic's: names and arguments as text."""
    found = []
    given = message.get("tool_calls")
    for call in given if isinstance(given, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            found.append((str(function.get("name")), _as_text(function.get("arguments"))))
    for part in parts:
        if part.get("type") == "tool_use":
            found.append((str(part.get("name")), _as_text(part.get("input"))))
    return found


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


# -- images that were recorded with a step -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PlacedFile:
    """An image's file, and the run of a branch's ids that stands for it: all of them `token`."""

    data: bytes
    offset: int
    length: int
    token: int


def _placed_images(trajectory: Trajectory, steps: list[int], ids: list[int]) -> list[_PlacedFile]:
    """The images of a branch: those of its last step that has any, in their order. What does not fit is left out."""
    media: Any = None
    for index in reversed(steps):
        media = trajectory.tree.records[index].head.unpack_extra().multi_modal_data
        if media is not None:
            media = attach(media, trajectory.blobs)
            break
    given = media.get(IMAGES_FIELD) if isinstance(media, dict) else None
    found: list[_PlacedFile] = []
    end = 0
    for each in given if isinstance(given, list) else ():
        if not isinstance(each, dict):
            continue
        data, offset, length = (each.get(name) for name in ("data", "offset", "length"))
        if not isinstance(data, bytes) or type(offset) is not int or type(length) is not int:
            continue
        run = set(ids[offset : offset + length]) if offset >= end and offset + length <= len(ids) else set()
        if len(run) == 1 and (not found or run == {found[0].token}):
            found.append(_PlacedFile(data, offset, length, run.pop()))
            end = offset + length
    return found


def _folded(
    ids: list[int], spans: list[tuple[int, int]], placed: list[_PlacedFile]
) -> tuple[list[int], list[tuple[int, int]]]:
    """The ids with one for each image, and the spans in them."""
    if not placed:
        return ids, spans
    kept: list[int] = []
    at = 0
    for each in placed:
        kept += ids[at : each.offset + 1]
        at = each.offset + each.length
    kept += ids[at:]

    def moved(place: int) -> int:
        return place - sum(each.length - 1 for each in placed if each.offset < place)

    return kept, [(moved(start), moved(end)) for start, end in spans]


def _with_images(messages: Messages, placed: list[_PlacedFile], vocabulary: Vocabulary) -> Messages:
    """The messages with each image in place of its placeholder, and of the marks that a template puts around it."""
    token = placed[0].token
    others = "|".join(re.escape(vocabulary.added[i]) for i in vocabulary.special if i != token and vocabulary.added[i])
    pattern = re.compile(f"(?:{others})*{re.escape(vocabulary.decode([token]))}(?:{others})*")
    files = iter(each.data for each in placed)
    found = []
    for message in messages:
        content = message.get("content")
        text: str = content if isinstance(content, str) else ""
        parts: list[dict[str, Any]] = []
        at = 0
        for match in pattern.finditer(text):
            data = next(files, None)
            if data is not None:
                parts += [{"type": "text", "text": text[at : match.start()]}, {"type": "image", "file": data}]
                at = match.end()
        if parts:
            parts = [*parts, {"type": "text", "text": text[at:]}]
            kept = [part for part in parts if part.get("text") != ""]
            found.append({**message, "content": kept})
        else:
            found.append(message)
    return found
