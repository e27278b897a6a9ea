"""The documentation's site: every page and link of it is there, and it needs neither a network nor a server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import PAGES, ROOT

pytestmark = pytest.mark.system

#: What a page loads by itself: scripts, styles, images, frames.
LOADED = re.compile(r'<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)="?(https?:[^"\s>]+)')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it; a page without a place, or a link that leads nowhere, is an error there."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={"PATH": str(Path(sys.executable).parent), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_it_has_every_page(site: Path) -> None:
    names = {"index" if page.name == "README.md" else page.stem for page in PAGES}
    assert {f"{name}.html" for name in names} <= {path.name for path in site.glob("*.html")}


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    assert {page.name: found for page in pages if (found := LOADED.findall(page.read_text()))} == {}


def test_the_reference_has_the_pools_calls(site: Path) -> None:
    text = (site / "reference" / "headrace.html").read_text()
    calls = ("submit_steps", "fetch_batch", "complete", "stats")
    assert all(f'id="headrace.DataPool.{call}"' in text for call in calls)
