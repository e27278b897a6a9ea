"""The checker finds each kind of broken promise in a log, and nothing in a log where all is well."""

from __future__ import annotations

from typing import Any

import pytest
from tests.storm.kit import ALONE, FIRST, SECOND, append, clean_log, find, remove, report_of

from headrace.storm.checker import KINDS, check
from headrace.storm.log import Event


def kinds(report: Any) -> set[str]:
    return {finding.kind for finding in report.findings}


def test_a_log_in_which_all_is_well_has_no_findings() -> None:
    report = check(clean_log())
    assert report.findings == []
    assert report.clean
    assert report.counts == dict.fromkeys(KINDS, 0)
    assert (report.figures["calls"], report.figures["steps"], report.figures["kills"]) == (4, 4, 1)


# -- lost --------------------------------------------------------------------------------------------------------------


def test_an_answer_that_is_in_no_step_is_lost() -> None:
    def spoil(events: list[Event]) -> None:
        find(events, "trained", trajectory=ALONE)["steps"].pop(0)

    report = report_of(spoil)
    assert "lost" in kinds(report)
    assert any(finding.subject == "q1" for finding in report.findings)


@pytest.mark.parametrize("state", ["unknown", "capacity", "consumed"])
def test_a_trajectory_that_was_begun_and_is_gone_is_lost(state: str) -> None:
    def spoil(events: list[Event]) -> None:
        remove(events, "trained", trajectory=ALONE)
        find(events, "states")["states"][ALONE] = state

    assert "lost" in kinds(report_of(spoil))


def test_a_trajectory_that_its_agent_failed_is_not_lost() -> None:
    def spoil(events: list[Event]) -> None:
        remove(events, "trained", trajectory=ALONE)
        remove(events, "complete.acked", trajectory=ALONE)
        append(events, "fail.sent", trajectory=ALONE, count=0, reward=None)
        append(events, "fail.acked", trajectory=ALONE, count=0, status="ok", steps=2)
        find(events, "states")["states"][ALONE] = "failed"

    assert report_of(spoil).findings == []


# -- twice, and after an acknowledgement -------------------------------------------------------------------------------


def test_a_trajectory_that_was_learned_from_again_is_found() -> None:
    def spoil(events: list[Event]) -> None:
        again = find(events, "trained", trajectory=FIRST)
        append(events, "trained", **{name: value for name, value in again.items() if name not in ("t", "who", "e")})

    assert "twice" in kinds(report_of(spoil))


def test_one_answer_in_two_steps_is_found() -> None:
    def spoil(events: list[Event]) -> None:
        steps = find(events, "trained", trajectory=ALONE)["steps"]
        steps.append({**steps[0], "index": 2, "reward": None})

    assert "twice" in kinds(report_of(spoil))


@pytest.mark.parametrize("named", [True, False])
def test_a_named_call_that_became_two_steps_is_found_and_an_unnamed_one_is_counted(named: bool) -> None:
    def spoil(events: list[Event]) -> None:
        find(events, "call", call="q3")["named"] = named
        first = find(events, "sampled", question="q3")
        second = {**first, "answer": "answer-unseen", "response": [900, 901]}
        events.insert(events.index(first), second)
        steps = find(events, "trained", trajectory=FIRST)["steps"]
        steps.append({**steps[0], "index": 1, "response": [900, 901], "reward": None})
        events.remove(events[-2])  # the last ledger counts without it

    report = report_of(spoil)
    assert kinds(report) == ({"twice"} if named else set())
    assert report.figures["unseen_steps"] == 1


def test_what_is_handed_out_again_after_its_acknowledgement_is_found() -> None:
    def spoil(events: list[Event]) -> None:
        append(events, "fetch.sent", channel="train", request="r-l3", size=1)
        append(events, "fetched", channel="train", request="r-l3", lease="l3", trajectories=[ALONE])
        append(events, "skipped", trajectory=ALONE, lease="l3")

    assert kinds(report_of(spoil)) == {"after_ack"}


def test_what_is_handed_out_again_before_its_acknowledgement_is_no_finding() -> None:
    def spoil(events: list[Event]) -> None:
        at = events.index(find(events, "ack.sent", lease="l1"))
        when = events[at]["t"]
        again = {"who": "test", "channel": "train", "request": "r-l1b"}
        events.insert(at, {"t": when - 2, "e": "fetch.sent", "size": 1, **again})
        events.insert(at + 1, {"t": when - 1, "e": "fetched", "lease": "l1b", "trajectories": [ALONE], **again})

    assert report_of(spoil).findings == []


