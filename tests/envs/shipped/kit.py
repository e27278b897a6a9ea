"""The commands of environments that ship, in this process; a trainer that takes batches."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tests.atropos.words import registration
from tests.gateway.kit import serving

from headrace.envs import BaseEnv
from headrace.envs.cli import parse_command
from headrace.envs.jsonl_qa import JsonlQaEnv
from headrace.envs.judge import JudgeEnv
from headrace.envs.number_guess import NumberGuessEnv
from headrace.envs.reasoning_gym import ReasoningGymEnv
from headrace.envs.tool_calc import ToolCalcEnv

GROUP, BATCH, STEPS = 2, 4, 2

#: Each with flags that keep its rollouts short.
SHIPPED: dict[type[BaseEnv], list[str]] = {
    NumberGuessEnv: ["--env.guesses", "3"],
    ToolCalcEnv: [],
    ReasoningGymEnv: ["--env.task", "basic_arithmetic"],
    JsonlQaEnv: ["--env.checkers", "1"],
    JudgeEnv: ["--env.judge.model_name", "judge", "--env.judge.health_check", "false"],
}

#: The same, each with the mark of the tier that has what it needs.
PARAMS = [
    pytest.param(env_cls, id=env_cls.name, marks=[pytest.mark.gym] if env_cls is ReasoningGymEnv else [])
    for env_cls in SHIPPED
]


@contextmanager
def shipped(env_cls: type[BaseEnv], base_url: str, tokenizer: Path) -> Iterator[Run]:
    """An environment that ships, with what it needs beside its rollout server."""
    flags = ["--env.answer_tokens", "4", *SHIPPED[env_cls]]
    with serving(Judge().app()) if env_cls is JudgeEnv else nullcontext() as judge:
        yield Run(env_cls, base_url, tokenizer, flags + (["--env.judge.base_url", f"{judge}/v1"] if judge else []))


@dataclass
class Run:
    """One environment, its rollout server, and flags of its own."""

    env_cls: type[BaseEnv]
    base_url: str
    tokenizer: Path
    flags: list[str]

    def do(self, name: str, *flags: str) -> None:
        """Carries a command out, in the folder that this process is in."""
        server = ["--openai.base_url", self.base_url, "--openai.model_name", "tiny", "--openai.server_type", "vllm"]
        ours = ["--env.tokenizer_name", str(self.tokenizer), "--env.use_wandb", "false"]
        ours += ["--env.group_size", str(GROUP), "--env.max_num_workers", "2"]
        parse_command(self.env_cls, [name, *server, *ours, *self.flags, *flags], "env", {}).run()

    def processed(self) -> list[dict[str, Any]]:
        self.do("process", "--env.total_steps", "2")
        lines = Path(f"data/{self.env_cls.name}.jsonl").read_text().splitlines()
        assert "<html" in Path(f"data/{self.env_cls.name}.html").read_text()
        return [json.loads(line) for line in lines]

    def evaluated(self, items: int) -> float:
        """The mean score, which is that of the samples."""
        self.do("evaluate", "--env.eval_items", str(items))
        folder = Path(f"data/{self.env_cls.name}-evaluation")
        samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        assert len(samples) == items
        assert all(sample["messages"][-1]["role"] in ("assistant", "tool") for sample in samples)
        found: float = json.loads((folder / "metrics.json").read_text())["results"]["all"]["eval/score"]
        assert found == sum(sample["score"] for sample in samples) / items
        return found

    def served(self, api: str) -> list[dict[str, Any]]:
        """The groups of a trainer's batches."""
        with httpx.Client(base_url=api, timeout=240, trust_env=False) as client:
            client.post("/register", json=registration(batch_size=BATCH, num_steps=STEPS)).raise_for_status()
            assert client.get("/batch").json() == {"batch": None}  # with which the trainer has begun
            batches = beside(lambda: _batches(client, STEPS))
            flags = ["--env.rollout_server_url", api, "--env.total_steps", str(STEPS), "--env.status_poll_s", "0.02"]
            # A model of random weights scores alike throughout.
            self.do("serve", *flags, "--env.ensure_scores_are_not_same", "false", "--env.steps_per_eval", "0")
            found = batches.result(400)
        assert [sum(len(group["scores"]) for group in batch) for batch in found] == [BATCH] * STEPS
        return [group for batch in found for group in batch]


class Judge:
    """A judge behind an OpenAI-compatible server: it says what is `said`, in turn, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.said: list[str] = []

    def app(self) -> FastAPI:
        app = FastAPI()
        app.post("/v1/chat/completions")(self._answer)
        return app

    async def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        said = self.said.pop(0) if self.said else f"Score: {len(self.asked) % 11}"
        return {"model": "judge", "choices": [{"index": 0, "message": {"role": "assistant", "content": said}}]}


def beside(work: Callable[[], Any]) -> Future[Any]:
    """Work in a thread, while the environment has the main one, which signals need."""
    found: Future[Any] = Future()

    def carry_out() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=carry_out, daemon=True).start()
    return found


def _batches(client: httpx.Client, count: int) -> list[list[dict[str, Any]]]:
    """The next batches, asked for until they are there."""
    taken: list[list[dict[str, Any]]] = []
    while len(taken) < count:
        found = client.get("/batch").json()["batch"]
        if found:
            taken.append(found)
    return taken


def are_whole(groups: list[dict[str, Any]]) -> None:
    """Each sequence has labels and log-probs for its tokens, and something to train on."""
    for group in groups:
        assert len(group["tokens"]) == len(group["scores"]) == GROUP
        for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            assert all(mask in (-100, token) for token, mask in zip(tokens, masks, strict=True))
            assert all((logprob == 1.0) == (mask == -100) for logprob, mask in zip(logprobs, masks, strict=True))
            assert any(mask != -100 for mask in masks)
