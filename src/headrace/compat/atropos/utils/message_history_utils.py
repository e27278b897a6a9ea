"""`atroposlib.utils.message_history_utils`: shortening conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.compat.atropos.utils.tokenize_for_trainer import UNMASKED_ROLES, tokenize_for_trainer

OPEN, CLOSE = "<think>", "</think>"
#: What a step must have for its messages to be shortened.
NEEDED = ("messages", "tokens", "masks")
NOT_NONE = ("seed", "parsed_actions")


def strip_thinking(response_text: str) -> str:
    """The text without its think block."""
    begin, end = response_text.find(OPEN), response_text.find(CLOSE)
    if begin == -1 or end == -1:
        return response_text
    return response_text[:begin] + response_text[end + len(CLOSE) :]


def truncate_thinking(response_text: str, tokenizer: Any, max_think_tokens: int) -> str:
    """The text with at most so many tokens of thinking: its last paragraph where that fits, else its end."""
    begin, end = response_text.find(OPEN), response_text.find(CLOSE)
    if begin == -1 or end < begin:
        return response_text
    head, tail = response_text[: begin + len(OPEN)].rstrip(), response_text[end:].lstrip()
    thought = response_text[begin + len(OPEN) : end].strip()
    ids = tokenizer.encode(thought, add_special_tokens=False) if thought else []
    if len(ids) <= max_think_tokens:
        kept = tokenizer.decode(ids, skip_special_tokens=True).strip() if ids else ""
    else:
        kept = tokenizer.decode(_last(thought, ids, tokenizer, max_think_tokens), skip_special_tokens=True).strip()
        kept = f"... {kept}" if kept else ""
    return f"{head}\n{kept}\n{tail}" if kept and kept != "..." else head + tail


def ensure_trajectory_token_limit(trajectory: list[Any], tokenizer: Any, max_trajectory_tokens: int) -> list[Any]:
    """The steps whose sequences fit, their oldest turns left out as far as needed; others are dropped.

    The first message, and the last answer with what it answers, stay. A step's sequences lose as many messages each.
    """
    return [kept for step in trajectory if (kept := _fitted(step, tokenizer, max_trajectory_tokens)) is not None]


def _last(thought: str, ids: list[int], tokenizer: Any, most: int) -> list[int]:
    paragraphs = [part.strip() for part in thought.split("\n\n") if part.strip()]
    if len(paragraphs[-1]) < len(thought):
        last: list[int] = tokenizer.encode(paragraphs[-1], add_special_tokens=False)
        if len(last) <= most:
            return last
    return ids[max(0, len(ids) - most) :]


def _fitted(step: Any, tokenizer: Any, most: int) -> Any:
    if not all(step.get(key) for key in NEEDED) or any(step.get(key) is None for key in NOT_NONE):
        return None
    if max(map(len, step["tokens"])) <= most:
        return step
    chats = [list(chat) for chat in step["messages"]]
    while removed := min((count for chat in chats if (count := _removable(chat))), default=0):
        if min(map(len, chats)) <= removed:
            return None
        for chat in chats:
            del chat[1 : 1 + removed]
        made = [tokenize_for_trainer(tokenizer, chat) for chat in chats]
        if max(len(one["tokens"]) for one in made) <= most:
            kept = {key: step.get(key) for key in ("seed", "scores", "parsed_actions")}
            tokens = {key: [one[key] for one in made] for key in ("tokens", "masks")}
            return {**kept, "messages": chats, **tokens}
    return None


def _removable(chat: Sequence[Any]) -> int:
    """How many messages after the first can be removed next: a turn and its answer, one message, or none."""
    kept = 0
    if len(chat) > 1 and chat[-1]["role"] in UNMASKED_ROLES:
        kept = 2 if len(chat) > 2 and chat[-2]["role"] == "environment" else 1
    free = len(chat) - 1 - kept
    if free >= 2 and chat[1]["role"] == "environment" and chat[2]["role"] in UNMASKED_ROLES:
        return 2
    return min(1, max(0, free))
