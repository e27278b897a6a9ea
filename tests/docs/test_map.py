"""The map of the source (docs/architecture.md, CONTRIBUTING.md) names what is there; a name stands for one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import TopologicalSorter

import grimp
import pytest
from tests.docs.pages import ROOT

SOURCE = ROOT / "src" / "headrace"
#: A file or a folder in code marks: `pool/operations/`, `gateway/planner.py`, `tests/tiers.py`.
PATH = re.compile(r"`([\w./-]+(?:\.py|/))`")
#: Mirrors atroposlib's modules, under its names.
MIRROR = SOURCE / "compat"
#: Two ideas of one name: Atropos' message of an environment, which its users import, and that of a conversation.
SHARED = {"Message"}


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_file_that_it_names_is_there(page: str) -> None:
    named = set(PATH.findall((ROOT / page).read_text()))
    assert named, "no file is named"
    assert {path for path in named if not ((SOURCE / path).exists() or (ROOT / path).exists())} == set()


def test_every_package_is_on_the_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert {name for name in packages if f"`{name}/`" not in text} == set()


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        if MIRROR in path.parents:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: found for name, found in homes.items() if len(found) > 1 and name not in SHARED} == {}


def test_no_file_imports_itself_through_others() -> None:
    graph = grimp.build_graph("headrace")
    # Raises CycleError, with the circle; imports in functions and for types alone count too.
    TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}).prepare()
