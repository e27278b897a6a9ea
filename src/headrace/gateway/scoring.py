"""What stands behind `/compute_reward`: a reward in this process (`--reward`), or a named Ray actor
(`--reward-worker-name`). Without either, whoever asks is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.gateway.counters import GatewayCounters
from headrace.gateway.errors import Refusal
from headrace.gateway.settings import GatewaySettings
from headrace.rewards.recorded import SampleReader, last_answer
from headrace.rewards.sample import RewardFailure, Sample, Score
from headrace.tokens import Renderer, read_messages

if TYPE_CHECKING:
    from headrace.rewards.worker import LocalRewardWorker, RewardWorker


class RewardScoring:
    """Scores one answer at a time for callers of `/compute_reward`. Raises `InvalidInput` for a reward that cannot be
    made, such as one whose judge's key is not in the environment. A Ray actor is looked for when it is first asked."""

    def __init__(self, settings: GatewaySettings, counters: GatewayCounters) -> None:
        self._settings = settings
        self._counters = counters
        self._local: LocalRewardWorker | None = None
        self._worker: RewardWorker | None = None
        self._ground_truth: str | None = None
        self._reader: tuple[Renderer, SampleReader] | None = None
        if settings.reward is not None:
            from headrace.rewards.config import RewardConfig  # only a gateway that scores waits for them
            from headrace.rewards.worker import LocalRewardWorker

            config = RewardConfig.read(Path(settings.reward))
            self._ground_truth = config.ground_truth
            self._worker = self._local = LocalRewardWorker(config)
        elif settings.reward_worker_name is not None:
            from headrace.net.ray_cluster import ActorAddress
            from headrace.rewards.ray import RayRewardWorker

            name = settings.reward_worker_name
            self._worker = RayRewardWorker(ActorAddress.read(name) if "://" in name else ActorAddress(name))

    async def ready(self) -> None:
        """Returns once answers can be scored. Raises `InvalidInput` where they never can, such as for a function that
        cannot be imported."""
        if self._local is not None:
            await self._local.ready()

    async def close(self) -> None:
        """Lets go of the worker."""
        if self._worker is not None:
            await self._worker.aclose()

    @property
    def worker(self) -> RewardWorker:
        """Who scores; `Refusal` where nobody does."""
        if self._worker is None:
            raise Refusal(
                "this gateway has no reward worker: start it with --reward FILE or --reward-worker-name NAME, or score "
                "answers in your own code, and send what they are worth with /submit_steps, or with reward and "
                "complete_trajectory",
                503,
                code="no_reward_worker",
            )
        return self._worker

    async def score(self, sample: Sample) -> Score:
        """What a sample is worth; raises its `RewardFailure`, or `Refusal` where nobody scores here."""
        (found,) = await self.worker.score([sample])
        if isinstance(found, RewardFailure):
            self._counters.add("rewards", found.reason)
            raise found
        self._counters.add("rewards", "scored")
        return found

    def of_ids(
        self,
        renderer: Renderer,
        prompt: Sequence[int],
        response: Sequence[int],
        row: Mapping[str, Any],
        num_turns: int | None,
    ) -> Sample:
        """A sample of ids, which may be padded to the gateway's prompt and response lengths."""
        settings = self._settings
        if self._reader is None or self._reader[0] is not renderer:
            self._reader = (renderer, SampleReader(renderer, self._ground_truth))
        reader = self._reader[1]
        prompt = reader.unpadded(prompt, settings.prompt_length, left=True)
        response = reader.unpadded(response, settings.response_length, left=False)
        return reader.of_ids(prompt, response, row, num_turns=num_turns)

    def of_messages(self, messages: Sequence[Any], row: Mapping[str, Any], **fields: Any) -> Sample:
        """A sample of a conversation that ends with the answer. Raises `InvalidInput` where it is none."""
        read = read_messages(messages)
        answers = sum(message.role == "assistant" for message in read)
        return Sample.of_row(
            row,
            ground_truth=self._ground_truth,
            messages=[dict(message) for message in messages],
            text=last_answer(messages),
            num_turns=answers,
            **fields,
        )
