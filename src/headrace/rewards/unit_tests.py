"""The rule `unit_tests`: an answer's program is run in the sandbox, and its tests say what it is worth.

A program's fault (it is wrong, endless, too large) is a low score. That the sandbox could not run it is a failure.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr

from headrace.data.errors import InvalidInput, shown
from headrace.rewards.rule import Place, Rule, behind_thoughts, last_block, rule, truth_of
from headrace.rewards.sample import RewardFailure, Sample, Score
from headrace.rewards.sandbox import Sandbox, SandboxLimits, SandboxResult, SandboxUnavailable

#: Runs a program and then its tests, each of which is code that raises where the program is wrong. What passed is told,
#: line by line, on a descriptor and with a token that the program is not handed: printing cannot claim success. The
#: program is run as a module that is imported, so that one which as a script would read its input, or end itself, gets
#: to its tests; those are run as a script, since a guard of theirs holds what they check.
HARNESS = """\
import json, os, sys, types
with open("case.json") as _file:
    _case = json.load(_file)
os.unlink("case.json")
def _run(case, tell=os.write, to=os.dup(1)):
    sys.modules["answer"] = module = types.ModuleType("answer")
    names = vars(module)
    token, tests = case.pop("token"), case.pop("tests")
    exec(compile(case.pop("program"), "answer.py", "exec"), names)
    names["__name__"] = "__main__"
    for at, test in enumerate(tests):
        try:
            exec(compile(test, f"test {at}", "exec"), names)
        except BaseException as error:
            print(f"test {at}: {type(error).__name__}: {error}", file=__import__("sys").stderr)
        else:
            tell(to, f"\\n{token} {at}\\n".encode())
_run(_case)
"""
#: Characters of a program's error output that are kept with a score.
TAIL = 400


class Checks(list[str]):
    """Tests that are code, which raises where the program is wrong."""


class Exchanges(list[tuple[str, str]]):
    """Tests that are pairs of what a program reads and what it has to print."""


@rule("unit_tests")
class UnitTests(Rule):
    """The share of tests that the answer's Python program passes; without `partial`, 1 where it passes all.

    The tests are the ground truth: code that raises (`assert f(2) == 4`), one text or a list; `{"test": ...,
    "entry_point": ...}` as in HumanEval; or inputs and outputs, `{"inputs": [...], "outputs": [...]}` or a list of
    `{"input": ..., "output": ...}`, for which the program is run once each with an input on stdin. Any of it may be
    JSON text. Where tests are code, the program is imported: what it does `if __name__ == "__main__":` is left out.
    """

    place: ClassVar[Place] = "thread"

    partial: bool = Field(False, description="the share of tests that pass, in place of all or nothing")
    fenced: bool = Field(True, description="the program is the answer's last fenced block; an answer without one is 0")
    before: str = Field("", description="code that stands before the answer's program, such as imports")
    limits: SandboxLimits = Field(default_factory=lambda: SandboxLimits(), description="what a program may use up")
    readable: list[Path] = Field([], description="further paths that a program may read, such as data")
    trusted: bool = Field(False, description="run programs also where this machine's Linux cannot confine them")

    _sandbox: Sandbox = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        self._sandbox = Sandbox(self.limits, readable=self.readable, trusted=self.trusted)

    def ready(self) -> None:
        try:
            self._sandbox.run("")
        except SandboxUnavailable as error:
            raise InvalidInput(f"unit_tests: {error}") from error

    def close(self) -> None:
        self._sandbox.close()

    def score(self, sample: Sample) -> Score:
        tests = read_tests(truth_of(sample))
        text = behind_thoughts(sample.text)
        program = last_block(text) if self.fenced else text
        if program is None:
            return Score(0.0, info={"tests": "the answer has no fenced block"})
        program = f"{self.before}\n{program}" if self.before else program
        try:
            if isinstance(tests, Checks):
                passed, result = self._checked(self._sandbox, program, tests)
            else:
                passed, result = self._exchanged(self._sandbox, program, tests)
        except SandboxUnavailable as error:
            raise RewardFailure(str(error), "unavailable", again=error.again) from error
        share = passed / len(tests)
        info = {"tests": f"{passed} of {len(tests)}", "ended": result.ended}
        if share < 1 and result.stderr.strip():
            info["stderr"] = result.stderr.strip()[-TAIL:]
        return Score(share if self.partial else float(share == 1), {"passed": share}, info)

    def _checked(self, sandbox: Sandbox, program: str, tests: Checks) -> tuple[int, SandboxResult]:
        token = secrets.token_hex(16)
        case = json.dumps({"program": program, "tests": tests, "token": token})
        result = sandbox.run(HARNESS, files={"case.json": case})
        told = {line.split()[1] for line in result.stdout.splitlines() if line.startswith(f"{token} ")}
        return len(told & {str(at) for at in range(len(tests))}), result

    def _exchanged(self, sandbox: Sandbox, program: str, tests: Exchanges) -> tuple[int, SandboxResult]:
        passed, result = 0, None
        for given, wanted in tests:
            result = sandbox.run(program, stdin=given)
            right = result.exit_code == 0 and _lines(result.stdout) == _lines(wanted)
            passed += right
            if not right and not self.partial:
                break
        assert result is not None
        return passed, result


def read_tests(truth: Any) -> Checks | Exchanges:
    """The tests that a ground truth holds, at least one; raises `RewardFailure` where it holds none."""
    if isinstance(truth, str):
        try:
            read = json.loads(truth)
        except ValueError:
            read = None
        truth = read if isinstance(read, list | dict) else [truth]
    if isinstance(truth, Mapping):
        if {"test", "entry_point"} <= truth.keys():
            return Checks([f"{truth['test']}\ncheck({truth['entry_point']})"])
        if {"inputs", "outputs"} <= truth.keys() and len(truth["inputs"]) == len(truth["outputs"]) > 0:
            pairs = zip(truth["inputs"], truth["outputs"], strict=True)
            return Exchanges((str(given), str(wanted)) for given, wanted in pairs)
    if isinstance(truth, Sequence) and truth:
        if all(isinstance(test, str) for test in truth):
            return Checks(str(test) for test in truth)
        if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in truth):
            return Exchanges((str(test["input"]), str(test["output"])) for test in truth)
    raise RewardFailure(
        f"the ground truth holds no tests: code, or inputs and outputs, are expected, not {shown(truth)}", again=False
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
