"""Is it told which weights sampled, and do those who tell it agree?"""

from __future__ import annotations

from typing import Any

from headrace.checkup.answer import Ask
from headrace.checkup.checks.subject import Subject
from headrace.checkup.finding import Finding, bad, note, ok

CHECK = "versions"


async def check(on: Subject) -> list[Finding]:
    name = on.dialect.name
    before = await _serving(on)
    (answer,) = await on.once(Ask(on.question, max_tokens=4))
    after = await _serving(on)
    recorded = answer.step.version if answer.step is not None else None
    told = {str(version) for version in (answer.version, recorded, before, after) if version is not None}
    if not told:
        return [
            note(CHECK, name, "untold", "no version of the weights is told: a trainer cannot tell how old a sample is")
        ]
    if before != after:
        return [note(CHECK, name, "moving", f"the weights moved from {before} to {after} while they were asked")]
    if len(told) > 1:
        return [bad(CHECK, name, "differ", f"the answer, its step and the server tell {', '.join(sorted(told))}")]
    if answer.version is None and recorded is None:
        return [note(CHECK, name, "beside", f"version {before} is told beside answers, not with them")]
    return [ok(CHECK, name, "told", f"version {told.pop()}, with each answer")]


async def _serving(on: Subject) -> Any:
    """The version that the server says it has: a gateway's, or vLLM's."""
    for path, field in (("/policy_version", "version"), ("/weight_info", "weight_version")):
        found = await on.target.told(path)
        if isinstance(found, dict) and found.get(field) is not None:
            return found[field]
    return None
