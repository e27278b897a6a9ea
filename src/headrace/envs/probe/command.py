"""`probe`: rolls items out with every policy, twice each, and reports what each policy earned."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field

from headrace.data.errors import HeadraceError
from headrace.data.json import to_json
from headrace.envs.base import BaseEnv
from headrace.envs.groups import RolloutFailed, check_result
from headrace.envs.probe.model import PolicyAnswer, Script, ScriptedModel
from headrace.envs.probe.policies import POLICIES, ProbePolicy, answer_of
from headrace.envs.probe.report import PolicyScores, ProbeReport
from headrace.envs.server import APIServerConfig, ServerManager, new_group
from headrace.envs.server.sequences import MASKED
from headrace.envs.subcommands import CommandOptions, EnvSubcommand
from headrace.envs.testing.fakes import FakeModelServer, byte_tokenizer
from headrace.envs.types import BaseEnvConfig

#: Times that each item is rolled out, to see whether the same answer is paid the same again.
ROUNDS = 2
#: The exit code of a probe that found something wrong with the reward.
FINDINGS_EXIT_CODE = 3
#: Bytes per token, about: length limits are in tokens, and the probe's own tokenizer has one token per byte.
BYTES_PER_TOKEN = 4
#: What policies earned in one round, by their names.
Earned = dict[str, list[float]]


async def probe(env: BaseEnv, model: ScriptedModel, items: int) -> ProbeReport:
    """Rolls so many items out, with the model in the place of the environment's servers; closes the environment.

    Raises `HeadraceError` where no reward was seen.
    """
    await env.server.close()
    config = APIServerConfig(model_name="policies", health_check=False)
    env.server = ServerManager([config], server_class=lambda config, **more: FakeModelServer(model, config, **more))
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
    """One probe. All policies answer in one group, so that no group is dropped for its equal scores. Where that raises,
    each answers alone, and those that raise are left out from then on.
    """

    def __init__(self, env: BaseEnv, model: ScriptedModel) -> None:
        self._env, self._model = env, model
        self._alive: list[ProbePolicy] = list(POLICIES)
        self._outcomes = {policy.name: PolicyScores(policy.name, policy.knows) for policy in POLICIES}
        self._seconds: list[float] = []
        self._items = 0

    async def item(self, item: Any) -> None:
        """Rolls an item out twice with every policy, and adds what each earned."""
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
        """The result of the environment's own `gold_answer(item)`, where it has one; else the item's answer."""
        told = getattr(self._env, "gold_answer", None)
        return answer_of(item) if told is None else told(item)

    async def _round(self, item: Any, answer: str | None) -> Earned:
        try:
            return await self._collected(item, answer, self._alive)
        except RolloutFailed:
            self._alive = [policy for policy in self._alive if await self._passes(item, answer, policy)]
        if not self._alive:
            return {}
        try:
            return await self._collected(item, answer, self._alive)
        except RolloutFailed as error:
            raise HeadraceError(f"its rollouts fail: {error}") from error

    async def _passes(self, item: Any, answer: str | None, policy: ProbePolicy) -> bool:
        """Whether a policy alone raises nothing; one that needs the item's answer is not tried without."""
        if policy.knows and answer is None:
            return True
        try:
            await self._collected(item, answer, [policy])
        except RolloutFailed as error:
            self._outcomes[policy.name].error = str(error)
            return False
        return True

    async def _collected(self, item: Any, answer: str | None, policies: Sequence[ProbePolicy]) -> Earned:
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
        """The score of each sequence, with the name of the policy that wrote it."""
        if not isinstance(group, dict) or not group.get("scores"):
            return []
        found: list[tuple[str, float]] = []
        unknown: list[float] = []
        for at, score in enumerate(group["scores"]):
            names = [said.policy.name for said in self._answers_in(group, at)]
            claimed = {name for name, _ in found}
            if names:
                found.append((next((name for name in names if name not in claimed), names[0]), float(score)))
            else:
                unknown.append(float(score))
        left = {said.policy.name for said in self._model.script.said} - {name for name, _ in found}
        if len(unknown) == len(left) == 1:
            found.append((left.pop(), unknown[0]))
        return found

    def _answers_in(self, group: dict[str, Any], at: int) -> list[PolicyAnswer]:
        """The answers that a sequence ends with, by its trained tokens or its messages; exact ones before others."""
        said = self._model.script.said
        for texts in (_trained(group, at, self._env.tokenizer), _written(group, at)):
            exact = [one for one in said if texts and one.text.strip() == texts[-1]]
            inside = [one for one in said if one.text.strip() and any(one.text.strip() in text for text in texts)]
            if exact or inside:
                return exact or sorted(inside, key=lambda one: -len(one.text))
        return []

    def report(self) -> ProbeReport:
        """What was found. Raises `HeadraceError` where no reward was seen."""
        kept = [one for one in self._outcomes.values() if one.scores or one.error]
        if not any(one.scores for one in kept):
            why = next((f": {one.error}" for one in kept if one.error), "; its groups may all have been dropped")
            raise HeadraceError(f"no reward was seen on {self._items} items{why}")
        script = self._model.script
        return ProbeReport(type(self._env).__name__, self._items, kept, self._seconds, script.judged)


