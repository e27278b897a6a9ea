"""Stop strings: an answer's text up to the first of them, as its server cuts it.

A server looks for them behind the first `min_tokens` of an answer, and in what one request samples: where another goes
on from a first one's tokens, a stop string that lies across the cut is seen by neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.tokens.bodies import held_back
from headrace.tokens.decoding import PromptIds
from headrace.tokens.vocabulary import Detokenizer, Vocabulary


class StopCut:
    """Text up to the first of the stop strings, as it arrives; what may begin one is held back. A stop string ends
    behind all that was passed over."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._buffer = ""
        self._passed = 0  # characters of the buffer that were passed over
        self.stopped = False

    def pass_over(self, text: str) -> str:
        """Text in which no stop string ends it, as it is sampled before `min_tokens`; what of it is certain."""
        if not self._stops:
            return text
        self._buffer += text
        self._passed = len(self._buffer)
        return self._certain()

    def feed(self, text: str) -> str:
        """The text that certainly stands before the first stop string."""
        if not self._stops:
            return text
        if self.stopped:
            return ""
        self._buffer += text
        begins = [self._buffer.find(stop, max(0, self._passed - len(stop) + 1)) for stop in self._stops]
        found = [at for at in begins if at >= 0]
        if found:
            self.stopped = True
            out, self._buffer = self._buffer[: min(found)], ""
            return out
        return self._certain()

    def _certain(self) -> str:
        """What no stop string can begin in; it leaves the buffer."""
        certain = len(self._buffer) - held_back(self._buffer, self._stops)
        out, self._buffer = self._buffer[:certain], self._buffer[certain:]
        self._passed = max(0, self._passed - certain)
        return out

    def finish(self) -> str:
        """What was held back, once nothing follows."""
        out, self._buffer = self._buffer, ""
        return out


class StoppedText:
    """The text of an answer's ids up to its first stop string, as they arrive."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], min_tokens: int = 0) -> None:
        """No stop string ends within the first `min_tokens` ids."""
        self._detokenizer = detokenizer
        self._cut = StopCut(stop)
        self._unstopped = min_tokens

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._cut.stopped

    def feed(self, ids: Sequence[int]) -> str:
        """Takes the next ids; the text that is certain now."""
        if not self._unstopped:
            return self._cut.feed(self._detokenizer.feed(ids))
        first, rest = ids[: self._unstopped], ids[self._unstopped :]
        self._unstopped -= len(first)
        text = self._cut.pass_over(self._detokenizer.feed(first))
        return text + self._cut.feed(self._detokenizer.feed(rest)) if rest else text

    def finish(self) -> str:
        """What was held back, once nothing follows."""
        return self._cut.feed(self._detokenizer.finish()) + self._cut.finish()


def goes_past_stop(
    vocabulary: Vocabulary, response: Sequence[int], stop: Sequence[str], min_tokens: int, prompt: PromptIds
) -> bool:
    """Whether a stop string ends before the last id of an answer."""
    text = StoppedText(Detokenizer(vocabulary, prompt=prompt), stop, min_tokens)
    text.feed(response[:-1])
    return text.stopped
