"""Rewards under atroposlib's names, against its own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.compat.kit import original, ours

WORDS = [
    *("the river", "a boat.", "very very", "Step 1:", "First", "then", "1-Across: WORD", "<think>", "</think>", "4"),
    *("<answer>4</answer>", "\n1. this", "\n- that", "It is so. It is so.", "#### 4", "which which", "understand"),
]


def calls() -> list[list[Any]]:
    """Random completions, the same in every run, for every reward that needs no more than is installed."""
    chance = random.Random(5)
    texts: list[Any] = ["", *(" ".join(chance.choices(WORDS, k=chance.randint(1, 60))) for _ in range(60))]
    texts += [{"role": "assistant", "content": texts[1]}, {"message": {"role": "assistant", "content": texts[2]}}]
    asked: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("format", {}, {}),
        ("format", {"require_all_tags": True, "case_sensitive": True, "weight": 0.5}, {}),
        ("formatreasoning", {"allow_multiple_thinking": True, "require_response": False}, {}),
        ("accuracyx", {"exact_match": True}, {"solution": "4"}),
        ("r1", {"format_weight": 0.25}, {"solution": "4"}),
        ("crossword_format", {"valid_chars": "WORDABC"}, {}),
        ("reasoning_steps", {"pattern_weights": {"bullet_points": 0.9}, "min_steps": 2}, {}),
        ("repetition_penalty", {}, {}),
        ("repetition_penalty", {"threshold": 0.2, "min_words": 2, "min_sentences": 1}, {}),
        ("repetition_penalty", {"threshold": "no number", "min_words": 2, "min_sentences": 1}, {}),
        (
            "combined",
            {"rewards": ["format", {"type": "repetition_penalty", "threshold": "no number", "min_words": 2}]},
            {},
        ),
        ("combined", {"rewards": ["format", "r1"], "normalization": "minmax", "weight": 3}, {"solution": "4"}),
    ]
    return [[name, options, texts, more] for name, options, more in asked]


def test_rewards_are_those_of_atroposlib(atropos: Path, tmp_path: Path) -> None:
    asked = {"calls": calls()}
    mine = json.loads(ours("rewards.py", cwd=tmp_path, given=json.dumps({**asked, "headrace": True})))
    theirs = json.loads(original(atropos, "rewards.py", cwd=tmp_path, given=json.dumps({**asked, "headrace": False})))
    for (name, options, *_), one, other in zip(asked["calls"], mine, theirs, strict=True):
        assert one == other, (name, options)


def test_a_reward_that_raises_pays_0_to_all_as_in_the_original(tmp_path: Path) -> None:
    broken = [
        "repetition_penalty",
        {"threshold": "no number", "min_words": 2, "min_sentences": 1},
        ["one " * 30, "two"],
        {},
    ]
    ((_, paid),) = json.loads(ours("rewards.py", cwd=tmp_path, given=json.dumps({"headrace": True, "calls": [broken]})))
    assert paid == [0, 0]
