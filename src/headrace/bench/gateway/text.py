"""What agents and the stub say: English words drawn from one short text, the same in every run."""

from __future__ import annotations

import random

SOURCE = """\
A mill needs two things from the river: enough water, and water that comes when the wheel can use it. So the people who
built the first mills did not put their wheel into the stream itself. They dug a channel beside it, closed it with a
small gate, and let in only as much as they wanted. When the river was high they sent the rest over a weir, and when it
was low they kept what came during the night in a pond above the house. The wheel went round at its own speed, and the
stones ground the corn at theirs. Each part of the work had a place where it could wait for the other, and nobody had to
run from one end of the valley to the other to ask whether the next load was ready. If you look at the plan of such a
place you can read how it was used: where carts stood in line, where sacks were counted and marked, who opened the gate
in the morning and which door they closed behind them before dark. First find out how many people bring grain each day.
Then take that number, think about the largest cart, and leave room for one more. Let me check this step by step: what
arrives must be stored or ground, what is ground must be taken away, and nothing should be left on the floor. That is
the answer, as far as I know; write it down, count again tomorrow, and change only what did not work.
"""
#: Each of them a token.
WORDS = [word.strip(".,:;") for word in SOURCE.split()]
#: Agents speak from here, each from a place of its own, so that hardly two prompts are alike.
SPEECH = 1 << 16


def speech(seed: int = 0) -> list[str]:
    """A long run of words in no order."""
    return random.Random(seed).choices(WORDS, k=SPEECH)


def words_from(speech: list[str], at: int, count: int) -> str:
    """So many words of a speech, from a place that depends on `at`."""
    begin = at * 7919 % (len(speech) - count)
    return " ".join(speech[begin : begin + count])
