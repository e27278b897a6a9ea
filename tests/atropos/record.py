"""The original's answers to every scenario, as a file that tests without it compare with.

python -m tests.atropos.record    # plays them against the real one, and writes the file anew
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.atropos.player import Answer, play
from tests.atropos.scenarios import SCENARIOS
from tests.atropos.server import original
from tests.venvs import ATROPOS

PATH = Path(__file__).parent / "recorded" / f"{ATROPOS.wheel}.json".replace("==", "-")


def recorded() -> dict[str, dict[str, Answer]]:
    """By scenario and the number and key of the call, in order."""
    found: dict[str, dict[str, dict[str, object]]] = json.loads(PATH.read_text())
    return {name: {key: Answer.read(one) for key, one in calls.items()} for name, calls in found.items()}


def answers_of(scenario_name: str) -> list[Answer]:
    return list(recorded()[scenario_name].values())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for scenario in SCENARIOS:
            with original(Path(folder) / "atropos.log") as address:
                answers = play(address, scenario)
            found[scenario.name] = {
                f"{n} {call.key}": answer for n, (call, answer) in enumerate(zip(scenario.calls, answers, strict=True))
            }
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(_laid_out(found))


def _laid_out(found: dict[str, dict[str, Answer]]) -> str:
    """A line for an answer, so that a change is read where it is."""
    scenarios = (
        f"{json.dumps(name)}: {{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(vars(a))}" for k, a in calls.items())
        for name, calls in found.items()
    )
    return "{\n" + "\n},\n".join(scenarios) + "\n}\n}\n"


if __name__ == "__main__":
    main()
