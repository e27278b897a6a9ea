"""The rules that ship, and `made`, which finds one by its name."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from headrace.data.errors import InvalidInput, shown
from headrace.extras import install_command, installed
from headrace.files import checked, nearest
from headrace.rewards.answers import LIMIT_S, bounded
from headrace.rewards.combined_reward import CombinedReward
from headrace.rewards.registry import options_of, registry, shipped
from headrace.rewards.reward_function import RewardFunction
from headrace.rewards.rule import RULES, Place, Rule, behind_thoughts, last_block, rule, truth_of
from headrace.rewards.sample import RewardFailure, Sample, Score
from headrace.rewards.unit_tests import UnitTests

__all__ = ["UnitTests", "made"]

NUMBER = re.compile(
    r"(?:(?<!\w)-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
)
WORD = re.compile(r"\w+")


def made(use: str, options: Mapping[str, Any]) -> Rule:
    """The rule of a name with these options; also a `RewardFunction` that ships, by its name (`r1`, `accuracy`).

    Raises `InvalidInput` for an unknown name or option, with the nearest known one.
    """
    if use in RULES:
        return checked(RULES[use], options, f"the rule {use}")
    if use in shipped():
        return NamedReward.of(use, options)
    known = sorted({*RULES, *shipped()})
    raise InvalidInput(f"no rule is called {use!r}{nearest(use, known)}; there are: {', '.join(known)}")


@rule("exact_match")
class ExactMatch(Rule):
    """1 where the answer, without thoughts and surrounding blanks, is the ground truth, or one of a list of them."""

    ignore_case: bool = Field(False, description="A and a are the same")
    after: str | None = Field(None, description="only the text behind the last of these words counts, such as `####`")

    def score(self, sample: Sample) -> float:
        truth = truth_of(sample)
        wanted = {self._plain(str(one)) for one in (truth if isinstance(truth, list | tuple) else [truth])}
        text = behind_thoughts(sample.text)
        if self.after is not None:
            _, found, text = text.rpartition(self.after)
            if not found:
                return 0.0
        return float(self._plain(text) in wanted)

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()


@rule("math_verify")
class MathVerify(Rule):
    """1 where the answer equals the ground truth as mathematics (math-verify): the last `\\boxed{}`, or else the last
    formula or number. An answer without any is 0."""

    place: ClassVar[Place] = "process"

    places: int = Field(6, ge=0, description="decimal places to which numbers are compared")

    @model_validator(mode="after")
    def _can_be_computed(self) -> MathVerify:
        _needs("math_verify")
        return self

    def score(self, sample: Sample) -> float:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

        truth = str(truth_of(sample)).rpartition("####")[2].strip()
        unbounded: Any = None  # not by signals of its own: `bounded` limits CPU time, and the process has a limit too
        boxed = truth if "\\boxed" in truth else f"\\boxed{{{truth}}}"
        kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
        try:
            with bounded(LIMIT_S):
                right = parse(boxed, [LatexExtractionConfig()], parsing_timeout=unbounded)
                if not right:
                    raise RewardFailure(f"the ground truth {shown(truth)} is no mathematics", again=False)
                answer = parse(_last_boxed(behind_thoughts(sample.text)), kinds, parsing_timeout=unbounded)
                return float(verify(right, answer, float_rounding=self.places, timeout_seconds=unbounded))
        except TimeoutError as error:
            raise RewardFailure(f"math-verify: {error}", "timeout", again=False) from error


@rule("regex")
class RegexMatch(Rule):
    """1 where a regular expression is found in the answer."""

    place: ClassVar[Place] = "process"

    pattern: str = Field(description="as Python's `re` reads it; `.` matches line ends too")
    whole: bool = Field(False, description="it has to match the whole answer")
    ignore_case: bool = Field(False, description="A and a are the same")
    absent: bool = Field(False, description="1 where it is not found")

    @field_validator("pattern")
    @classmethod
    def _is_one(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"it is no regular expression: {error}") from error
        return pattern

    def score(self, sample: Sample) -> float:
        flags = re.DOTALL | (re.IGNORECASE if self.ignore_case else 0)
        found = (re.fullmatch if self.whole else re.search)(self.pattern, sample.text, flags)
        return float((found is not None) is not self.absent)


@rule("format")
class TagFormat(Rule):
    """1 where each tag stands once, closed, in this order, with text inside; with `partial` the share of those that
    do."""

    tags: list[str] = Field(["think", "answer"], min_length=1, description="names of tags, `answer` for `<answer>`")
    nothing_else: bool = Field(False, description="no text outside of the tags")
    partial: bool = Field(False, description="a share for those that are right, regardless of their order")

    def score(self, sample: Sample) -> float:
        text = sample.text
        places = [self._place(text, tag) for tag in self.tags]
        if self.partial:
            return sum(place is not None for place in places) / len(places)
        end, outside = 0, ""
        for place in places:
            if place is None or place[0] < end:
                return 0.0
            outside += text[end : place[0]]
            end = place[1]
        return float(not (self.nothing_else and (outside + text[end:]).strip()))

    @staticmethod
    def _place(text: str, tag: str) -> tuple[int, int] | None:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return None
        begin, end = text.index(opening), text.index(closing)
        inside = text[begin + len(opening) : end]
        return (begin, end + len(closing)) if inside.strip() else None


@rule("json_schema")
class JsonSchema(Rule):
    """1 where the answer, or its last fenced block, is JSON that a schema allows; any JSON where there is no schema."""

    place: ClassVar[Place] = "process"

    allowed: dict[str, Any] | None = Field(None, alias="schema", description="a JSON schema")

    @field_validator("allowed")
    @classmethod
    def _is_one(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is None:
            return None
        _needs("jsonschema")
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for

        try:
            validator_for(schema).check_schema(schema)
        except SchemaError as error:
            raise ValueError(f"it is no JSON schema: {error.message}") from error
        return schema

    def score(self, sample: Sample) -> Score:
        text = behind_thoughts(sample.text)
        try:
            found = json.loads(last_block(text) or text)
        except (ValueError, RecursionError) as error:
            return Score(0.0, info={"json_error": str(error)})
        if self.allowed is None:
            return Score(1.0)
        from jsonschema.validators import validator_for

        wrong = next(iter(validator_for(self.allowed)(self.allowed).iter_errors(found)), None)
        return Score(1.0) if wrong is None else Score(0.0, info={"json_error": shown(wrong.message, 200)})


@rule("number_closeness")
class NumberCloseness(Rule):
    """1 where the answer's last number is the ground truth, less in proportion to the distance, 0 from `within` on. An
    answer without a number is 0."""

    within: float = Field(1.0, gt=0, description="the distance at which the score is 0")
    relative: bool = Field(False, description="`within` is a share of the ground truth, 0.1 for a tenth")

    def score(self, sample: Sample) -> float:
        truth = truth_of(sample)
        wanted = _last_number(str(truth)) if not isinstance(truth, int | float) else float(truth)
        if wanted is None or not math.isfinite(wanted):
            raise RewardFailure(f"the ground truth {shown(truth)} is no number", again=False)
        given = _last_number(behind_thoughts(sample.text))
        if given is None:
            return 0.0
        scale = self.within * abs(wanted) if self.relative else self.within
        distance = abs(given - wanted)
        if scale == 0:
            return float(distance == 0)
        return max(0.0, 1.0 - distance / scale)


@rule("length")
class AnswerLength(Rule):
    """1 for an answer between `least` and `most` units long; outside of that, less in proportion, 0 from `margin`
    units beyond on."""

    unit: Literal["characters", "words", "tokens"] = "tokens"
    least: int = Field(0, ge=0)
    most: int = Field(ge=1)
    margin: int = Field(0, ge=0, description="units beyond either end over which the score falls to 0")

    @model_validator(mode="after")
    def _can_be_met(self) -> AnswerLength:
        if self.least > self.most:
            raise ValueError(f"least, {self.least}, is more than most, {self.most}")
        return self

    def score(self, sample: Sample) -> Score:
        length = self._length(sample)
        beyond = max(self.least - length, length - self.most, 0)
        value = 1.0 if beyond == 0 else max(0.0, 1.0 - beyond / self.margin) if self.margin else 0.0
        return Score(value, info={self.unit: length})

    def _length(self, sample: Sample) -> int:
        if self.unit == "characters":
            return len(sample.text)
        if self.unit == "words":
            return len(sample.text.split())
        if sample.text and not sample.response_ids:
            raise RewardFailure("the sample has no token ids; say `unit: words` or `characters`", again=False)
        return len(sample.response_ids)


@rule("repetition")
class Repetition(Rule):
    """0 for an answer that says nothing twice, down to -1: less the share of its word sequences that were said
    before."""

    words: int = Field(4, ge=1, description="words in a sequence")
    free: float = Field(0.0, ge=0, lt=1, description="the share that costs nothing")

    def score(self, sample: Sample) -> float:
        said = WORD.findall(sample.text.lower())
        runs = Counter(zip(*(said[at:] for at in range(self.words)), strict=False))
        if not runs:
            return 0.0
        share = 1 - len(runs) / runs.total()
        return 0.0 if share <= self.free else -(share - self.free) / (1 - self.free)


class NamedReward(Rule):
    """A `RewardFunction` that ships, as a rule; its options are that class' own. Of a list of ground truths, the one
    counts by which the answer is worth most."""

    place: ClassVar[Place] = "process"

    name_of: str
    _function: RewardFunction = PrivateAttr()

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any]) -> NamedReward:
        made, where = cls(name_of=name), f"the rule {name}"
        try:
            _check_options(name, options, where)
            made._function = registry.create(name, **options)
        except (TypeError, ImportError) as error:
            raise InvalidInput(f"{where}: {error}") from error
        return made

    def score(self, sample: Sample) -> float:
        if not self._function.needs_truth:
            return self._computed(sample.text, sample.ground_truth)
        values = [self._computed(sample.text, truth) for truth in _texts(truth_of(sample))]
        return next((value for value in values if math.isnan(value)), max(values))

    def _computed(self, text: str, truth: Any) -> float:
        (found,) = self._function.compute(
            [[{"role": "assistant", "content": text}]], solution=truth, ground_truth=truth
        )
        return float(found)


def _check_options(name: str, options: Mapping[str, Any], where: str) -> None:
    """Raises `InvalidInput` for an option that neither a reward nor, where it is a combined one, its part takes."""
    kind = registry.get(name)
    known = options_of(kind)
    if known is not None:
        for option in options:
            if option not in known:
                instead = nearest(option, known) or f"; it takes {', '.join(sorted(known))}"
                raise InvalidInput(f"{where}: {option} is not known{instead}")
    if kind is not CombinedReward:
        return
    for at, part in enumerate(options.get("rewards", ())):
        if isinstance(part, Mapping):
            inside = f"{where}: rewards.{at}"
            if "type" not in part:
                raise InvalidInput(f"{inside}: {shown(dict(part))} has no `type`, which is the reward's name")
            own = {option: value for option, value in part.items() if option not in ("type", "params")}
            _check_options(part["type"], {**own, **part.get("params", {})}, inside)


def _texts(truth: Any) -> list[str]:
    """What a ground truth says is right, as texts: one, or each of a list; a message counts by its text. Raises
    `RewardFailure` where one of them is none."""
    found = []
    for one in truth if isinstance(truth, list | tuple) else [truth]:
        said = RewardFunction.get_content(one) if isinstance(one, Mapping) else one
        if not isinstance(said, str | Real) or not str(said).strip():
            raise RewardFailure(f"the ground truth holds {shown(one)}: text or a number is expected", again=False)
        found.append(str(said))
    if not found:
        raise RewardFailure(
            "the ground truth is an empty list: text, a number or some of them are expected", again=False
        )
    return found


def _last_boxed(text: str) -> str:
    """A text from its last box on; all of it where there is none. math-verify would read several boxes as one set."""
    return text[max(text.rfind("\\boxed"), 0) :]


def _last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _needs(module: str) -> None:
    if not installed(module):
        raise InvalidInput(f"it needs {module}: {install_command('rewards')}")
