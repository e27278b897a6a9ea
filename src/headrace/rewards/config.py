"""`RewardConfig`: what an answer's reward is made of, as a file has it.

rules: [{use: math_verify, weight: 0.9}, {use: format, weight: 0.1}]
judge: {address: http://localhost:8001, model: judge, rubric: "Is it polite?", weight: 0.5}
functions: [{use: reward.py:score}]
ground_truth: answer
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.data.errors import InvalidInput
from headrace.files import checked, expanded, nearest, read
from headrace.rewards.judge import RewardJudgeConfig
from headrace.rewards.reward_model import RewardModelConfig
from headrace.rewards.rule import Rule
from headrace.rewards.rules import made


class RuleConfig(BaseModel):
    """A rule by its name, and its options beside it. `format` alone is `{use: format}`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    use: str = Field(description="the rule's name")
    weight: float = Field(1.0, allow_inf_nan=False)
    name: str = Field("", description="what its part is called; the rule's name where it is not set")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return {"use": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _is_one(self) -> RuleConfig:
        self.rule()
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The rule's own options."""
        return dict(self.__pydantic_extra__ or {})

    def rule(self) -> Rule:
        """The rule; raises `InvalidInput` for an unknown rule or option."""
        return made(self.use, self.options)


class RewardFunctionConfig(BaseModel):
    """A function of the user's, `FILE.py:FUNCTION` or `package.module:FUNCTION`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    use: str
    weight: float = Field(1.0, allow_inf_nan=False)
    name: str = Field("", description="what its part is called; the function's name where it is not set")
    batch: bool = Field(False, description="it takes a list of samples and returns a list of as many scores")
    batch_size: int = Field(64, ge=1, description="most samples in a list")
    workers: int = Field(
        2, ge=1, description="processes that run it, each with one call; an asynchronous one needs one"
    )
    retries: int | None = Field(None, ge=0, description="in place of the reward's own")
    timeout_s: float | None = Field(None, gt=0, description="seconds of a call, in place of the reward's own")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return {"use": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _is_one(self) -> RewardFunctionConfig:
        where, _, function = self.use.rpartition(":")
        if not where or not function.isidentifier():
            raise ValueError(f"use: a function is named as FILE.py:FUNCTION, not {self.use!r}")
        return self

    def below(self, base: Path) -> RewardFunctionConfig:
        """The same, its file by its whole path; relative ones are below `base`. Raises `InvalidInput` where there is no
        such file, or it has no such name."""
        where, _, function = self.use.rpartition(":")
        if not where.endswith(".py"):
            return self
        path = (base / expanded(where)).resolve()
        if not path.is_file():
            raise InvalidInput(f"functions: there is no file {path}, in which {function!r} should be")
        try:
            names = _names(ast.parse(path.read_bytes()))
        except SyntaxError as error:
            raise InvalidInput(f"functions: {path} is no Python file: {error}") from error
        if names is not None and function not in names:
            there = ", ".join(sorted(names)) or "none"
            raise InvalidInput(
                f"functions: {path} has no function {function!r}{nearest(function, names)}; there are: {there}"
            )
        return self.model_copy(update={"use": f"{path}:{function}"})


class RewardConfig(BaseModel):
    """Where rewards come from, and how: the reward is the sum of all sources' scores, each times its weight."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rules: list[RuleConfig] = []
    judges: list[RewardJudgeConfig] = Field([], description="or `judge`, for one")
    reward_models: list[RewardModelConfig] = Field([], description="or `reward_model`, for one")
    functions: list[RewardFunctionConfig] = []
    ground_truth: str | None = Field(None, description="the column of the data that holds what the answer should be")
    on: Literal["trajectory", "step"] = Field("trajectory", description="what gets a reward: the outcome, or each step")
    retries: int = Field(2, ge=0, description="further attempts after a failed one, of each source for each sample")
    timeout_s: float = Field(60.0, gt=0, description="seconds of one attempt")
    concurrency: int = Field(64, ge=1, description="most samples that are scored at once")

    @model_validator(mode="before")
    @classmethod
    def _of_one(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        found = dict(given)
        if True in found:  # YAML reads a plain `on` as true
            found["on"] = found.pop(True)
        for one, several in (("judge", "judges"), ("reward_model", "reward_models")):
            if one in found:
                if several in found:
                    raise ValueError(f"`{one}` and `{several}` are both given: put all of them into `{several}`")
                found[several] = [found.pop(one)]
        return found

    @model_validator(mode="after")
    def _can_score(self) -> RewardConfig:
        names = self.names
        if not names:
            raise ValueError(
                "there is nothing that gives a reward: name `rules`, `judge`, `reward_model` or `functions`, such as "
                "rules: [{use: math_verify}]"
            )
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two sources are called {twice!r}: give one of them another `name`")
        return self

    @property
    def names(self) -> list[str]:
        """The names of all sources: those of a score's parts."""
        return [
            *(rule.name or rule.use for rule in self.rules),
            *(judge.name for judge in self.judges),
            *(model.name for model in self.reward_models),
            *(function.name or function.use.rpartition(":")[2] for function in self.functions),
        ]

    def below(self, base: Path) -> RewardConfig:
        """The same, with functions' files by their whole paths; relative ones are below `base`. Raises `InvalidInput`
        where one is not there."""
        return self.model_copy(update={"functions": [function.below(base) for function in self.functions]})

    @classmethod
    def of(cls, values: Mapping[str, Any], base: Path = Path(), source: object = "reward") -> RewardConfig:
        """A configuration's section; files of functions are below `base`. Raises `InvalidInput`, which begins with
        `source` and names what is wrong."""
        return checked(cls, values, source).below(base)

    @classmethod
    def read(cls, path: Path) -> RewardConfig:
        """A configuration file; files of functions are below its folder. Raises `InvalidInput`."""
        return cls.of(read(path), path.parent, path)


def _names(module: ast.Module) -> set[str] | None:
    """The names that a module's own lines define or import; None where it imports all names of another."""
    found: set[str] = set()
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                if any(one.name == "*" for one in names):
                    return None
                found.update((one.asname or one.name).partition(".")[0] for one in names)
    return found
