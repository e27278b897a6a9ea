"""How much `headrace bench pool` measures, and the steps that it sends: standard ones, and trajectories whose every
prompt extends the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headrace.data.step import Step


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """The sizes of a step and of a queue belong to the meaning of the figures; rounds only make medians steadier."""

    name: str
    prompt: int = 1024
    response: int = 256
    submit: int = 64

    writers: int = 8
    submits_a_writer: int = 12
    durable_rounds: int = 21

    few_groups: int = 10_000
    many_groups: int = 100_000
    fetch_groups: int = 32
    flat_rounds: int = 400

    recovered_steps: int = 100_000
    recover_rounds: int = 5

    trajectories: int = 200
    turns: int = 50
    final_tokens: int = 32_768

    rollouts: int = 8
    http_rounds: int = 40

    ray_submits: int = 50
    naive_calls: int = 400
    ray_rounds: int = 7

    million_steps: int = 1_000_000
    million_turns: int = 8
    million_tokens: int = 8_192
    few_million_groups: int = 64
    million_rounds: int = 60

    compacted_groups: int = 50_000
    compaction_rounds: int = 5

    many_channels: int = 5_000
    channel_rounds: int = 1_000


FULL = PoolSizes("full")
QUICK = PoolSizes(
    "quick",
    durable_rounds=11,
    flat_rounds=100,
    recover_rounds=3,
    http_rounds=15,
    naive_calls=200,
    ray_rounds=3,
    million_steps=100_000,
    million_rounds=30,
    compaction_rounds=3,
    channel_rounds=300,
)


VOCABULARY = 150_000
#: Rows of tokens that steps are cut from: more than a processor's caches hold, little enough to make at once.
TOKEN_ROWS = 8192


class StepSource:
    """Standard steps, each a trajectory of its own, `rollouts` of them a group. Tokens repeat after `TOKEN_ROWS`
    steps, uids never do.
    """

    def __init__(self, sizes: PoolSizes, *, rollouts: int = 1, seed: int = 0) -> None:
        self.sizes = sizes
        self.rollouts = rollouts
        random = np.random.default_rng(seed)
        self._ids = random.integers(0, VOCABULARY, (TOKEN_ROWS, sizes.prompt + sizes.response), dtype=np.int32)
        self._log_probs = -random.random((TOKEN_ROWS, sizes.response), dtype=np.float32)
        self._made = 0

    def steps(self, count: int) -> list[Step]:
        """So many steps, complete and rewarded: a group that has all of its own is ready to be handed out."""
        cut = self.sizes.prompt
        made: list[Step] = []
        for at in range(self._made, self._made + count):
            ids, log_probs = self._ids[at % TOKEN_ROWS], self._log_probs[at % TOKEN_ROWS]
            made.append(
                Step(
                    prompt_ids=ids[:cut],
                    response_ids=ids[cut:],
                    rollout_log_probs=log_probs,
                    trajectory_uid=f"trajectory-{at}",
                    prompt_uid=f"prompt-{at // self.rollouts}",
                    step_index=0,
                    is_last=True,
                    reward=1.0,
                    policy_version=0,
                )
            )
        self._made += count
        return made

    def submits(self, count: int) -> list[list[Step]]:
        return [self.steps(self.sizes.submit) for _ in range(count)]


class ConversationSource:
    """Trajectories of many turns: each turn's prompt is all that was said before and something new."""

    def __init__(self, sizes: PoolSizes, seed: int = 1) -> None:
        self.sizes = sizes
        random = np.random.default_rng(seed)
        shape = (sizes.trajectories, sizes.final_tokens)
        self._ids = random.integers(0, VOCABULARY, shape, dtype=np.int32)
        self._log_probs = -random.random((sizes.trajectories, sizes.turns * sizes.response), dtype=np.float32)

    @property
    def unique_bytes(self) -> int:
        """Bytes of every id once and of every log-prob once."""
        return self._ids.nbytes + self._log_probs.nbytes

    def submits(self) -> Iterator[list[Step]]:
        """Turn after turn of all trajectories, whole prompts, `submit` steps at a time."""
        sizes = self.sizes
        some: list[Step] = []
        for turn in range(sizes.turns):
            end = sizes.final_tokens * (turn + 1) // sizes.turns
            begin = end - sizes.response
            for trajectory in range(sizes.trajectories):
                some.append(
                    Step(
                        prompt_ids=self._ids[trajectory, :begin],
                        response_ids=self._ids[trajectory, begin:end],
                        rollout_log_probs=self._log_probs[trajectory, turn * sizes.response :][: sizes.response],
                        trajectory_uid=f"conversation-{trajectory}",
                        prompt_uid=f"task-{trajectory}",
                        step_index=turn,
                        is_last=turn == sizes.turns - 1,
                        reward=1.0 if turn == sizes.turns - 1 else None,
                        policy_version=0,
                    )
                )
                if len(some) == sizes.submit:
                    yield some
                    some = []
        if some:
            yield some
