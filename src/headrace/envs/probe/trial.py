"""Items rolled out by the policies, twice each, and what each policy earned."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.data.errors import HeadraceError
from headrace.envs.groups import RolloutFailed, check_result
from headrace.envs.probe.gold import answer_of
from headrace.envs.probe.model import ScriptedModel
from headrace.envs.probe.policies import POLICIES, Policy
from headrace.envs.probe.report import Outcome, Report
from headrace.envs.probe.script import Said
from headrace.envs.server import APIServerConfig, ServerManager, new_group
from headrace.envs.testing.model import ModelServer

if TYPE_CHECKING:
    from headrace.envs.base import BaseEnv

MASKED = -100
ROUNDS = 2
#: What policies earned in one round, by their names.
Earned = dict[str, list[float]]


async def probe(env: BaseEnv, model: ScriptedModel, items: int) -> Report:
    """Rolls so many items out, with the model in the place of the environment's servers."""
    await env.server.close()
    config = APIServerConfig(model_name="policies", health_check=False)
    env.server = ServerManager([config], server_class=lambda config, **more: ModelServer(model, config, **more))
    trial = Trial(env, model)
    try:
        await env.setup()
        for _ in range(items):
            item = env.backlog.pop() if env.backlog else await env.get_next_item()
            if item is None:
                break
            await trial.item(item)
    finally:
        await env.close()
    return trial.report()


class Trial:
    """All policies answer in one group, so that one whose scores would all be equal is not dropped for it. Where that
    raises, each answers alone, and those that raise are left out from there on.
    """

    def __init__(self, env: BaseEnv, model: ScriptedModel) -> None:
        self._env, self._model = env, model
        self._alive: list[Policy] = list(POLICIES)
        self._outcomes = {policy.name: Outcome(policy.name, policy.knows) for policy in POLICIES}
        self._seconds: list[float] = []
        self._items = 0

    async def item(self, item: Any) -> None:
        answer = self._answer(item)
        self._items += 1
        rounds = [await self._round(item, answer) for _ in range(ROUNDS)]
        for name, outcome in self._outcomes.items():
            earned = [found.get(name, []) for found in rounds]
            outcome.scores += itertools.chain(*earned)
            if all(earned):
                outcome.repeated += 1
                outcome.same += all(sorted(one) == sorted(earned[0]) for one in earned)

    def _answer(self, item: Any) -> str | None:
        """What the environment's own `gold_answer(item)` says, where it has one; else what the item shows."""
        told = getattr(self._env, "gold_answer", None)
        return answer_of(item) if told is None else told(item)

    async def _round(self, item: Any, answer: str | None) -> Earned:
        try:
            return await self._collected(item, answer, self._alive)
        except RolloutFailed:
            self._alive = [policy for policy in self._alive if await self._stands(item, answer, policy)]
        if not self._alive:
            return {}
        try:
            return await self._collected(item, answer, self._alive)
        except RolloutFailed as error:
            raise HeadraceError(f"its rollouts fail: {error}") from error

    async def _stands(self, item: Any, answer: str | None, policy: Policy) -> bool:
        """Whether a policy alone gets through; one without an answer to give is not asked."""
        if policy.knows and answer is None:
            return True
        try:
            await self._collected(item, answer, [policy])
        except RolloutFailed as error:
            self._outcomes[policy.name].error = str(error)
            return False
        return True

    async def _collected(self, item: Any, answer: str | None, policies: Sequence[Policy]) -> Earned:
        env, script = self._env, self._model.script
        script.begin(policies, answer)
        self._model.begin()
        limit = env.config.worker_timeout
        began = time.monotonic()
        try:
            with new_group():
                async with asyncio.timeout(limit if limit > 0 else None):
                    found, later = check_result(
                        await env.collect_trajectories(copy.deepcopy(item)), "collect_trajectories"
                    )
                    groups = await env.postprocess_histories(found) if found else None
        except RolloutFailed:
            raise
        except Exception as error:  # whatever an author's rollout raises is what is to be told
            raise RolloutFailed(f"{type(error).__name__}: {error}") from error
        self._seconds.append((time.monotonic() - began) / max(1, len(script.said)))
        await env.cleanup()
        if len(env.backlog) < len(POLICIES):
            env.backlog.extend(later)
        earned: Earned = {}
        for group in groups if isinstance(groups, list) else [groups]:
            for name, score in self._scores(group):
                earned.setdefault(name, []).append(score)
        return earned

    def _scores(self, group: Any) -> list[tuple[str, float]]:
        """Each sequence's score, with the policy that said it."""
        if not isinstance(group, dict) or not group.get("scores"):
            return []
        found: list[tuple[str, float]] = []
        unknown: list[float] = []
        for at, score in enumerate(group["scores"]):
            names = [said.policy.name for said in self._who_said(group, at)]
            claimed = {name for name, _ in found}
            if names:
                found.append((next((name for name in names if name not in claimed), names[0]), float(score)))
            else:
                unknown.append(float(score))
        left = {said.policy.name for said in self._model.script.said} - {name for name, _ in found}
        if len(unknown) == len(left) == 1:
            found.append((left.pop(), unknown[0]))
        return found

    def _who_said(self, group: dict[str, Any], at: int) -> list[Said]:
        """Who said the last of a sequence, as it is trained on or written down: it and no more, or it among more."""
        said = self._model.script.said
        for texts in (_trained(group, at, self._env.tokenizer), _written(group, at)):
            exact = [one for one in said if texts and one.text.strip() == texts[-1]]
            inside = [one for one in said if one.text.strip() and any(one.text.strip() in text for text in texts)]
            if exact or inside:
                return exact or sorted(inside, key=lambda one: -len(one.text))
        return []

    def report(self) -> Report:
        kept = [one for one in self._outcomes.values() if one.scores or one.error]
        if not any(one.scores for one in kept):
            why = next((f": {one.error}" for one in kept if one.error), "; its groups may all have been dropped")
            raise HeadraceError(f"no reward was seen on {self._items} items{why}")
        script = self._model.script
        return Report(type(self._env).__name__, self._items, kept, self._seconds, script.judged)


def _trained(group: dict[str, Any], at: int, tokenizer: Any) -> list[str]:
    """The text of each stretch of a sequence that is trained on; an empty one where there is none."""
    pairs = zip(group["tokens"][at], group["masks"][at], strict=False)
    runs = itertools.groupby(pairs, key=lambda check_result: check_result[1] != MASKED)
    stretches = [[int(token) for token, _ in run] for trained, run in runs if trained]
    return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in stretches] or [""]


def _written(group: dict[str, Any], at: int) -> list[str]:
    """The answers in a sequence's messages, where it has them."""
    chats = group.get("messages") or []
    if at >= len(chats) or not isinstance(chats[at], list | tuple):
        return []
    answers = [message for message in chats[at] if isinstance(message, dict) and message.get("role") == "assistant"]
    return [str(message.get("content") or "").strip() for message in answers]