def _trained(group: dict[str, Any], at: int, tokenizer: Any) -> list[str]:
    """The text of each run of trained tokens of a sequence; one empty text where there is none."""
    pairs = zip(group["tokens"][at], group["masks"][at], strict=False)
    runs = itertools.groupby(pairs, key=lambda pair: pair[1] != MASKED)
    stretches = [[int(token) for token, _ in run] for trained, run in runs if trained]
    return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in stretches] or [""]


def _written(group: dict[str, Any], at: int) -> list[str]:
    """The answers in a sequence's messages, where it has them."""
    chats = group.get("messages") or []
    if at >= len(chats) or not isinstance(chats[at], list | tuple):
        return []
    answers = [message for message in chats[at] if isinstance(message, dict) and message.get("role") == "assistant"]
    return [str(message.get("content") or "").strip() for message in answers]


class ProbeOptions(CommandOptions):
    """The flags of `probe`."""

    items: int = Field(8, description="items to roll out")
    json_path: Path | None = Field(None, alias="json", description="write the report to this file as JSON")
    own_tokenizer: bool = Field(False, description="load the environment's tokenizer, and not one of bytes")


class ProbeSubcommand(EnvSubcommand):
    """See what the reward pays for, without a model: policies answer that say nothing, echo the prompt, have only the
    form, pad, instruct a judge, or know the answer where an item carries it. Ends with 0 where nothing is wrong with
    the reward, with 3 where it is hackable, flat, not deterministic or raises, and with 1 where no reward was seen.
    """

    summary = "see what its reward pays for, without a model"
    options_cls = ProbeOptions
    options: ProbeOptions

    @classmethod
    def changes(cls, config: BaseEnvConfig) -> dict[str, object]:
        return {
            "group_size": len(POLICIES),
            "use_wandb": False,
            "ensure_scores_are_not_same": False,
            "include_messages": True,
            "data_path_to_save_groups": None,
            "max_token_length": config.max_token_length * BYTES_PER_TOKEN,
        }

    def run(self) -> None:
        shown: dict[str, Any] = {} if self.options.own_tokenizer else {"tokenizer": byte_tokenizer()}
        found = self.settings
        # The tokenizer is there before the environment's own __init__ asks for it.
        env_cls = type(self.env_cls.__name__, (self.env_cls,), {"__module__": self.env_cls.__module__, **shown})
        env = env_cls(config=found.env, server_configs=found.servers, slurm=found.slurm, testing=found.testing)
        report = asyncio.run(probe(env, ScriptedModel(Script(), env.tokenizer), self.options.items))
        print(report)
        if self.options.json_path is not None:
            self.options.json_path.write_bytes(to_json(report.as_dict(), orjson.OPT_INDENT_2) + b"\n")
        if report.findings():
            raise SystemExit(FINDINGS_EXIT_CODE)
