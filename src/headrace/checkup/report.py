"""The report of a checkup: its findings, and the verdict they amount to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """`ok`: as a trainer needs it. `note`: worth knowing, no obstacle. `bad`: not to be trained on as it is."""

    OK = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report: `cause` is a name for programs, `said` a sentence for people."""

    check: str
    dialect: str
    verdict: Verdict
    cause: str
    said: str


def ok(check: str, dialect: str, cause: str, said: str) -> Finding:
    """A finding with the verdict `ok`."""
    return Finding(check, dialect, Verdict.OK, cause, said)


def note(check: str, dialect: str, cause: str, said: str) -> Finding:
    """A finding with the verdict `note`."""
    return Finding(check, dialect, Verdict.NOTE, cause, said)


def bad(check: str, dialect: str, cause: str, said: str) -> Finding:
    """A finding with the verdict `bad`."""
    return Finding(check, dialect, Verdict.BAD, cause, said)


@dataclass(slots=True)
class CheckReport:
    """All findings about one server."""

    url: str
    kind: str
    model: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether what it samples can be trained on, token for token: its ids are known and nothing is bad."""
        told = any((finding.check, finding.verdict) == ("ids", Verdict.OK) for finding in self.findings)
        return told and all(finding.verdict != Verdict.BAD for finding in self.findings)

    def causes(self, check: str, verdict: Verdict = Verdict.BAD) -> list[str]:
        """The causes of a check's findings with this verdict, each once."""
        found = [each.cause for each in self.findings if (each.check, each.verdict) == (check, verdict)]
        return list(dict.fromkeys(found))

    def as_dict(self) -> dict[str, Any]:
        """The report as `--json` prints it."""
        return {
            "url": self.url,
            "kind": self.kind,
            "model": self.model,
            "exact": self.exact,
            "findings": [asdict(finding) for finding in self.findings],
        }
