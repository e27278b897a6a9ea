"""The targets of make, and the tiers of tests: there is no test that no target runs."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests import tiers

ROOT = Path(__file__).parents[1]
#: As if everything were installed.
DRY = ["make", "--dry-run", "--old-file=.venv/.setup-done"]


@dataclass(frozen=True)
class Target:
    """The tiers that it asks for, the marker that it selects by, and the files and folders that it names."""

    asks: frozenset[str]
    marker: str | None
    paths: list[Path]

    def runs(self, file: str, takes: frozenset[str]) -> bool:
        """Whether it runs a file's tests of these tiers."""
        found = any(Path(file).is_relative_to(path) for path in self.paths)
        return found and takes <= self.asks and self.marker in {None, *takes}


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    """The targets that run tests, by name."""
    names = re.findall(r"^(test[a-z-]*): setup", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {name: target for name in names if (target := _target(name)) is not None}


def _target(name: str) -> Target | None:
    dry = subprocess.run([*DRY, name], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in dry.splitlines() if ".venv/bin/" in line]
    if "pytest" not in line:
        return None
    echo = ["sh", "-c", f"echo {line}"]
    words = subprocess.run(echo, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    asks = frozenset(tier.name for tier in tiers.TIERS if f"{tier.variable}=1" in words)
    marker = words[words.index("-m") + 1] if "-m" in words else None
    paths = [Path(word) for word in words if word.startswith("tests/")]
    return Target(asks, marker, paths or [Path("tests")])


def test_every_test_is_run_by_a_target(targets: dict[str, Target], request: pytest.FixtureRequest) -> None:
    """Of the tests that were collected in this run."""
    for file, kinds in request.config.stash[tiers.TIERS_OF_FILES].items():
        for takes in kinds:
            # The long tier's variable may be set before any target.
            beside = takes - {tiers.LONG.name} or takes
            found = any(target.runs(file, takes) or target.runs(file, beside) for target in targets.values())
            assert found, f"no target of make runs the tests of {file} that are of {sorted(takes)}"


def test_a_target_asks_for_the_tier_of_its_name(targets: dict[str, Target]) -> None:
    for tier in tiers.TIERS:
        assert tier.name in targets[f"test-{tier.name}"].asks
