"""Groups as environments post them, and as the API serves them."""

from __future__ import annotations

from typing import Any

#: A served group carries all of these, null where the environment sent none.
KEYS = (
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs"),
    *("overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs"),
)


def group(first: int, size: int, env: int | None = None, **more: Any) -> dict[str, Any]:
    """`size` sequences of three tokens, the first of them a prompt; `first` tells this group from others."""
    tokens = [[first, 100 * first + n, 2] for n in range(size)]
    found: dict[str, Any] = {
        "tokens": tokens,
        "masks": [[-100, *rest] for _, *rest in tokens],
        "scores": [n / 4 for n in range(size)],
        **more,
    }
    return found if env is None else {**found, "env_id": env}


def served(*groups: dict[str, Any]) -> dict[str, Any]:
    """The answer of /batch with these groups."""
    return {"batch": [full(one) for one in groups]}


def full(one: dict[str, Any]) -> dict[str, Any]:
    return {key: one.get(key) for key in KEYS}
