"""One answer that is being sampled (`EngineSequence`): its prompt, its sampling parameters (`SamplingParams`), the
tokens so far, their text (`OutputText`), and how it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headrace.engine.http import EngineRequestError
from headrace.tokens.decoding import REPLACEMENT_CHARACTER, ContinuedText, prompt_tail, whole_characters

#: vLLM's own limits: log-probs of one token, choices of one request, and the temperature below which it is greedy.
MAX_LOGPROBS = 20
MAX_CHOICES = 16384
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request, under vLLM's names. `max_tokens` is at most what the context has room
    for."""

    max_tokens: int
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def plain(self) -> bool:
        """Whether only a temperature is applied, so that the batch's logits need no work for this sequence alone."""
        return not (
            self.penalised
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.min_tokens
            or self.top_p < 1.0
            or self.top_k > 0
            or self.min_p
        )

    def check(self, vocabulary: int) -> None:
        """Raises `EngineRequestError` for values that cannot be sampled with."""
        _within("n", self.n, 1 <= self.n <= MAX_CHOICES, f"n must be between 1 and {MAX_CHOICES}")
        if self.greedy and self.n > 1:
            raise EngineRequestError(f"n must be 1 when using greedy sampling, got {self.n}.", param="n")
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        _within("temperature", self.temperature, finite, "temperature must be non-negative")
        _within("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "top_p must be in (0, 1]")
        _within("top_k", self.top_k, self.top_k >= -1, "top_k must be 0 (disable), or at least 1")
        _within("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "min_p must be in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _within(name, value, -2.0 <= value <= 2.0, f"{name} must be in [-2, 2]")
        good = math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0
        _within("repetition_penalty", self.repetition_penalty, good, "repetition_penalty must be greater than zero")
        _within("max_tokens", self.max_tokens, self.max_tokens >= 1, "max_tokens must be at least 1")
        fits = 0 <= self.min_tokens <= self.max_tokens
        _within("min_tokens", self.min_tokens, fits, f"min_tokens must be between 0 and max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise EngineRequestError(
                    f"Requested sample {name} of {value}, which is greater than max allowed: {MAX_LOGPROBS}"
                    if value > 0
                    else f"{name} must be non-negative, got {value}.",
                    param=name,
                )
        if any(not text for text in self.stop):
            raise EngineRequestError("stop cannot contain an empty string.", param="stop")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise EngineRequestError("allowed_token_ids is not None and empty!", param="allowed_token_ids")
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if not 0 <= token < vocabulary:
                    raise EngineRequestError(
                        f"token_id {token} in {name} is out of vocabulary: the model has {vocabulary} tokens",
                        param=name,
                    )
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise EngineRequestError(f"logit_bias of token {token} must be finite, got {bias}.", param="logit_bias")


def _within(name: str, value: float, good: bool, says: str) -> None:
    if not good:
        raise EngineRequestError(f"{says}, got {value}. (parameter={name}, value={value})", param=name)


#: Ids of the prompt that stand before the first one, so that it gets the space it has in a text.
TEXT_CONTEXT_TOKENS = 5


class OutputText:
    """The text of one answer, from its ids. `value` only grows, but for a stop string that is cut off at the end.

    Text is taken only when it can no longer change: bytes that do not yet make a character are held back, and what
    never becomes one is never text (as in vLLM, where the text of an answer cut inside a character lacks its last
    bytes). Taking ids one by one or all at once gives the same text: that of a continuation, with the space that a
    SentencePiece model leaves out at the beginning of a text.
    """

    __slots__ = ("_continued", "_decode", "_ids", "_known", "_read", "_searched", "_skip", "value")

    def __init__(self, tokenizer: Any, prompt: list[int], *, skip_special_tokens: bool = True) -> None:
        self._decode = tokenizer.decode
        self._skip = skip_special_tokens
        self._continued: ContinuedText | None = None
        if type(getattr(tokenizer, "decoder", None)).__name__ != "ByteLevel":
            decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
            self._continued = ContinuedText(decode, whole_characters(decode, prompt_tail(decode, prompt)))
        self._ids = prompt[-TEXT_CONTEXT_TOKENS:]
        self._read = len(self._ids)
        self._known = 0
        self._searched = 0
        self.value = ""

    def take(self, output: list[int]) -> None:
        """Adds the text of what is new in `output`, which only ever grows."""
        new = output[self._known :]
        self._known = len(output)
        if self._continued is not None:
            self.value += "".join(map(self._continued.add, new))
        elif new and not self._push(new):
            for token in new:
                self._push([token])

    def _push(self, new: list[int]) -> bool:
        """Adds ids as one piece; returns False, and adds nothing, where several end inside a character."""
        ids = self._ids
        before = self._decode(ids[: self._read], skip_special_tokens=self._skip)
        now = self._decode([*ids, *new], skip_special_tokens=self._skip)
        whole = not now.endswith(REPLACEMENT_CHARACTER)
        if len(new) > 1 and not whole:
            return False
        ids.extend(new)
        if whole and len(now) > len(before):
            self.value += now[len(before) :]
            # Only what the next piece can depend on is kept: the piece before it.
            self._ids = ids[self._read :]
            self._read = len(self._ids)
        return True

    def pass_over(self) -> None:
        """Excludes the text so far from the search for stop strings."""
        self._searched = len(self.value)

    def stopped(self, stops: tuple[str, ...], *, keep: bool) -> str | None:
        """The stop string that the text holds, if any; the text is cut at its beginning, or, with `keep`, at its
        end."""
        searched, self._searched = self._searched, len(self.value)
        for stop in stops:
            at = self.value.find(stop, max(0, searched - len(stop) + 1))
            if at >= 0:
                self.value = self.value[: at + len(stop) if keep else at]
                return stop
        return None


#: A token's candidates, the sampled one first: (token, log-prob, rank).
Candidates = list[tuple[int, float, int]]


class EngineSequence:
    """One choice of one request. Only the scheduler changes it, and after `finish_reason` is set nothing does."""

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
        sampling: SamplingParams,
        *,
        seed: int,
        eos: frozenset[int],
        text: OutputText,
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
        """The prompt and the answer so far."""
        return self.prompt + self.output

    def push(self, token: int, logprob: float, version: str) -> None:
        """Appends a sampled token, and ends the answer where it should end."""
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
        """Ends the answer; its text is that of its first `shown` tokens, or of all."""
        self.text.take(self.output[:shown])
        self.finish_reason = reason

    def fail(self, error: str) -> None:
        """Ends the answer with an error."""
        self.error = error
        self.finish_reason = "error"

    def settled(self) -> int:
        """How many characters of the text are final: all but what may be the beginning of a stop string."""
        sampling = self.sampling
        if self.finish_reason is not None or not sampling.stop or sampling.include_stop_str_in_output:
            return len(self.text.value)
        return max(0, len(self.text.value) - max(map(len, sampling.stop)) + 1)

    def versions(self) -> list[dict[str, Any]]:
        """Which weight version sampled which tokens, in vLLM's shape."""
        return [{"version": version, "start": start, "end": end} for version, start, end in self.spans]
