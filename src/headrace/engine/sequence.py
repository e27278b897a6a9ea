"""One answer in the making: its prompt, what was sampled so far, and how it ended."""

from __future__ import annotations

from typing import Any

from headrace.engine.sampling import Sampling
from headrace.engine.text import Text

#: A token's candidates, the sampled one first: (token, log-prob, rank).
Candidates = list[tuple[int, float, int]]


class Sequence:
    """One choice of one request. Changed by the scheduler alone until `finish_reason` is set, by nobody afterwards."""

    __slots__ = (
        "blocks",
        "call",
        "candidates",
        "enders",
        "eos",
        "error",
        "finish_reason",
        "index",
        "logprobs",
        "output",
        "prompt",
        "prompt_candidates",
        "request_id",
        "row",
        "sampling",
        "seed",
        "shown",
        "spans",
        "stop_reason",
        "stream",
        "text",
        "told",
    )

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt: list[int],
        sampling: Sampling,
        *,
        seed: int,
        eos: frozenset[int],
        text: Text,
        stream: bool = False,
        call: Any = None,
    ) -> None:
        self.request_id, self.index = request_id, index
        self.prompt, self.sampling, self.seed = prompt, sampling, seed
        self.eos = frozenset() if sampling.ignore_eos else eos
        #: Tokens that end the answer.
        self.enders = self.eos | sampling.stop_token_ids
        self.text, self.stream, self.call = text, stream, call
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.candidates: list[Candidates] = []
        self.prompt_candidates: list[Candidates | None] = []
        #: Weight versions over the output: [version, first token, one past the last].
        self.spans: list[list[Any]] = []
        #: Tokens and characters that a stream was given already.
        self.told = self.shown = 0
        self.row: int | None = None
        #: Blocks of the prefix cache that its row began with.
        self.blocks: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def push(self, token: int, logprob: float, version: str) -> None:
        """Takes a sampled token, and ends the answer where it should end."""
        at = len(self.output)
        self.output.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][2] = at + 1
        else:
            self.spans.append([version, at, at + 1])
        sampling = self.sampling
        enough = at + 1 >= sampling.min_tokens
        if token in self.enders and enough:
            self.stop_reason = None if token in self.eos else token
            self.finish("stop", shown=at + (1 if sampling.include_stop_str_in_output else 0))
            return
        if sampling.stop or self.stream:
            self.text.take(self.output)
            if sampling.stop and at + 1 <= sampling.min_tokens:
                self.text.pass_over()
            elif sampling.stop:
                found = self.text.stopped(sampling.stop, keep=sampling.include_stop_str_in_output)
                if found is not None:
                    self.stop_reason = found
                    self.finish("stop")
                    return
        if at + 1 >= sampling.max_tokens:
            self.finish("length")

    def finish(self, reason: str, shown: int | None = None) -> None:
        """Ends the answer; its text is that of the first `shown` tokens, or of all."""
        self.text.take(self.output[:shown])
        self.finish_reason = reason

    def fail(self, error: str) -> None:
        self.error = error
        self.finish_reason = "error"

    def settled(self) -> int:
        """How much of the text can no longer be cut off: all but what may be the beginning of a stop string."""
        sampling = self.sampling
        if self.finish_reason is not None or not sampling.stop or sampling.include_stop_str_in_output:
            return len(self.text.value)
        return max(0, len(self.text.value) - max(map(len, sampling.stop)) + 1)

    def versions(self) -> list[dict[str, Any]]:
        return [{"version": version, "start": start, "end": end} for version, start, end in self.spans]
