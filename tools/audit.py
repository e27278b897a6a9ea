"""What is installed, and what is known against it: `make audit` calls this.

It writes a CycloneDX SBOM of the environment that it runs in (every distribution with its version, its licence and what
it needs), and asks pip-audit which of them have known vulnerabilities. pip-audit is installed once into the user's
cache, so that it is no part of what it looks at. It asks an advisory service on the internet: where it cannot be
installed, or the service cannot be reached, that is said, and the SBOM is still there. Exit status: 1 where something
is known, 2 with `--strict` where nobody could be asked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import uuid
import venv
from collections.abc import Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

SPEC_VERSION = "1.5"
#: The distribution that the SBOM is about.
SUBJECT = "headrace"
#: Seconds that an installation, or an audit of some two hundred distributions, may take.
PATIENCE_S = 600
#: What a requirement begins with: its distribution's name.
NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(.*)")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sbom", type=Path, default=Path("sbom.json"), help="where the SBOM goes")
    parser.add_argument("--strict", action="store_true", help="fail where no advisory service can be asked")
    parser.add_argument("--pip-audit", help="a pip-audit that is there, in place of one in the user's cache")
    given = parser.parse_args(arguments)
    found = sbom()
    given.sbom.write_text(json.dumps(found, indent=2) + "\n")
    print(f"{given.sbom}: {len(found['components'])} distributions, CycloneDX {SPEC_VERSION}")
    try:
        known, unknown = audited(found, [given.pip_audit] if given.pip_audit else own_pip_audit())
    except Unaudited as error:
        print(f"Not audited: {error}. Nothing is said about vulnerabilities; run it where the service can be reached.")
        return 2 if given.strict else 0
    for line in known:
        print(line)
    print(f"pip-audit: {len(known)} known vulnerabilities")
    if unknown:
        print(f"Not audited, since its service does not know them: {', '.join(unknown)}")
    return 1 if known else 2 if unknown and given.strict else 0


# -- what is installed -------------------------------------------------------------------------------------------------


def sbom() -> dict[str, Any]:
    """The environment as a CycloneDX document: the same one for the same environment, but for its serial number."""
    there = {normal(each.metadata["Name"]): each for each in distributions() if each.metadata["Name"]}
    components = {name: component(name, each) for name, each in sorted(there.items())}
    subject = components.pop(SUBJECT, {"type": "application", "name": SUBJECT, "bom-ref": SUBJECT})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {"component": {**subject, "type": "application"}},
        "components": list(components.values()),
        "dependencies": [
            {
                "ref": reference(each),
                "dependsOn": sorted({reference(there[name]) for name in needs(each) & there.keys()}),
            }
            for _, each in sorted(there.items())
        ],
    }


def component(name: str, each: Distribution) -> dict[str, Any]:
    """One distribution of the document."""
    found: dict[str, Any] = {"type": "library", "bom-ref": reference(each), "name": name, "version": each.version}
    found["purl"] = reference(each)
    licence = each.metadata.get("License-Expression") or each.metadata.get("License") or ""
    if licence and "\n" not in licence and len(licence) < 100:
        found["licenses"] = [{"license": {"name": licence}}]
    return found


def reference(each: Distribution) -> str:
    """A distribution's package URL, by which the document refers to it too."""
    return f"pkg:pypi/{normal(each.metadata['Name'])}@{each.version}"


def normal(name: str) -> str:
    """A name as package indexes compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needs(each: Distribution) -> set[str]:
    """The names that a distribution requires, by itself or for an extra."""
    found = (NAME.match(line) for line in each.requires or ())
    return {normal(match[1]) for match in found if match is not None}


# -- what is known -----------------------------------------------------------------------------------------------------


class Unaudited(Exception):
    """Nobody could be asked; why not."""


def own_pip_audit() -> list[str]:
    """The command of a pip-audit in the user's cache, installed where it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "venvs" / "pip-audit"
    command = cache / "bin" / "pip-audit"
    if not command.exists():
        print(f"installing pip-audit into {cache}")
        try:
            venv.create(cache, with_pip=True, clear=True)
            asked([str(cache / "bin" / "python"), "-m", "pip", "install", "--quiet", "pip-audit"])
        except (OSError, subprocess.SubprocessError) as error:
            raise Unaudited(f"pip-audit cannot be installed ({last_line(error)})") from None
    return [str(command)]


def audited(document: dict[str, Any], command: list[str]) -> tuple[list[str], list[str]]:
    """What is known against the components of a document, a line each, and the names of those that the service does not
    know. `Unaudited` where nobody answers, or knows any: a mirror of the index has no advisories."""
    with tempfile.TemporaryDirectory() as folder:
        pinned = Path(folder) / "requirements.txt"
        # A local version (2.13.0+cpu) is no release of the index's; the one that it was made of is.
        lines = [f"{each['name']}=={each['version'].partition('+')[0]}" for each in document["components"]]
        pinned.write_text("\n".join(lines) + "\n")
        options = [
            "--requirement",
            str(pinned),
            "--no-deps",
            "--disable-pip",
            "--format",
            "json",
            "--progress-spinner",
            "off",
        ]
        try:
            said = asked([*command, *options], allowed=(0, 1))
            found = json.loads(said)["dependencies"]
        except (OSError, subprocess.SubprocessError) as error:
            raise Unaudited(f"pip-audit failed ({last_line(error)})") from None
        except (ValueError, KeyError, TypeError):
            raise Unaudited("pip-audit could not ask its advisory service") from None
    unknown = [each["name"] for each in found if "skip_reason" in each]
    if found and len(unknown) == len(found):
        raise Unaudited(f"the service that pip-audit reaches knows none of them ({found[0]['skip_reason']})")
    known = [
        f"{each['name']} {each['version']}: {flaw['id']}, mended in {', '.join(flaw['fix_versions']) or 'no release'}"
        for each in found
        for flaw in each.get("vulns", ())
    ]
    return known, unknown


def asked(command: list[str], allowed: Sequence[int] = (0,)) -> str:
    """What a command prints; `SubprocessError` where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode not in allowed:
        raise subprocess.CalledProcessError(done.returncode, command[0], done.stdout, done.stderr)
    return done.stdout


def last_line(error: Exception) -> str:
    """The last words of a command that failed, or the error's own."""
    said = str(getattr(error, "stderr", None) or error).strip().splitlines()
    return said[-1][:300] if said else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
