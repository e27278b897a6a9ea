"""The demo's policy: a two-layer Llama of width 96 with random weights, whose vocabulary is the sixteen words of its
games (`headrace.engine.words`). A word is a token, so that a guess is one call of one token.

    python -m headrace.demo.model FOLDER --seed 0

writes it, for a vLLM to serve.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from headrace.engine import words

WORDS = ("guess", "higher", "lower", "1", "2", "3", "4", "5", "6")


def build(into: Path, seed: int = 0) -> Path:
    """Writes the checkpoint, complete or not at all; one that exists is left as it is."""
    return words.build(into, WORDS, seed)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace.demo.model", description="Writes the demo's checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(args)
    print(build(given.folder, given.seed))


if __name__ == "__main__":
    main()
