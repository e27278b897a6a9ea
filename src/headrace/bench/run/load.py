"""The agents, the rows and the rule of `headrace bench run`, and how many of each there are."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.bench.gateway.load import ChatAgentDialect, speech, words_from
from headrace.net.async_client import AsyncHttpClient
from headrace.net.http_answer import NoAnswer
from headrace.rewards.sample import Sample

#: Seconds that one call may take: on a machine that is busy with other things, hundreds stand in line for its cores.
CALL_S = 600.0
#: How often a call is tried whose connection breaks off, as SDKs do: a server that had no CPU for longer than its
#: keep-alive closes connections on which a call has just come.
TRIES = 3
#: Seconds that the rule computes for each sample.
RULE_S = 0.001


@dataclass(frozen=True, slots=True)
class RunSizes:
    """All but the rounds belong to the meaning of the figures; rounds only make medians steadier.

    A word is a token, and a turn adds about ten more of the chat format's. All rollouts are under way at once.
    """

    name: str
    rollouts: int = 256
    n_rollouts: int = 8
    calls: int = 5
    first_words: int = 490
    more_words: int = 24
    sampled: int = 128
    #: Until the rollout server answers: 128 tokens at 128 tokens/s, which is quick for a server with 256 calls at once.
    delay_ms: float = 1000
    gather_rounds: int = 7

    few_samples: int = 1_000
    many_samples: int = 10_000
    reward_rounds: int = 5

    start_rounds: int = 3

    @property
    def rows(self) -> int:
        """Rows of the data: each is played `n_rollouts` times."""
        return self.rollouts // self.n_rollouts


FULL = RunSizes("full")
QUICK = RunSizes("quick", gather_rounds=3, reward_rounds=2, start_rounds=1)


class RolloutAgents:
    """Black-box agents: each holds a conversation that grows by what it was answered and something new."""

    def __init__(self, sizes: RunSizes) -> None:
        self.sizes = sizes
        self._speech = speech()
        self._numbers = itertools.count()
        self._dialect = ChatAgentDialect()
        self._http = AsyncHttpClient(total_s=CALL_S)

    def data(self) -> list[dict[str, Any]]:
        """The rows that are played."""
        return [{"prompt": words_from(self._speech, at, self.sizes.first_words)} for at in range(self.sizes.rows)]

    async def solve(self, task: Mapping[str, Any], base_url: str) -> None:
        """Plays one rollout of a row by calls below `base_url`. Raises where one is not answered as it should be."""
        history = [{"role": "user", "content": task["prompt"]}]
        url = f"{base_url}/v1{self._dialect.path}"
        for _ in range(self.sizes.calls):
            answer = await self._asked(url, self._dialect.request(history, self.sizes.sampled))
            history += self._dialect.heard(answer).kept
            more = words_from(self._speech, next(self._numbers), self.sizes.more_words)
            history.append({"role": "user", "content": more})

    async def _asked(self, url: str, body: Mapping[str, Any]) -> Any:
        for left in reversed(range(TRIES)):
            try:
                answer = await self._http.request("POST", url, json=body)
            except NoAnswer:
                if not left:
                    raise
            else:
                if answer.status != 200:
                    raise RuntimeError(f"{url} was answered {answer.status}: {answer.error_text()}")
                return answer.json()

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.close()


def samples(count: int) -> list[Sample]:
    """So many answers, each a short text with its ground truth."""
    return [
        Sample(
            messages=[{"role": "user", "content": f"What is {at} and {at}?"}],
            text=f"The answer is {2 * at}.",
            ground_truth=str(2 * at),
            metadata={"data_source": "bench"},
        )
        for at in range(count)
    ]


def compute(sample: Sample) -> float:
    """A rule that computes for `RULE_S`: whether the text has the ground truth."""
    until = time.perf_counter() + RULE_S
    while time.perf_counter() < until:
        pass
    return float(sample.ground_truth in sample.text)
