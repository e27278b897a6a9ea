"""A discriminative reward model behind vLLM: its `/classify` or `/pooling` routes, many answers in one request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.data.errors import shown
from headrace.net.async_client import AsyncHttpClient
from headrace.net.http_answer import split_address
from headrace.rewards.judge import answer_of, key_of
from headrace.rewards.sample import RewardFailure, Sample, Score, number
from headrace.rewards.source import FIRST_WAIT_S, Outcome, RewardCounters, RewardSource, attempts, spread


class RewardModelConfig(BaseModel):
    """A reward model, and what it is given to read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "reward_model"
    weight: float = Field(1.0, allow_inf_nan=False)
    address: str = Field(description="vLLM's address, `http://HOST:PORT`")
    model: str | None = Field(None, description="the model's name there; vLLM takes its own where none is named")
    key_env: str | None = Field(None, description="the environment variable that holds the server's key")
    route: Literal["classify", "pooling"] = Field("classify", description="which of vLLM's routes is asked")
    label: int | None = Field(None, ge=0, description="the class whose probability is the score, where it has several")
    take: Literal["last", "mean", "min"] = Field(
        "last", description="of a number for every token or step: which counts"
    )
    input: Literal["text", "ids", "messages"] = Field(
        "text",
        description="`text`: `template`, batched; `ids`: prompt and response ids, batched, for a model of the same "
        "tokenizer; `messages`: the conversation by vLLM's own chat template, a request each",
    )
    template: str = Field("{prompt}\n\n{answer}", description="for `text`: how prompt and answer become one text")
    batch_size: int = Field(32, ge=1, description="most answers in a request")
    body: dict[str, Any] = Field({}, description="further fields of the request, such as `truncate_prompt_tokens`")
    retries: int | None = Field(None, ge=0, description="in place of the reward's own")
    timeout_s: float | None = Field(None, gt=0, description="seconds of one request, in place of the reward's own")
    concurrency: int = Field(8, ge=1, description="most requests at once")

    @model_validator(mode="after")
    def _can_work(self) -> RewardModelConfig:
        split_address(self.address)
        try:
            shown_answer = self.template.format(prompt="", answer="!")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"template: {self.template!r} may name {{prompt}} and {{answer}} only ({error})"
            ) from error
        if "!" not in shown_answer:
            raise ValueError(f"template: {self.template!r} leaves out the {{answer}}")
        return self


class RewardModelSource(RewardSource):
    """Asks a reward model, in batches. A batch that fails is asked again, and then each of its answers alone."""

    def __init__(self, config: RewardModelConfig, *, counters: RewardCounters, retries: int, timeout_s: float) -> None:
        self.name, self.weight = config.name, config.weight
        self._config = config
        self._counters = counters
        self._retries = retries if config.retries is None else config.retries
        self._client = AsyncHttpClient(
            config.address, total_s=config.timeout_s or timeout_s, key=key_of(config.key_env)
        )
        self._slots = asyncio.Semaphore(config.concurrency)

    async def scores(self, samples: Sequence[Sample]) -> list[Outcome]:
        size = 1 if self._config.input == "messages" else self._config.batch_size
        parts = [samples[at : at + size] for at in range(0, len(samples), size)]
        found = await spread(parts, self._part, self._config.concurrency)
        return [outcome for part in found for outcome in part]

    async def aclose(self) -> None:
        await self._client.close()

    async def _part(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The outcomes of a batch, after all attempts."""
        found: list[Outcome] = []

        async def call() -> Score:
            async with self._slots:
                found[:] = await self._ask(samples)
            if len(samples) == 1 and isinstance(found[0], RewardFailure):
                raise found[0]
            return Score(0.0)

        outcome = await attempts(call, self._retries, self._counters, FIRST_WAIT_S)
        if isinstance(outcome, RewardFailure):
            found = [outcome for _ in samples]
            # A server that cannot be asked cannot be asked for one of them either; else one may be what it refuses.
            if outcome.reason in ("unavailable", "timeout") and outcome.again:
                return found
        if len(samples) == 1:
            return found
        for at, one in enumerate(found):
            if isinstance(one, RewardFailure):
                self._counters.retried += 1
                (found[at],) = await self._part([samples[at]])
        return found

    async def _ask(self, samples: Sequence[Sample]) -> list[Outcome]:
        config = self._config
        body = {**({"model": config.model} if config.model else {}), **self._input(samples), **config.body}
        answer = await answer_of(self._client, f"/{config.route}", body, self.name)
        data = answer.get("data")
        if not isinstance(data, list) or len(data) != len(samples):
            got = len(data) if isinstance(data, list) else "none"
            raise RewardFailure(f"{len(samples)} scores were asked for, and {got} answered", "bad_answer", self.name)
        try:
            return [self._scored(one) for one in sorted(data, key=lambda one: int(one.get("index", 0)))]
        except (AttributeError, TypeError, ValueError):
            raise RewardFailure(f"its answer is not vLLM's: {shown(data)}", "bad_answer", self.name) from None

    def _input(self, samples: Sequence[Sample]) -> dict[str, Any]:
        config = self._config
        if config.input == "messages":
            return {"messages": samples[0].messages}
        if config.input == "text":
            return {"input": [config.template.format(prompt=_prompt(one), answer=one.text) for one in samples]}
        without = next((one for one in samples if not one.response_ids), None)
        if without is not None:
            raise RewardFailure("a sample has no token ids; say `input: text`", "error", self.name, again=False)
        return {"input": [[*one.prompt_ids, *one.response_ids] for one in samples]}

    def _scored(self, one: dict[str, Any]) -> Outcome:
        try:
            return Score(self._value(one["probs"] if self._config.route == "classify" else one["data"]))
        except KeyError as missing:
            detail = f"/{self._config.route} answered without {missing}: {shown(one)}"
            return RewardFailure(detail, "bad_answer", self.name)
        except RewardFailure as failure:
            return failure.of(self.name)

    def _value(self, given: Any) -> float:
        """One number of what the model gave: of classes that of `label`; of a row for every token, `take`."""
        if isinstance(given, list) and given and isinstance(given[0], list):
            values = [self._value(row) for row in given]
            return {"last": values[-1], "mean": math.fsum(values) / len(values), "min": min(values)}[self._config.take]
        if isinstance(given, list) and len(given) == 1:
            given = given[0]
        elif isinstance(given, list) and given and self._config.label is not None and self._config.label < len(given):
            given = given[self._config.label]
        elif isinstance(given, list):
            label = self._config.label
            wrong = "say by `label` which one is the score" if label is None else f"none of them is label {label}"
            raise RewardFailure(f"the model has {len(given)} classes, and {wrong}", "bad_answer", again=False)
        return number(given)


def _prompt(sample: Sample) -> str:
    """What was said before the answer, as text."""
    return "\n\n".join(str(message.get("content") or "") for message in sample.prompt)
