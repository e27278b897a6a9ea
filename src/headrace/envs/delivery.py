"""Which of the groups that an environment made are sent, and what else is told of them on the way.

What is beside the sending (the file of groups, the table of rollouts) may fail and costs no group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.envs.grouping import BadGroup, all_equal, check
from headrace.envs.types import Item

if TYPE_CHECKING:
    from headrace.envs.base import BaseEnv


async def sendable(env: BaseEnv, groups: list[Any], item: Item, *, skip_long: bool) -> list[dict[str, Any]]:
    """The groups that are to be sent. Each of the others is counted, by the reason."""
    found = []
    for group in groups:
        if group is None:
            env.counts.skip("no_group")
            continue
        try:
            reason = _reason(env, group, skip_long)
        except BadGroup as error:
            env.counts.fail("rubbish", error)
            env.counts.came_to_nothing(str(error))
            reason = "rubbish"
        else:
            env.counts.came_to_something()
        if reason is not None:
            env.counts.skip(reason)
            continue
        await _complete(env, group, item)
        found.append(group)
    return found


def _reason(env: BaseEnv, group: Any, skip_long: bool) -> str | None:
    """Why a group is not sent; None where it is."""
    check(group, env.config.group_size)
    if env.config.ensure_scores_are_not_same and all_equal(group["scores"]):
        return "equal_scores"
    env.completion_lengths.extend(len(mask) - list(mask).count(-100) for mask in group["masks"])
    if skip_long and env.max_token_len > 0 and any(len(tokens) >= env.max_token_len for tokens in group["tokens"]):
        return "too_long"
    return None


async def _complete(env: BaseEnv, group: dict[str, Any], item: Item) -> None:
    for key in ("ref_logprobs", "overrides", "group_overrides", "distill_token_ids", "distill_logprobs"):
        group.setdefault(key, None)
    if env.config.include_messages and not group.get("messages"):
        with env.counts.guard("include_messages"):
            texts = await env.decoded(group["tokens"])
            group["messages"] = [[{"role": "user", "content": text}] for text in texts] if texts is not None else None
    with env.counts.guard("add_rollouts_for_wandb"):
        await env.add_rollouts_for_wandb(group, item)  # type: ignore[arg-type]
    if env.jsonl_writer is not None:
        with env.counts.guard("data_path_to_save_groups"):
            env.jsonl_writer.write(group)
    env.counts.groups += 1
    env.counts.sequences += len(group["scores"])
    env.counts.scores += sum(group["scores"])
