"""What a checkup found: one finding a line, and the verdict that all of them come to."""

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
    """One line of a report: `cause` is a name for programs, `said` the same for people."""

    check: str
    dialect: str
    verdict: Verdict
    cause: str
    said: str


def ok(check: str, dialect: str, cause: str, said: str) -> Finding:
    return Finding(check, dialect, Verdict.OK, cause, said)


def note(check: str, dialect: str, cause: str, said: str) -> Finding:
    return Finding(check, dialect, Verdict.NOTE, cause, said)


def bad(check: str, dialect: str, cause: str, said: str) -> Finding:
    return Finding(check, dialect, Verdict.BAD, cause, said)


@dataclass(slots=True)
class CheckReport:
    """All findings about one server. `exact`: what it samples can be trained on, token for token, as was seen."""

    url: str
    kind: str
    model: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        told = any((finding.check, finding.verdict) == ("ids", Verdict.OK) for finding in self.findings)
        return told and all(finding.verdict != Verdict.BAD for finding in self.findings)

    def causes(self, check: str, verdict: Verdict = Verdict.BAD) -> list[str]:
        """What a check found of a verdict, each cause once."""
        found = [each.cause for each in self.findings if (each.check, each.verdict) == (check, verdict)]
        return list(dict.fromkeys(found))

    def as_dict(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "kind": self.kind,
            "model": self.model,
            "exact": self.exact,
            "findings": [asdict(finding) for finding in self.findings],
        }
