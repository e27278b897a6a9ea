"""What a request may ask of the sampler, checked once, in vLLM's words."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headrace.engine.failures import Refused

MAX_LOGPROBS = 20
MAX_CHOICES = 16384
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parameters of one request. `max_tokens` is settled: no more than the context has room for."""

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
        """Nothing but a temperature: the batch needs no second look at this one's logits."""
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
        """Raises `Refused` for what no sampler could do."""
        _within("n", self.n, 1 <= self.n <= MAX_CHOICES, f"n must be between 1 and {MAX_CHOICES}")
        if self.greedy and self.n > 1:
            raise Refused(f"n must be 1 when using greedy sampling, got {self.n}.", param="n")
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
                raise Refused(
                    f"Requested sample {name} of {value}, which is greater than max allowed: {MAX_LOGPROBS}"
                    if value > 0
                    else f"{name} must be non-negative, got {value}.",
                    param=name,
                )
        if any(not text for text in self.stop):
            raise Refused("stop cannot contain an empty string.", param="stop")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise Refused("allowed_token_ids is not None and empty!", param="allowed_token_ids")
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if not 0 <= token < vocabulary:
                    raise Refused(
                        f"token_id {token} in {name} is out of vocabulary: the model has {vocabulary} tokens",
                        param=name,
                    )
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise Refused(f"logit_bias of token {token} must be finite, got {bias}.", param="logit_bias")


def _within(name: str, value: float, good: bool, says: str) -> None:
    if not good:
        raise Refused(f"{says}, got {value}. (parameter={name}, value={value})", param=name)
