"""What a conversation is worth: the right answer, and a little for each thing on the way to it.

tried    0.05    the model began to write a tool call
called   0.10    it wrote one that can be read
worked   0.15    the calculator could work with it, and gave a number
right    0.70    the last number of the last answer is the right one, however it was come by
"""

from __future__ import annotations

import re

from headrace.rewards import Sample, Score

WEIGHTS = {"tried": 0.05, "called": 0.1, "worked": 0.15, "right": 0.7}
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(sample: Sample) -> Score:
    """The weighted sum of the parts, each 1 or 0. The examples, which stand before the question, count for nothing."""
    asked = max(at for at, message in enumerate(sample.messages) if message["role"] == "user")
    played = sample.messages[asked + 1 :]
    answers = [message for message in played if message["role"] == "assistant"]
    results = [str(message["content"]) for message in played if message["role"] == "tool"]
    called = any(message.get("tool_calls") for message in answers)
    parts = {
        "tried": called or any("<tool_call>" in str(message["content"]) for message in answers),
        "called": called,
        "worked": any(NUMBER.fullmatch(result) for result in results),
        "right": last_number(sample.text) == sample.ground_truth,
    }
    found = {name: float(met) for name, met in parts.items()}
    return Score(sum(WEIGHTS[name] * value for name, value in found.items()), found)


def last_number(text: str) -> str | None:
    """The last number of a text, without the commas of its thousands; of a call that was not made, none."""
    numbers = NUMBER.findall(text) if "<tool_call>" not in text else []
    return numbers[-1].replace(",", "") if numbers else None
