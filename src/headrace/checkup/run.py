"""A checkup: every check in every dialect that is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.checkup.answer import Ask, Malformed
from headrace.checkup.checks import CHECKS, Check, Subject
from headrace.checkup.dialects import DIALECTS, Dialect
from headrace.checkup.finding import Finding, Report, Verdict, bad, note, ok
from headrace.checkup.http import Http, OutOfReach, Refused
from headrace.checkup.target import NO_ROUTE, Target
from headrace.checkup.words import Words

#: Where a gateway records what a checkup says: no trainer takes batches from it.
CHANNEL = "checkup"
#: How long one answer may take.
TIMEOUT_S = 120.0


async def checkup(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    admin_key: str | None = None,
    dialects: Sequence[str] = tuple(DIALECTS),
    tokenizer: Path | None = None,
    channel: str = CHANNEL,
    timeout_s: float = TIMEOUT_S,
) -> Report:
    """All that can be found out about a server; `OutOfReach` where nothing can."""
    async with Http(api_key, timeout_s) as http:
        target = Target(http, url, model=model, channel=channel, admin_key=admin_key)
        await target.find()
        report = Report(target.url, target.kind, target.model)
        words = Words(target, tokenizer)
        there: list[Dialect] = []
        for name in dialects:
            finding = await _present(Subject(target, DIALECTS[name], words))
            report.findings.append(finding)
            if finding.cause == "there":
                there.append(DIALECTS[name])
        if all(finding.verdict == Verdict.NOTE for finding in report.findings):
            said = "; ".join(f"{finding.dialect}: {finding.said}" for finding in report.findings)
            raise OutOfReach(f"{target.url} answers in no dialect ({said})")
        completions = DIALECTS["completions"] in there
        for dialect in there:
            subject = Subject(target, dialect, words, completions)
            for check_name, check in CHECKS.items():
                report.findings += await _checked(check_name, check, subject)
        return report


async def _present(on: Subject) -> Finding:
    name = on.dialect.name
    try:
        await on.once(Ask(on.question, max_tokens=1))
    except Refused as error:
        if error.status in NO_ROUTE:
            return note("dialect", name, "absent", "not offered")
        return note("dialect", name, "refused", str(error))
    except Malformed as error:
        return bad("dialect", name, "malformed", str(error))
    return ok("dialect", name, "there", on.dialect.path)


async def _checked(name: str, check: Check, on: Subject) -> list[Finding]:
    """A check's findings; a call that fails where others did not is one."""
    try:
        return await check(on)
    except Refused as error:
        return [bad(name, on.dialect.name, "refused", f"a call is answered {error}")]
    except Malformed as error:
        return [bad(name, on.dialect.name, "malformed", str(error))]
    except OutOfReach as error:
        return [bad(name, on.dialect.name, "no_answer", str(error))]
