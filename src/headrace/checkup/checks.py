"""The checks of single answers: ids, streams, several choices, stop strings, versions; and the table of all checks.

Each asks one server in one dialect, and returns findings.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from headrace.checkup.answer import CheckAnswer, CheckRequest, Malformed
from headrace.checkup.drift import DRIFT, TOOLS, check_drift, check_tools
from headrace.checkup.log_probs import LOG_PROBS, check_log_probs
from headrace.checkup.report import Finding, bad, note, ok
from headrace.checkup.target import CallRefused, Subject

IDS = "ids"


async def check_ids(on: Subject) -> list[Finding]:
    """Checks that the ids of prompt and response can be had, and that all sources of them agree."""
    (answer,) = await on.once(CheckRequest(on.question))
    name = on.dialect.name
    if answer.prompt_ids is None or answer.ids is None:
        return [_ids_missing(on, answer)]
    found = [bad(IDS, name, cause, said) for cause, said in id_troubles(answer)]
    if found:
        return found
    ways = [*(["trajectories"] if answer.step else []), *(["return_token_ids"] if answer.told_ids else [])]
    return [ok(IDS, name, "exact", f"prompt and response ids by {' and '.join(ways)}")]


def _ids_missing(on: Subject, answer: CheckAnswer) -> Finding:
    name, closed = on.dialect.name, on.target.closed
    if closed:
        return note(IDS, name, "closed", f"ids are recorded, and cannot be read: {closed} (give --admin-key)")
    if answer.ids is not None:
        return bad(IDS, name, "no_prompt_ids", "the response's ids are told, the prompt's are not")
    return bad(IDS, name, "no_ids", "no token ids are told: text would have to be encoded again")


def id_troubles(answer: CheckAnswer) -> list[tuple[str, str]]:
    """Disagreements about an answer's ids, as cause and text."""
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


STREAMING = "streaming"
#: What `CheckAnswer.said` holds, by name.
SEEN_PARTS = ("text", "reasoning", "calls", "finish")


async def check_streaming(on: Subject) -> list[Finding]:
    """Checks that a stream amounts to what a whole answer says: text, calls, ids, usage, and events in order."""
    name, ask = on.dialect.name, CheckRequest(on.question)
    (first,), (second,) = await on.once(ask), await on.once(ask)
    try:
        (streamed,), stream = await on.streamed(replace(ask, stream=True))
    except CallRefused as error:
        return [note(STREAMING, name, "refused", f"streams are refused: {error}")]
    except Malformed as error:
        return [bad(STREAMING, name, "malformed", str(error))]
    found = [bad(STREAMING, name, cause, said) for cause, said in stream.troubles]
    if streamed.whole is not None:
        found += [bad(STREAMING, name, cause, said) for cause, said in id_troubles(streamed)]
    if not _same(first, second):
        return found or [
            note(STREAMING, name, "not_repeatable", "whole answers at temperature 0 differ; none to compare to")
        ]
    found += [bad(STREAMING, name, *each) for each in _stream_differences(first, streamed)]
    if found:
        return found
    if streamed.sampled is None:
        return [note(STREAMING, name, "no_usage", "the stream says what a whole answer says, but not its usage")]
    return [ok(STREAMING, name, "same", "a stream says what a whole answer says")]


def _same(one: CheckAnswer, other: CheckAnswer) -> bool:
    return one.said() == other.said() and one.whole == other.whole


def _stream_differences(whole: CheckAnswer, streamed: CheckAnswer) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, said, wanted in zip(SEEN_PARTS, streamed.said(), whole.said(), strict=True):
        if said != wanted:
            found.append((f"{name}_differs", f"{name} is {said!r:.60} in the stream, {wanted!r:.60} in a whole answer"))
    if streamed.ids != whole.ids or streamed.prompt_ids != whole.prompt_ids:
        found.append(("ids_differ", "the stream tells other ids than a whole answer, or none"))
    for what, one, other in (
        ("prompt", whole.consumed, streamed.consumed),
        ("response", whole.sampled, streamed.sampled),
    ):
        if other is not None and one != other:
            found.append(("usage_differs", f"usage of the {what} is {other} in the stream, {one} in a whole answer"))
    return found


SEVERAL = "n"
CHOICES = 2
#: The log-prob below which two equal samples were not drawn twice: chance does not explain it.
UNLIKELY_LOG_PROB = -20.0


