"""The data: word problems with numbers of two and three digits, which a model of this size cannot work out by itself.

    python examples/smollm2/data.py        # train.jsonl and val.jsonl, beside this file

The same rows every time. A problem that is held out never comes up in training, and is worded in ways that do: what is
held out are the numbers.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
TRAIN, VAL = 6_000, 300
#: Ways to ask, by what is to be calculated.
WORDS = {
    "sum": [
        "What is {a} + {b}?",
        "A farm has {a} hens and {b} ducks. How many birds are there?",
        "Sam walked {a} steps in the morning and {b} in the evening. How many steps did he walk?",
    ],
    "difference": [
        "What is {a} - {b}?",
        "Ann had {a} coins and gave away {b} of them. How many coins has she left?",
        "A book has {a} pages. Eve has read {b} of them. How many pages are left?",
    ],
    "product": [
        "What is {a} times {c}?",
        "A box holds {c} pens. How many pens are in {a} boxes?",
        "A ticket costs {c} dollars. What do {a} tickets cost?",
    ],
    "two steps": [
        "A shop had {a} apples. It got {b} more and sold {c}. How many apples has it now?",
        "{a} children and {b} adults each pay {c} dollars. How many dollars are paid?",
    ],
}


def problem(rng: random.Random) -> dict[str, str]:
    """A row: what is asked, what kind of problem it is, and the answer, which agents are not shown."""
    kind = rng.choice(list(WORDS))
    a, b = sorted((rng.randint(100, 999), rng.randint(100, 999)), reverse=True)
    c = rng.randint(12, 99)
    wording = rng.choice(WORDS[kind])
    answers = {"sum": a + b, "difference": a - b, "product": a * c}
    answers["two steps"] = a + b - c if "apples" in wording else (a + b) * c
    return {"question": wording.format(a=a, b=b, c=c), "kind": kind, "ground_truth": str(answers[kind])}


def rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The rows to learn from and those to validate with, all different."""
    rng, found = random.Random(17), {}
    while len(found) < TRAIN + VAL:
        row = problem(rng)
        found[row["question"]] = row
    every = list(found.values())
    return every[VAL:], every[:VAL]


def main() -> None:
    for name, part in zip(("train.jsonl", "val.jsonl"), rows(), strict=True):
        (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{HERE / name}: {len(part)} rows")


if __name__ == "__main__":
    main()
