"""The demo's games. A game has messages and a reward, and knows nothing of tokens or of Headrace.

The number game: a hidden number, so many guesses, each answered "higher" or "lower". The reward is 1 for a hit and 0
for everything else. A reply must be the number alone: anything else ends the game, so that an untrained player's game
is one call. Every game of a group is the same: what is hidden depends on the seed and the group alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class NumberTask:
    """The rules. With at most 2 ** guesses - 1 numbers, binary search always wins."""

    name: str
    numbers: int
    guesses: int
    #: A guess is one digit, which is one token.
    max_tokens: int = 1

    def game(self, seed: int, group: int) -> NumberGame:
        """A game of this group. Of any `numbers` groups in a row, each hides another number."""
        round_, place = divmod(group, self.numbers)
        order = random.Random(f"{seed}/{round_}").sample(range(1, self.numbers + 1), self.numbers)
        return NumberGame(self, order[place])


@dataclass(slots=True)
class NumberGame:
    """One game: `messages` is what the player is asked next, `reward` is None until the game is over."""

    task: NumberTask
    hidden: int
    messages: list[Message] = field(default_factory=lambda: [{"role": "user", "content": "guess"}])
    reward: float | None = None

    def reply(self, text: str) -> None:
        """Takes the player's guess, and asks for another one where the game goes on."""
        self.messages.append({"role": "assistant", "content": text})
        guess = int(text) if text in map(str, range(1, self.task.numbers + 1)) else None
        if guess is None or guess == self.hidden or len(self.messages) == 2 * self.task.guesses:
            self.reward = float(guess == self.hidden)
        else:
            self.messages.append({"role": "user", "content": "higher" if guess < self.hidden else "lower"})


#: By name. Both are chosen so that a policy can improve from wherever it is. With 7 numbers in three guesses only one
#: first guess wins every game, and a policy that is sure of one beside it wins 6 in 7 and stays there; with 6 numbers
#: two of them do, and with 3 in three guesses every one.
TASKS = {
    task.name: task
    for task in (
        NumberTask("number", numbers=6, guesses=3),
        NumberTask("number3", numbers=3, guesses=3),
    )
}
