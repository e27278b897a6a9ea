"""`ConversationEnv`: environments whose rollout is one conversation, the same for training and for evaluation.

An author writes `setup`, `get_next_item`, `play` and `held_out`. In training, `play` talks to a managed conversation,
which records the tokens; in an evaluation to the servers themselves, at temperature 0. `Questions` reads items from a
JSON lines file: most for training, the last ones held out for evaluations.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson
from pydantic import Field

from headrace.data.errors import HeadraceError, InvalidInput, shown
from headrace.envs.base import BaseEnv
from headrace.envs.server import ChatCompletion, GatewayServer
from headrace.envs.server.responses import ChatCompletionMessage
from headrace.envs.types import BaseEnvConfig, Item, ScoredDataItem

log = logging.getLogger("headrace.envs")

Messages = list[dict[str, Any]]


class ChatEndpoint(Protocol):
    """What a conversation is held with: a managed conversation, or the servers."""

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion: ...


class ConversationConfig(BaseEnvConfig):
    """What every environment of conversations has: lengths, temperature, evaluation, seed."""

    answer_tokens: int = Field(512, ge=1, description="most tokens of one answer")
    temperature: float = Field(1.0, ge=0, description="temperature of rollouts; evaluations have 0")
    eval_items: int = Field(32, ge=1, description="items of an evaluation")
    seed: int = Field(0, description="what items are drawn by")


class ConversationEnv(BaseEnv):
    """An environment of conversations: an author writes `setup`, `get_next_item`, `play` and `held_out`."""

    env_config_cls = ConversationConfig
    config: ConversationConfig

    @abstractmethod
    async def play(self, server: ChatEndpoint, item: Item, **sampling: Any) -> tuple[Messages, float]:
        """Plays one conversation about the item; its messages and its score. `sampling` goes into every call."""

    @abstractmethod
    def held_out(self) -> Sequence[Item]:
        """The items of an evaluation, the same every time."""

    async def said(self, server: ChatEndpoint, messages: Messages, **asked: Any) -> ChatCompletionMessage:
        """The model's next message."""
        answer = await server.chat_completion(messages=messages, max_tokens=self.config.answer_tokens, **asked)
        return answer.choices[0].message

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem, list[Item]]:
        """One conversation as a scored item, with the tokens that were sampled."""
        tokenizer = self.tokenizer if self.needs_tokenizer else None
        async with self.server.managed_server(tokenizer=tokenizer) as managed:
            messages, score = await self.play(managed, item, temperature=self.config.temperature)
            # A template that rewrites earlier turns leaves several sequences; the last one ends in the last answer.
            sampled = managed.get_state()["nodes"][-1]
        return ScoredDataItem(
            tokens=sampled.tokens,
            masks=sampled.masked_tokens,
            inference_logprobs=sampled.logprobs,
            scores=score,
            messages=messages,  # type: ignore[typeddict-item] # tools' messages have more keys
        ), []

    @property
    def needs_tokenizer(self) -> bool:
        """A managed conversation needs it, except through a gateway that records it, which renders itself."""
        servers = self.server.servers
        return not all(isinstance(server, GatewayServer) and server.config.record for server in servers)

    @property
    def needs_server(self) -> bool:
        """A conversation needs a server, whether or not its address was configured."""
        return True

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Plays every held-out item once at temperature 0, and logs the mean score and the conversations, in the items'
        order.

        A conversation that fails is counted and logged: its sample has no score and says the `error`, and the mean is
        over the others. Raises `HeadraceError` where none has a score.
        """
        began, places = time.time(), asyncio.Semaphore(self.config.max_eval_workers)

        async def one(item: Item) -> dict[str, Any]:
            async with places:
                try:
                    messages, score = await self.play(self.server, item, temperature=0.0, split="eval")
                except Exception as error:  # whatever one item meets, the others' scores are wanted
                    self.counts.fail("play", error)
                    return {"messages": [], "score": None, "error": str(error) or type(error).__name__}
            return {"messages": messages, "score": score}

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in self.held_out()]
        samples = [task.result() for task in tasks]
        scores = [sample["score"] for sample in samples if sample["score"] is not None]
        if not scores:
            why = f"the last one failed with: {samples[-1]['error']}" if samples else "held_out() gave none"
            raise HeadraceError(f"none of {len(samples)} held-out items has a score: {why}")
        if len(scores) < len(samples):
            log.warning("eval/score is of %d of %d held-out items: the others failed", len(scores), len(samples))
        metrics = {"eval/score": sum(scores) / len(scores)}
        await self.evaluate_log(metrics, samples=samples, start_time=began, end_time=time.time())
        return metrics


class QuestionsConfig(ConversationConfig):
    """Where the questions of an environment are, and how many of them are held out."""

    path: str | None = Field(None, description="JSON lines file of questions; default: a few that come with it")
    question_key: str = Field("question", description="where a line has its question")
    answer_key: str = Field("answer", description="where a line has its answer")
    eval_items: int = Field(8, ge=1, description="questions at the file's end that only evaluations ask")


class Questions:
    """Questions to train on (`trained`) and to evaluate by (`held_out`). Iterating yields the former without end, in
    random order, each once per round."""

    def __init__(self, config: QuestionsConfig, default: Path, *, answered: bool) -> None:
        path = Path(config.path) if config.path else default
        found = list(_read(path, config.question_key, config.answer_key, answered))
        if len(found) <= config.eval_items:
            raise InvalidInput(
                f"{path} has {len(found)} questions, and {config.eval_items} are held out: "
                "set eval_items lower, or add questions"
            )
        self.trained, self.held_out = found[: -config.eval_items], found[-config.eval_items :]
        self._random = random.Random(config.seed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self._random.sample(self.trained, len(self.trained))


def _read(path: Path, question_key: str, answer_key: str, answered: bool) -> Iterator[dict[str, Any]]:
    """Items with `question` and, where a line has one, `answer`. Raises `InvalidInput` for an invalid line, or one
    without an answer where `answered`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise InvalidInput(f"{path}, line {number} is no JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get(question_key), str):
            raise InvalidInput(f"{path}, line {number} has no text {question_key!r}: {shown(row)}")
        answer = row.get(answer_key)
        if answered and (isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer == ""):
            raise InvalidInput(f"{path}, line {number} has no text or number {answer_key!r}: {shown(row)}")
        yield {"question": row[question_key]} | ({} if answer is None else {"answer": str(answer)})
