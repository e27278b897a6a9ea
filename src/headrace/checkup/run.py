"""Runs every check in every dialect that a server has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.checkup.answer import CheckRequest, DialectClient, Malformed
from headrace.checkup.checks import CHECKS, Check
from headrace.checkup.dialects import DIALECTS
from headrace.checkup.report import CheckReport, Finding, Verdict, bad, note, ok
from headrace.checkup.target import (
    NO_ROUTE_STATUSES,
    CallRefused,
    CheckHttp,
    CheckTarget,
    OutOfReach,
    Subject,
    TokenReader,
)

#: The channel in which a gateway records a checkup's calls: no trainer takes batches from it.
CHECKUP_CHANNEL = "checkup"
#: Seconds that one answer may take: the first one of a server that has just started can be slow.
ANSWER_TIMEOUT_S = 120.0


async def checkup(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    admin_key: str | None = None,
    dialects: Sequence[str] = tuple(DIALECTS),
    tokenizer: Path | None = None,
    channel: str = CHECKUP_CHANNEL,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> CheckReport:
    """Runs every check in every dialect that the server at `url` has. Raises `OutOfReach` where it answers in none."""
    async with CheckHttp(api_key, timeout_s) as http:
        target = CheckTarget(http, url, model=model, channel=channel, admin_key=admin_key)
        await target.find()
        report = CheckReport(target.url, target.kind, target.model)
        reader = TokenReader(target, tokenizer)
        there: list[DialectClient] = []
        for name in dialects:
            finding = await _present(Subject(target, DIALECTS[name], reader))
            report.findings.append(finding)
            if finding.cause == "there":
                there.append(DIALECTS[name])
        if all(finding.verdict == Verdict.NOTE for finding in report.findings):
            said = "; ".join(f"{finding.dialect}: {finding.said}" for finding in report.findings)
            raise OutOfReach(f"{target.url} answers in no dialect ({said})")
        completions = DIALECTS["completions"] in there
        for dialect in there:
            subject = Subject(target, dialect, reader, completions)
            for check_name, check in CHECKS.items():
                report.findings += await _checked(check_name, check, subject)
        return report


async def _present(on: Subject) -> Finding:
    name = on.dialect.name
    try:
        await on.once(CheckRequest(on.question, max_tokens=1))
    except CallRefused as error:
        if error.status in NO_ROUTE_STATUSES:
            return note("dialect", name, "absent", "not offered")
        return note("dialect", name, "refused", str(error))
    except Malformed as error:
        return bad("dialect", name, "malformed", str(error))
    return ok("dialect", name, "there", on.dialect.path)


async def _checked(name: str, check: Check, on: Subject) -> list[Finding]:
    """A check's findings; a call that fails is a finding too."""
    try:
        return await check(on)
    except CallRefused as error:
        return [bad(name, on.dialect.name, "refused", f"a call is answered {error}")]
    except Malformed as error:
        return [bad(name, on.dialect.name, "malformed", str(error))]
    except OutOfReach as error:
        return [bad(name, on.dialect.name, "no_answer", str(error))]
