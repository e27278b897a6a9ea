"""The demo's tasks: what an agent plays. A game knows messages and a reward, and nothing of tokens or of Headrace.

    number   the number game: hidden number, guesses, "higher" and "lower"

Every game of a group is the same one: what is hidden depends on the seed and the group alone.
"""

from __future__ import annotations

from headrace.demo.tasks.number import NumberGame, NumberTask

__all__ = ["NumberGame", "NumberTask", "TASKS"]

TASKS = {
    task.name: task
    for task in (
        NumberTask("number", numbers=7, guesses=3),
        NumberTask("number3", numbers=3, guesses=2),
    )
}
