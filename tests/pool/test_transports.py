"""What `make test` runs over Ray is named in one place, and what is named there exists."""

from __future__ import annotations

from pathlib import Path

from tests.pool.conftest import OVER_RAY


def test_what_always_runs_over_every_transport_is_in_the_conformance_suite() -> None:
    suite = "\n".join(path.read_text() for path in Path(__file__).parent.rglob("test_conformance_*.py"))
    assert [name for name in sorted(OVER_RAY) if f"def {name}(" not in suite] == []
