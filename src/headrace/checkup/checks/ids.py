"""Are the exact ids to be had that were consumed and sampled, and do all that tell them agree?"""

from __future__ import annotations

from headrace.checkup.answer import Answer, Ask
from headrace.checkup.checks.subject import Subject
from headrace.checkup.finding import Finding, bad, note, ok

CHECK = "ids"


async def check(on: Subject) -> list[Finding]:
    (answer,) = await on.once(Ask(on.question))
    name = on.dialect.name
    if answer.prompt_ids is None or answer.ids is None:
        return [_missing(on, answer)]
    found = [bad(CHECK, name, cause, said) for cause, said in troubles(answer)]
    if found:
        return found
    ways = [*(["trajectories"] if answer.step else []), *(["return_token_ids"] if answer.told_ids else [])]
    return [ok(CHECK, name, "exact", f"prompt and response ids by {' and '.join(ways)}")]


def _missing(on: Subject, answer: Answer) -> Finding:
    name, closed = on.dialect.name, on.target.closed
    if closed:
        return note(CHECK, name, "closed", f"ids are recorded, and cannot be read: {closed} (give --admin-key)")
    if answer.ids is not None:
        return bad(CHECK, name, "no_prompt_ids", "the response's ids are told, the prompt's are not")
    return bad(CHECK, name, "no_ids", "no token ids are told: text would have to be encoded again")


def troubles(answer: Answer) -> list[tuple[str, str]]:
    """What disagrees about an answer's ids, as cause and words."""
    found: list[tuple[str, str]] = []
    prompt, ids, step = answer.prompt_ids, answer.ids, answer.step
    assert prompt is not None
    assert ids is not None
    if step is not None and step.quarantined is not None:
        found.append(("quarantined", f"the gateway quarantined the step: {step.quarantined}"))
    if step is not None and (
        answer.told_ids not in (None, step.ids) or answer.told_prompt_ids not in (None, step.prompt_ids)
    ):
        found.append(("ids_differ", "the recorded ids are not those that the answer told"))
    for what, counted, have in (("prompt", answer.consumed, prompt), ("response", answer.sampled, ids)):
        if counted is not None and counted != len(have):
            found.append(
                ("usage_differs", f"usage counts {counted} tokens of the {what}, and there are {len(have)} ids")
            )
    return found
