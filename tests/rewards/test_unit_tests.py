"""The rule `unit_tests`: what a program is worth by its tests."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from headrace.rewards import RewardFailure, Sample, Score
from headrace.rewards.rules import made
from headrace.rewards.unit_tests import read_tests

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux'")

SQUARE = "Here:\n```python\ndef f(x):\n    print('noise')\n    return x * x\n```\n"
ASSERTS = ["assert f(2) == 4", "assert f(3) == 10"]
#: What a program does as a script alone.
GUARD = "if __name__ == '__main__':"
PLAIN = "def f(x): return x * x"
#: A dataclass looks its annotations up in the module that it says it is from, and pickle the class.
IN_ITS_MODULE = """```
import pickle
from dataclasses import dataclass

@dataclass
class Square:
    side: "int"

def f(x):
    return pickle.loads(pickle.dumps(Square(x))).side ** 2
```"""
DOUBLE = "```\nprint(int(input()) * 2)\n```"
LIMITS = {"cpu_s": 1, "wall_s": 120}


def scored(text: str, truth: Any, **options: Any) -> Score:
    found = made("unit_tests", {"limits": LIMITS, **options}).score(Sample(text=text, ground_truth=truth))
    assert isinstance(found, Score)
    return found


@pytest.mark.parametrize(
    ("text", "truth", "options", "wanted"),
    [
        (SQUARE, ASSERTS[:1], {}, 1.0),
        (SQUARE, "assert f(2) == 4\nassert f(-1) == 1", {}, 1.0),
        (SQUARE, ASSERTS, {}, 0.0),
        (SQUARE, ASSERTS, {"partial": True}, 0.5),
        (SQUARE, {"test": "def check(g):\n    assert g(3) == 9", "entry_point": "f"}, {}, 1.0),
        (DOUBLE, {"inputs": ["1", "4\n"], "outputs": ["2", " 8 \n"]}, {}, 1.0),
        (DOUBLE, '[{"input": "1", "output": "2"}, {"input": "1", "output": "3"}]', {"partial": True}, 0.5),
        ("def f(x): return 4", ASSERTS[:1], {}, 0.0),
        ("def f(x): return 4", ASSERTS[:1], {"fenced": False}, 1.0),
        ("```\ndef f(x): return math.floor(4.5)\n```", ASSERTS[:1], {"before": "import math"}, 1.0),
        ("```\nthis is no Python\n```", ASSERTS, {}, 0.0),
        ("```\nimport os\nos._exit(0)\n```", ASSERTS, {"partial": True}, 0.0),
        ("```\nimport sys\nsys.exit(0)\n```", ASSERTS, {"partial": True}, 0.0),
        ("```\nprint('0')\nprint('1')\n```", ASSERTS, {"partial": True}, 0.0),
        (f"```\n{PLAIN}\n{GUARD}\n    import sys\n    sys.exit(f(2))\n```", ASSERTS[:1], {}, 1.0),
        (f"```\n{PLAIN}\n{GUARD}\n    import unittest\n    unittest.main()\n```", ASSERTS[:1], {}, 1.0),
        (f"```\n{PLAIN}\n{GUARD}\n    print(f(int(input())))\n```", ASSERTS[:1], {}, 1.0),
        (f"```\n{PLAIN}\n{GUARD}\n    print(f(int(input())))\n```", {"inputs": ["3"], "outputs": ["9"]}, {}, 1.0),
        (IN_ITS_MODULE, ASSERTS[:1], {}, 1.0),
        (SQUARE, f"{GUARD}\n    assert f(2) == 5", {}, 0.0),
    ],
)
def test_programs(text: str, truth: Any, options: dict[str, Any], wanted: float) -> None:
    assert scored(text, truth, **options).value == wanted


def test_tests_that_passed_count_where_a_later_one_never_ends() -> None:
    text = "```\ndef f(x):\n    while x != 2: pass\n    return 4\n```"
    found = scored(text, ASSERTS, partial=True)
    assert found.value == 0.5
    assert found.info["ended"] == "cpu"


def test_the_reason_is_told() -> None:
    found = scored("```\ndef f(x): return nothing\n```", ASSERTS)
    assert found.info["tests"] == "0 of 2"
    assert "NameError: name 'nothing' is not defined" in found.info["stderr"]


@pytest.mark.parametrize("truth", [7, [], {}, [1, 2], {"inputs": ["1"], "outputs": []}])
def test_a_ground_truth_without_tests_is_a_failure(truth: Any) -> None:
    with pytest.raises(RewardFailure, match="holds no tests"):
        read_tests(truth)
