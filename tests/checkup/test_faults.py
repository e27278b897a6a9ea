"""Servers that are wrong in one thing: a checkup finds it and calls it by its name."""

from __future__ import annotations

import asyncio

import pytest
from tests.checkup.speaker import Speaker
from tests.gateway.kit import serving

from headrace.checkup import CheckReport, Verdict, checkup

CHECKS = ("ids", "drift", "tools", "log-probs", "streaming", "n", "stop", "versions", "dialect")


def checked(*faults: str) -> CheckReport:
    with serving(Speaker(*faults).app) as address:
        return asyncio.run(checkup(address))


def wrong(report: CheckReport) -> dict[str, list[str]]:
    """The causes of all that is bad, by check."""
    found = {check: report.causes(check) for check in CHECKS}
    return {check: causes for check, causes in found.items() if causes}


def test_a_server_that_tells_what_it_does_and_keeps_what_it_sampled_is_exact() -> None:
    report = checked()
    assert wrong(report) == {}
    assert report.exact
    assert report.causes("log-probs", Verdict.OK) == ["raw"]
    assert report.causes("tools", Verdict.OK) == report.causes("drift", Verdict.OK) == ["prefix"]
    assert report.causes("versions", Verdict.NOTE) == ["untold"]
    assert [each.dialect for each in report.findings if each.cause == "absent"] == ["responses", "messages"]


def test_log_probs_of_the_sampling_temperature_are_told_from_raw_ones() -> None:
    report = checked("processes")
    assert report.exact
    assert report.causes("log-probs", Verdict.OK) == ["processed"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("retokenizes", {"drift": ["retokenized"]}),
        ("strips_reasoning", {"drift": ["reasoning_stripped"]}),
        ("squeezes", {"drift": ["whitespace"]}),
        ("compacts", {"tools": ["tool_calls_rendered"]}),
        ("dates", {"drift": ["template_rewrites"], "tools": ["template_rewrites"]}),
        ("miscounts", {"ids": ["usage_differs"], "streaming": ["usage_differs"]}),
        ("misquotes", {"log-probs": ["replay_differs"]}),
        ("no_ids", {"ids": ["no_ids"]}),
        ("shifts_log_probs", {"log-probs": ["tops_differ"]}),
        ("cools", {"log-probs": ["neither"]}),
        ("drops_delta", {"streaming": ["text_differs"]}),
        ("stutters", {"streaming": ["reasoning_differs", "text_differs"]}),
        ("hangs_up", {"streaming": ["no_answer"]}),
        ("stringifies", {"dialect": ["malformed"]}),
        ("ends_twice", {"streaming": ["ended_twice"]}),
        ("breaks_off", {"streaming": ["no_end"]}),
        ("ignores_n", {"n": ["ignored"]}),
        ("copies_n", {"n": ["copied"]}),
        ("ignores_stop", {"stop": ["ignored"]}),
        ("swallows_stopped", {"stop": ["malformed"]}),
        ("doubles", {"dialect": ["malformed"]}),
    ],
)
def test_a_fault_is_found_and_named(fault: str, expected: dict[str, list[str]]) -> None:
    report = checked(fault)
    assert not report.exact
    assert wrong(report) == expected


@pytest.mark.parametrize(
    ("fault", "cause"), [("retokenizes", "answer_rewritten"), ("strips_reasoning", "reasoning_stripped")]
)
def test_without_anybody_who_reads_ids_drift_is_named_by_the_ids_alone(fault: str, cause: str) -> None:
    assert wrong(checked(fault, "mute")) == {"drift": [cause]}