# -- tokens, order, versions, rewards ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "value"), [("prompt", [1, 3]), ("response", [5, 6]), ("log_probs", [-0.5, -0.5])])
def test_a_step_that_is_not_what_its_server_said_is_found(field: str, value: list[Any]) -> None:
    def spoil(events: list[Event]) -> None:
        find(events, "trained", trajectory=SECOND)["steps"][0][field] = value

    assert "tokens" in kinds(report_of(spoil))


def test_an_answer_that_no_server_gave_is_found() -> None:
    def spoil(events: list[Event]) -> None:
        find(events, "answered", call="q4")["answer"] = "answer-made-up"

    assert {"tokens", "lost"} == kinds(report_of(spoil))


def test_steps_in_another_order_than_they_were_answered_in_are_found() -> None:
    def spoil(events: list[Event]) -> None:
        steps = find(events, "trained", trajectory=ALONE)["steps"]
        steps[0]["index"], steps[1]["index"] = 1, 0

    assert kinds(report_of(spoil)) == {"order"}


def test_a_turn_that_does_not_continue_the_one_before_it_is_found() -> None:
    def spoil(events: list[Event]) -> None:
        find(events, "sampled", question="q2")["prompt"] = [1, 2, 9, 9, 3]
        find(events, "trained", trajectory=ALONE)["steps"][1]["prompt"] = [1, 2, 9, 9, 3]

    assert kinds(report_of(spoil)) == {"order"}


def test_a_group_that_is_not_whole_is_found() -> None:
    def spoil(events: list[Event]) -> None:
        find(events, "trained", trajectory=FIRST)["group"] = [FIRST]

    assert kinds(report_of(spoil)) == {"order"}


def test_what_had_failed_and_is_learned_from_is_found() -> None:
    def spoil(events: list[Event]) -> None:
        append(events, "fail.sent", trajectory=FIRST, count=0, reward=None)
        append(events, "fail.acked", trajectory=FIRST, count=0, status="ok", steps=1)

    assert kinds(report_of(spoil)) == {"order"}


@pytest.mark.parametrize("version", [0, 3])
def test_a_version_that_ran_back_or_never_was_is_found(version: int) -> None:
    def spoil(events: list[Event]) -> None:
        find(events, "trained", trajectory=FIRST)["steps"][0]["version"] = version

    assert kinds(report_of(spoil)) == {"versions"}


def test_rewards_that_changed_hands_are_found() -> None:
    def spoil(events: list[Event]) -> None:
        one, other = (find(events, "trained", trajectory=uid)["steps"][0] for uid in (FIRST, SECOND))
        one["reward"], other["reward"] = other["reward"], one["reward"]

    report = report_of(spoil)
    assert kinds(report) == {"reward"}
    assert report.counts["reward"] == 2


def test_a_reward_that_is_missing_is_found() -> None:
    def spoil(events: list[Event]) -> None:
        find(events, "trained", trajectory=FIRST)["steps"][0]["reward"] = None

    assert kinds(report_of(spoil)) == {"reward"}


# -- who sees what -----------------------------------------------------------------------------------------------------


def test_a_tenant_that_was_answered_for_what_is_anothers_is_found() -> None:
    def spoil(events: list[Event]) -> None:
        find(events, "peeked")["status"] = 200

    assert kinds(report_of(spoil)) == {"tenant"}


@pytest.mark.parametrize(("uid", "kind"), [(ALONE, "tenant"), (SECOND, "shared")])
def test_an_answer_in_a_trajectory_that_did_not_ask_for_it_is_found(uid: str, kind: str) -> None:
    def spoil(events: list[Event]) -> None:
        [moved] = find(events, "trained", trajectory=FIRST)["steps"]
        steps = find(events, "trained", trajectory=uid)["steps"]
        steps.append({**moved, "index": len(steps), "reward": None})

    assert kind in kinds(report_of(spoil))


def test_an_answer_that_two_calls_share_is_found() -> None:
    def spoil(events: list[Event]) -> None:
        find(events, "answered", call="q4")["answer"] = "answer-q3"

    assert "shared" in kinds(report_of(spoil))


# -- scored groups -----------------------------------------------------------------------------------------------------


def post_and_take(events: list[Event], taken: int, **changed: Any) -> None:
    body = {"tokens": [[1, 2]], "scores": [0.5]}
    append(events, "post.sent", group=1, body=body)
    append(events, "post.acked", group=1)
    for _ in range(taken):
        append(events, "taken", batch="b", group=1, body={**body, **changed})


