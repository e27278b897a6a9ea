"""The demo's tasks: what an agent plays. A game knows messages and a reward, and nothing of tokens or of Headrace.

    number   the number game: hidden number, guesses, "higher" and "lower"

Both are chosen so that a policy can improve from wherever it is. With 7 numbers in three guesses only one first guess
wins every game, and a policy that is sure of one beside it wins 6 in 7 and stays there; with 6 numbers two of them do,
and with 3 in three guesses every one.

Every game of a group is the same one: what is hidden depends on the seed and the group alone.
"""

from __future__ import annotations

from headrace.demo.tasks.number import NumberGame, NumberTask

__all__ = ["NumberGame", "NumberTask", "TASKS"]

TASKS = {
    task.name: task
    for task in (
        NumberTask("number", numbers=6, guesses=3),
        NumberTask("number3", numbers=3, guesses=3),
    )
}
