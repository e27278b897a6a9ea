"""A process that says whether answers are right: a line of JSON in, `true` or `false` out.

Run by `checker`, as a script: it imports nothing of ours. What a model wrote may keep sympy busy for ever or fill the
memory, inside calls that no signal handler of Python's interrupts. So each check may use so many seconds of this
process's processor time, and the kernel ends the process that uses more.
"""

from __future__ import annotations

import json
import logging
import math
import re
import resource
import sys
from typing import Any

MEMORY = 4 << 30
THOUGHT = "</think>"
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*\.?")


def is_right(said: str, gold: str) -> bool:
    """Mathematics by math-verify; an answer in words by its words, since it would take `Paris` for a product."""
    said = said.rsplit(THOUGHT, 1)[-1]
    if WORDS.fullmatch(gold.strip()):
        boxed = BOXED.findall(said)
        return _plain(boxed[-1] if boxed else said) == _plain(gold)
    from math_verify import parse, verify

    boxed_gold = gold if "\\boxed" in gold or "$" in gold else f"\\boxed{{{gold}}}"
    right = parse(boxed_gold, parsing_timeout=None)
    found = parse(said, parsing_timeout=None)
    return bool(right and found and verify(right, found, timeout_seconds=None))


def _plain(text: str) -> str:
    return " ".join(text.casefold().strip().rstrip(".").split())


def main(seconds: int) -> None:
    """Answers each line of stdin, `{said, gold}` as JSON, with true or false. A check that takes more than so many
    seconds of CPU ends the process; one that runs out of memory is false.
    """
    logging.disable(logging.CRITICAL)  # math-verify warns that nothing bounds it: the kernel does
    sys.set_int_max_str_digits(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    is_right("1", "1")  # what every check loads and compiles takes its time now, and not from the first one's
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = math.ceil(used.ru_utime + used.ru_stime) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            right = is_right(asked["said"], asked["gold"])
        except Exception:  # parsers and sympy raise anything over what models write: it is no right answer
            right = False
        print(json.dumps(right), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
