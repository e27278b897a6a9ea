"""What a conversation is worth: the right answer, and a little for each thing on the way to it.

tried    0.1    the model's first answer begins a tool call
worked   0.2    the calculator was asked, and gave a number
right    0.7    the last number of the last answer is the right one, however it was come by
"""

from __future__ import annotations

import re

from headrace.rewards import Sample, Score

WEIGHTS = {"tried": 0.1, "worked": 0.2, "right": 0.7}
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(sample: Sample) -> Score:
    """The weighted sum of the parts, each 1 or 0. The examples, which stand before the question, count for nothing."""
    asked = max(at for at, message in enumerate(sample.messages) if message["role"] == "user")
    played = sample.messages[asked + 1 :]
    results = [str(message["content"]) for message in played if message["role"] == "tool"]
    parts = {
        "tried": bool(results) or "<tool_call>" in str(played[0]["content"]),
        "worked": any(NUMBER.fullmatch(result) for result in results),
        "right": last_number(sample.text) == sample.ground_truth,
    }
    found = {name: float(met) for name, met in parts.items()}
    return Score(sum(WEIGHTS[name] * value for name, value in found.items()), found)


def last_number(text: str) -> str | None:
    """The last number of a text, without the commas of its thousands; of a call that was not made, none."""
    numbers = NUMBER.findall(text) if "<tool_call>" not in text else []
    return numbers[-1].replace(",", "") if numbers else None
