"""Tests that run only where they are asked for: each tier has a variable (`HEADRACE_VLLM=1`) and a target of make.

A tier's tests are those of its folders, of these only the ones that use one of its fixtures where it names some, and
any test that has its marker, or another that it names. Where a tier is not asked for, its tests are deselected.

The system tier has what starts whole systems as their users do, from the command line to a trained model: the demo,
runs, examples, the blocks of the documentation, the benchmarks; and everything that starts a Ray cluster. It needs
nothing that `make test` has not.

The long tier has what shows more of a claim that the others show once: learning curves of every kind of project, runs
on clusters of several nodes, everything of a demo that can be killed, the pool's conformance over Ray, combinations of
a table's values (`tests/matrix.py`), gateways of several processes, a vLLM for images and one for adapters, most model
families, and every property with ten times the examples. It alone has what takes minutes to show once: that
a vLLM on the CPU takes images and adapters, that a new project learns, that Ray Train's workers go on after a death,
and the pages that train. What is of another tier too runs where both are asked for (`HEADRACE_LONG=1 make test-vllm`),
and everything under `HEADRACE_LONG=1 .ci/run`, which a release must pass.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test
from tests import venvs

ROOT = Path(__file__).parent
#: Seconds for a test of a tier that installs something: the first one may wait for it.
INSTALLING_S = 1800


@dataclass(frozen=True)
class Tier:
    """`needs` is what its tests take that others do not."""

    name: str
    needs: str
    folders: tuple[str, ...] = ()
    fixtures: frozenset[str] = frozenset()
    markers: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        return f"HEADRACE_{self.name.upper()}"

    @property
    def asked_for(self) -> bool:
        return os.environ.get(self.variable, "0") not in ("", "0")

    def has(self, item: pytest.Item) -> bool:
        """Whether a test is of this tier."""
        if any(item.get_closest_marker(name) for name in (self.name, *self.markers)):
            return True
        if _capability(item.path) not in self.folders:
            return False
        return not self.fixtures or bool(self.fixtures & {*getattr(item, "fixturenames", ())})


@cache
def _capability(path: Path) -> str:
    """The name of the folder of tests that a file is in."""
    return path.relative_to(ROOT).parts[0] if path.is_relative_to(ROOT) else ""


SYSTEM = Tier("system", "starts whole systems as a user does, or a Ray cluster", markers=("ray",))
LONG = Tier("long", "statistical or exhaustive, or takes minutes to show once")

#: The files that were collected, with the tiers of their tests, where these are of any.
TIERS_OF_FILES = pytest.StashKey[dict[str, set[frozenset[str]]]]()

TIERS = (
    Tier("vllm", "starts a real vLLM on the CPU", ("vllm",)),
    Tier("verl", "needs a real verl", ("verl",)),
    Tier("atropos", "needs the real atroposlib", ("atropos", "compat"), frozenset({"fresh", "atropos"})),
    Tier("agents", "runs command-line agents from npm", ("agents",)),
    Tier("install", "installs a built wheel into clean environments", ("install",), frozenset({"built", "uv"})),
    Tier("models", "fetches models' tokenizers and chat templates", ("models",)),
    Tier("dashboard", "drives Chromium with playwright", ("dashboard",), frozenset({"browser"})),
    Tier("gym", "needs the real reasoning-gym"),
    SYSTEM,
    LONG,
)


def declare(config: pytest.Config) -> None:
    """Makes the tiers' markers known."""
    for tier in TIERS:
        config.addinivalue_line("markers", f"{tier.name}: {tier.needs} (make test-{tier.name})")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of each tier, and takes those out that were not asked for. To the long tier belongs
    every property too, for more examples."""
    if LONG.asked_for:
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker(LONG.name)
    of_files = config.stash.setdefault(TIERS_OF_FILES, {})
    left_out = []
    for item in items:
        if not (tiers := [tier for tier in TIERS if tier.has(item)]):
            continue
        for tier in tiers:
            item.add_marker(tier.name)
            if tier.folders:
                item.add_marker(pytest.mark.timeout(INSTALLING_S))
        file = item.path.relative_to(ROOT.parent).as_posix()
        of_files.setdefault(file, set()).add(frozenset(tier.name for tier in tiers))
        if not all(tier.asked_for for tier in tiers):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    _provide_gym([item for item in items if item.get_closest_marker("gym")])


def _provide_gym(items: list[pytest.Item]) -> None:
    """Tests with reasoning-gym run in this process, which finds the package in its environment."""
    if not items:
        return
    if reason := venvs.gym_lacks():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))
    else:
        venvs.provide_gym()
