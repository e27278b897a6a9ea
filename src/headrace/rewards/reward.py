"""`Reward`: scores samples by weighted sources.

A score's value is the sum of all sources' scores, each times its weight; its `parts` have each source's own score by
the source's name. A source that fails for a sample is tried again and then is the sample's `RewardFailure`: there is no
half of a reward, and never a zero in its place. The other samples get theirs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from headrace.rewards.config import RewardConfig, RewardFunctionConfig, RuleConfig
from headrace.rewards.function_child import CalleeSpec
from headrace.rewards.functions import FunctionSource
from headrace.rewards.judge import JudgeSource, RewardJudgeConfig
from headrace.rewards.reward_model import RewardModelConfig, RewardModelSource
from headrace.rewards.rule import Rule
from headrace.rewards.sample import RewardFailure, Sample, Score, score_of
from headrace.rewards.source import Outcome, RewardCounters, RewardSource, attempts, raised, spread

#: Samples that quick rules score before others get their turn in the event loop.
TURN = 64
#: Processes of a blocking rule: as many as there are processors, up to so many.
MOST_WORKERS = 8


class Reward:
    """A reward as configured. It is used in one event loop, by any number of tasks at once.

    Raises `InvalidInput` where a judge's or a reward model's key is not in the environment.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.counters = RewardCounters()
        self._sources: list[RewardSource] = [
            *(self._rule(rule, name) for rule, name in zip(config.rules, config.names, strict=False)),
            *(self._judge(judge) for judge in config.judges),
            *(self._reward_model(model) for model in config.reward_models),
            *(self._function(function) for function in config.functions),
        ]

    async def ready(self) -> None:
        """Returns once all sources can score. Raises `InvalidInput` for a function that cannot be imported, and where
        programs of `unit_tests` cannot be run here. Without it, such a source fails every sample."""
        for source in self._sources:
            await source.ready()

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One `Score` or `RewardFailure` for each sample, in their order. Raises nothing but for a cancellation."""
        by_source = await asyncio.gather(*(_scores(source, samples) for source in self._sources))
        return [self._combined([outcomes[at] for outcomes in by_source]) for at in range(len(samples))]

    async def aclose(self) -> None:
        """Ends the sources' processes and connections, whatever runs in them; what is scored meanwhile fails."""
        for source in self._sources:
            await source.aclose()

    async def __aenter__(self) -> Reward:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    def _combined(self, outcomes: Sequence[Outcome]) -> Outcome:
        value = 0.0
        parts: dict[str, float] = {}
        info: dict[str, Any] = {}
        for source, outcome in zip(self._sources, outcomes, strict=True):
            if isinstance(outcome, RewardFailure):
                self.counters.failed[outcome.reason] = self.counters.failed.get(outcome.reason, 0) + 1
                return outcome if outcome.source == source.name else outcome.of(source.name)
            value += source.weight * outcome.value
            parts[source.name] = outcome.value
            parts |= {f"{source.name}.{name}": part for name, part in outcome.parts.items()}
            info |= {f"{source.name}.{name}": told for name, told in outcome.info.items()}
        self.counters.scored += 1
        return Score(value, parts, info)

    def _rule(self, config: RuleConfig, name: str) -> RewardSource:
        rule = config.rule()
        if rule.place == "process":
            return FunctionSource(
                name,
                config.weight,
                CalleeSpec(rule=config.use, options=config.options),
                counters=self.counters,
                retries=self.config.retries,
                timeout_s=self.config.timeout_s,
                workers=min(os.cpu_count() or 1, MOST_WORKERS),
                concurrency=self.config.concurrency,
            )
        if rule.place == "thread":
            return ThreadedRuleSource(name, config.weight, rule, self.config, self.counters)
        return RuleSource(name, config.weight, rule)

    def _judge(self, config: RewardJudgeConfig) -> RewardSource:
        own = self.config
        return JudgeSource(config, counters=self.counters, retries=own.retries, timeout_s=own.timeout_s)

    def _reward_model(self, config: RewardModelConfig) -> RewardSource:
        own = self.config
        return RewardModelSource(config, counters=self.counters, retries=own.retries, timeout_s=own.timeout_s)

    def _function(self, config: RewardFunctionConfig) -> RewardSource:
        own = self.config
        return FunctionSource(
            config.name or config.use.rpartition(":")[2],
            config.weight,
            CalleeSpec(function=config.use),
            counters=self.counters,
            retries=own.retries if config.retries is None else config.retries,
            timeout_s=config.timeout_s or own.timeout_s,
            workers=config.workers,
            concurrency=own.concurrency,
            batch_size=config.batch_size if config.batch else 0,
        )


async def _scores(source: RewardSource, samples: Sequence[Sample]) -> list[Outcome]:
    """A source's outcomes. Where it raises, against its word, it has failed for all of these samples."""
    try:
        return await source.scores(samples)
    except Exception as error:
        return [raised(error, source.name)] * len(samples)


class RuleSource(RewardSource):
    """A rule that takes microseconds, computed where it is asked for."""

    def __init__(self, name: str, weight: float, rule: Rule) -> None:
        self.name, self.weight = name, weight
        self._rule = rule

    async def scores(self, samples: Sequence[Sample]) -> list[Outcome]:
        found: list[Outcome] = []
        for at, sample in enumerate(samples):
            if at % TURN == TURN - 1:
                await asyncio.sleep(0)
            found.append(outcome_of(self._rule, sample, self.name))
        return found


class ThreadedRuleSource(RewardSource):
    """A rule that waits for what it started, and bounds that itself: computed in threads."""

    def __init__(self, name: str, weight: float, rule: Rule, config: RewardConfig, counters: RewardCounters) -> None:
        self.name, self.weight = name, weight
        self._rule = rule
        self._retries = config.retries
        self._counters = counters
        self._at_once = min(config.concurrency, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._at_once, thread_name_prefix=f"reward-{name}")
        self._closed = False

    async def ready(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._rule.ready)

    async def scores(self, samples: Sequence[Sample]) -> list[Outcome]:
        return await spread(samples, self._score, self._at_once)

    async def aclose(self) -> None:
        self._closed = True
        self._rule.close()
        await asyncio.to_thread(self._threads.shutdown)

    async def _score(self, sample: Sample) -> Outcome:
        async def call() -> Score:
            if self._closed:
                raise RewardFailure("its reward was closed", "unavailable", self.name)
            loop = asyncio.get_running_loop()
            outcome = await loop.run_in_executor(self._threads, outcome_of, self._rule, sample, self.name)
            if isinstance(outcome, RewardFailure):
                raise outcome
            return outcome

        return await attempts(call, self._retries, self._counters)


def outcome_of(rule: Rule, sample: Sample, name: str) -> Outcome:
    """What a rule says about a sample; whatever it raises is a failure of that sample."""
    try:
        return score_of(rule.score(sample))
    except RewardFailure as failure:
        return failure.of(name)
    except Exception as error:  # over what a model wrote, or what stands in a row
        return raised(error, name, again=False)
