"""`make audit`: an SBOM of what is installed, and what is known against it, where somebody can be asked."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest

from headrace.files import import_file

ROOT = Path(__file__).parents[1]
audit: Any = import_file(ROOT / "tools" / "audit.py", "headrace_tools_audit")

#: Stands in for pip-audit: prints its last argument but the options, and ends as told.
FAKE = """#!{python}
import sys
print({said!r})
print("urllib3: Failed to resolve 'advisories.example'", file=sys.stderr)
sys.exit({code})
"""


@pytest.fixture(scope="module", autouse=True)
def document() -> Iterator[Any]:
    """The SBOM, made once: it reads the metadata of everything that is installed."""
    made, found = audit.sbom, audit.sbom()
    audit.sbom = lambda: found
    yield found
    audit.sbom = made


def fake(folder: Path, said: str, code: int) -> str:
    path = folder / "pip-audit"
    path.write_text(FAKE.format(python=sys.executable, said=said, code=code))
    path.chmod(0o755)
    return str(path)


def test_the_sbom_names_every_distribution_with_what_it_needs(document: Any) -> None:
    found = document
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", found["serialNumber"])
    assert found["metadata"]["component"]["name"] == "headrace"
    there = {each["name"]: each for each in found["components"]}
    assert there["msgspec"]["version"] == version("msgspec")
    assert there["msgspec"]["purl"] == f"pkg:pypi/msgspec@{version('msgspec')}"
    assert "headrace" not in there
    needed = {audit.normal(re.split(r"[^\w.-]", line)[0]) for line in requires("headrace") or () if "extra" not in line}
    assert needed <= there.keys()
    known = {each["bom-ref"] for each in found["components"]} | {found["metadata"]["component"]["bom-ref"]}
    assert len(known) == len(found["components"]) + 1
    for each in found["dependencies"]:
        assert {each["ref"], *each["dependsOn"]} <= known


def test_what_is_known_is_told_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flaw = {"id": "PYSEC-1", "fix_versions": ["2.0"]}
    said = json.dumps(
        {"dependencies": [{"name": "a", "version": "1.0", "vulns": [flaw]}, {"name": "b", "version": "1"}]}
    )
    sbom = tmp_path / "sbom.json"
    assert audit.main(["--sbom", str(sbom), "--pip-audit", fake(tmp_path, said, 1)]) == 1
    assert "a 1.0: PYSEC-1, mended in 2.0" in capsys.readouterr().out
    assert json.loads(sbom.read_text())["bomFormat"] == "CycloneDX"
    clean = json.dumps({"dependencies": [{"name": "a", "version": "1.0", "vulns": []}]})
    assert audit.main(["--sbom", str(sbom), "--pip-audit", fake(tmp_path, clean, 0), "--strict"]) == 0


#: What pip-audit says of a distribution through a mirror, which has no advisories.
SKIPPED = {"name": "a", "skip_reason": "Dependency not found"}
MIRRORED = json.dumps({"dependencies": [SKIPPED, {**SKIPPED, "name": "b"}]})


def test_what_the_service_does_not_know_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = json.dumps({"dependencies": [{"name": "b", "version": "1.0", "vulns": []}, SKIPPED]})
    given = ["--sbom", str(tmp_path / "sbom.json"), "--pip-audit", fake(tmp_path, said, 0)]
    assert (audit.main(given), audit.main([*given, "--strict"])) == (0, 2)
    assert "does not know them: a\n" in capsys.readouterr().out


@pytest.mark.parametrize(("said", "code"), [("", 1), ("", 3), ("no JSON", 0), ("[]", 0), (MIRRORED, 0)])
def test_where_nobody_can_be_asked_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str, code: int
) -> None:
    given = ["--sbom", str(tmp_path / "sbom.json"), "--pip-audit", fake(tmp_path, said, code)]
    assert audit.main(given) == 0
    assert "Not audited" in capsys.readouterr().out
    assert audit.main([*given, "--strict"]) == 2
    assert (tmp_path / "sbom.json").exists()