async def check_several(on: Subject) -> list[Finding]:
    """Checks that `n` samples n answers, each with its own ids."""
    if not on.dialect.several:
        return []
    name = on.dialect.name
    try:
        answers = await on.once(CheckRequest(on.question, n=CHOICES, temperature=1.0, tops=0))
    except CallRefused as error:
        return [note(SEVERAL, name, "refused", f"n is refused: {error}")]
    if len(answers) != CHOICES:
        return [bad(SEVERAL, name, "ignored", f"n is {CHOICES}, and {len(answers)} came back")]
    first, second = answers
    if first.said() == second.said() and first.log_probs and sum(first.log_probs) < UNLIKELY_LOG_PROB:
        return [bad(SEVERAL, name, "copied", "both answers are the same one, which chance does not explain")]
    if (first.ids is None) != (second.ids is None) or first.prompt_ids != second.prompt_ids:
        return [bad(SEVERAL, name, "ids_missing", "one of the answers lacks its ids, or has another prompt's")]
    return [ok(SEVERAL, name, "sampled", f"{CHOICES} answers of their own")]


STOP = "stop"
#: Dialects that have no stop strings.
WITHOUT_STOP_STRINGS = ("responses",)


async def check_stop(on: Subject) -> list[Finding]:
    """Checks that a stop string is obeyed: the text ends before it, and the finish reason says so."""
    name = on.dialect.name
    if name in WITHOUT_STOP_STRINGS:
        return []
    ask = CheckRequest(on.question)
    (plain,) = await on.once(ask)
    stop = choose_stop(plain.text)
    if stop is None:
        return [note(STOP, name, "nothing_said", "the model said nothing that could be stopped at")]
    try:
        (stopped,) = await on.once(replace(ask, stop=stop))
    except CallRefused as error:
        return [note(STOP, name, "refused", f"stop strings are refused: {error}")]
    if stop in stopped.text:
        return [bad(STOP, name, "ignored", f"the text goes on past {stop!r}")]
    if stopped.text == plain.text[: plain.text.index(stop)] and stopped.finish != "stop":
        return [bad(STOP, name, "finish", f"stopped at {stop!r}, and said to have ended by {stopped.finish!r}")]
    return [ok(STOP, name, "obeyed", f"stops at {stop!r}")]


def choose_stop(text: str) -> str | None:
    """A stop string for a text: a plain character from its middle; None where it has none."""
    found = [char for char in text[len(text) // 3 :] if char.isascii() and char.isprintable() and not char.isspace()]
    return found[0] if found else None


VERSIONS = "versions"


async def check_versions(on: Subject) -> list[Finding]:
    """Checks that it is known which weights sampled, and that all sources of that agree."""
    name = on.dialect.name
    before = await _served_version(on)
    (answer,) = await on.once(CheckRequest(on.question, max_tokens=4))
    after = await _served_version(on)
    recorded = answer.step.version if answer.step is not None else None
    told = {str(version) for version in (answer.version, recorded, before, after) if version is not None}
    if not told:
        return [
            note(
                VERSIONS, name, "untold", "no version of the weights is told: a trainer cannot tell how old a sample is"
            )
        ]
    if before != after:
        return [note(VERSIONS, name, "moving", f"the weights moved from {before} to {after} while they were asked")]
    if len(told) > 1:
        return [bad(VERSIONS, name, "differ", f"the answer, its step and the server tell {', '.join(sorted(told))}")]
    if answer.version is None and recorded is None:
        return [note(VERSIONS, name, "beside", f"version {before} is told beside answers, not with them")]
    return [ok(VERSIONS, name, "told", f"version {told.pop()}, with each answer")]


async def _served_version(on: Subject) -> Any:
    """The version that the server reports: a gateway's, or vLLM's."""
    for path, field in (("/policy_version", "version"), ("/weight_info", "weight_version")):
        found = await on.target.told(path)
        if isinstance(found, dict) and found.get(field) is not None:
            return found[field]
    return None


Check = Callable[[Subject], Awaitable[list[Finding]]]

#: Every check by its name, in the order in which they are made.
CHECKS: dict[str, Check] = {
    IDS: check_ids,
    DRIFT: check_drift,
    TOOLS: check_tools,
    LOG_PROBS: check_log_probs,
    STREAMING: check_streaming,
    SEVERAL: check_several,
    STOP: check_stop,
    VERSIONS: check_versions,
}