@pytest.mark.parametrize(("taken", "found"), [(0, {"lost"}), (1, set()), (2, {"twice"})])
def test_a_scored_group_that_was_received_is_taken_once(taken: int, found: set[str]) -> None:
    assert kinds(report_of(lambda events: post_and_take(events, taken))) == found


def test_a_scored_group_that_is_not_what_was_posted_is_found() -> None:
    assert kinds(report_of(lambda events: post_and_take(events, 1, scores=[0.25]))) == {"tokens"}


# -- ledgers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("submitted", 3), ("queued", 1), ("consumed", 1)],
    ids=["more than there is", "less than there is", "acknowledged and not consumed"],
)
def test_a_ledger_that_does_not_balance_is_found(name: str, value: int) -> None:
    def spoil(events: list[Event]) -> None:
        [_, after_kill, _] = [event for event in events if event["e"] == "ledger"]
        after_kill["channels"]["train"][name] = value

    assert kinds(report_of(spoil)) == {"ledger"}


def test_a_ledger_that_knows_less_than_before_is_found() -> None:
    def spoil(events: list[Event]) -> None:
        counts = {"submitted": 3, "queued": 0, "leased": 0, "consumed": 3, "quarantined": 0, "dropped": {}}
        append(events, "ledger", when="restart", asked=0, channels={"train": counts})

    assert kinds(report_of(spoil)) == {"ledger"}


# -- stuck and refused -------------------------------------------------------------------------------------------------


def test_what_took_too_long_is_found() -> None:
    def spoil(events: list[Event]) -> None:
        append(events, "stuck", what="call", target=ALONE, call="q1", waited_s=120)

    assert kinds(report_of(spoil)) == {"stuck"}


def test_a_process_that_ended_by_itself_is_found() -> None:
    def spoil(events: list[Event]) -> None:
        append(events, "died", target="gateway", how="ended with code 1")

    assert kinds(report_of(spoil)) == {"stuck"}


def test_what_is_complete_and_was_never_handed_out_is_stuck() -> None:
    def spoil(events: list[Event]) -> None:
        remove(events, "trained", trajectory=ALONE)
        find(events, "states")["states"][ALONE] = "queued"

    assert "stuck" in kinds(report_of(spoil))


def test_a_right_request_that_was_refused_is_found() -> None:
    def spoil(events: list[Event]) -> None:
        append(events, "refused", what="call", call="q1", trajectory=ALONE, status=404, said="unknown", count=0)

    assert kinds(report_of(spoil)) == {"refused"}


@pytest.mark.parametrize(("count", "found"), [(0, {"refused"}), (1, set())])
def test_late_is_an_answer_to_a_second_try_alone(count: int, found: set[str]) -> None:
    def spoil(events: list[Event]) -> None:
        find(events, "complete.acked", trajectory=FIRST).update(status="late", count=count)

    assert kinds(report_of(spoil)) == found


def test_late_may_be_said_of_an_end_that_a_consumer_had_by_then() -> None:
    def spoil(events: list[Event]) -> None:
        ended = find(events, "complete.acked", trajectory=FIRST)
        ended.update(status="late", t=find(events, "trained", trajectory=FIRST)["t"] + 1)
        events.sort(key=lambda event: event["t"])

    assert kinds(report_of(spoil)) == set()


# -- a trainer that tells no more than how much it learned -------------------------------------------------------------


@pytest.mark.parametrize(("groups", "found"), [(2, set()), (1, {"lost"}), (3, {"twice"})])
def test_what_a_trainer_learned_from_is_as_many_groups_as_were_consumed(groups: int, found: set[str]) -> None:
    def spoil(events: list[Event]) -> None:
        events[:] = [event for event in events if event["e"] not in ("trained", "fetch.sent", "fetched", "acked")]
        append(events, "learned", channel="train", groups=groups)

    report = report_of(spoil)
    assert kinds(report) == found
    assert report.figures["learned_groups"] == groups


def test_what_the_pool_still_has_was_not_learned_from() -> None:
    def spoil(events: list[Event]) -> None:
        events[:] = [event for event in events if event["e"] not in ("trained", "fetch.sent", "fetched", "acked")]
        find(events, "states")["states"][ALONE] = "queued"
        append(events, "learned", channel="train", groups=1)

    assert kinds(report_of(spoil)) == {"stuck"}
