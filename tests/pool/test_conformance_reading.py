"""Reading a pool, curating what is in it, forgetting: and that channels have nothing to do with each other."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pool.kit import drain, events, fetched, group, keys, ledger, prompts, rows, step, trajectory

from headrace import DataPool
from headrace.data import InvalidInput
from headrace.pool.errors import Conflict, NotFound
from headrace.pool.operations import read

# -- statistics and events --------------------------------------------------------------------------------------------


def test_stats_show_the_ledger_the_queue_and_the_configuration(pool: Any) -> None:
    pool.configure(n_rollouts=2, max_queue_size=50)
    pool.set_version(3)
    pool.submit_steps([*group("a", 2), *group("b", 2), step("c", quarantined="bad"), *group("d", 2)])
    fetched(pool)
    fetched(pool, lease_s=600)
    stats = pool.stats("train")
    assert stats["ledger"] == {
        "submitted": 7,
        "queued": 2,
        "leased": 2,
        "consumed": 2,
        "dropped": {},
        "quarantined": 1,
    }
    assert stats["balanced"] is True
    assert stats["groups"] == {"queued": 2, "ready": 1, "leased": 1, "history": 0}
    assert (stats["trajectories"], stats["leases"], stats["tombstones"]) == (5, 1, 2)
    assert (stats["policy_version"], stats["closed"]) == (3, False)
    assert stats["config"]["n_rollouts"] == 2
    everything = pool.stats()
    assert everything["ledger"] == {**stats["ledger"], "dropped": 0}
    assert everything["channels"]["train"]["ledger"] == stats["ledger"]
    assert everything["durability"] == "memory"


def test_stats_of_a_channel_that_is_not_there_are_zero_and_make_none(pool: Any) -> None:
    assert pool.stats("other")["ledger"]["submitted"] == 0
    assert pool.stats()["channels"] == {}


def test_events_are_read_from_a_cursor_on(pool: Any) -> None:
    for version in range(1, 6):
        pool.set_version(version)
    found = pool.events()
    assert [(event.kind, event.channel, event.detail["version"]) for event in found] == [
        ("version", "train", version) for version in range(1, 6)
    ]
    assert [event.cursor for event in found] == [0, 1, 2, 3, 4]
    first = pool.events(limit=2)
    assert [event.cursor for event in first] == [0, 1]
    rest = pool.events(first[-1].cursor + 1)
    assert [event.cursor for event in rest] == [2, 3, 4]
    assert pool.events(5) == []
    pool.shutdown()
    assert [(event.cursor, event.kind) for event in pool.events(5)] == [(5, "close")]


# -- listings ---------------------------------------------------------------------------------------------------------


def test_groups_are_listed_by_age_with_their_state(pool: Any) -> None:
    pool.configure(n_rollouts=2)
    pool.submit_steps([*group("a", 2), *group("b", 2), *group("c", 1), *group("d", 2)])
    fetched(pool, lease_s=600)
    listed = rows(pool.list_groups)
    assert [(row["prompt_uid"], row["state"]) for row in listed] == [
        ("a", "leased"),
        ("b", "ready"),
        ("c", "waiting"),
        ("d", "ready"),
    ]
    assert (listed[0]["trajectories"], listed[0]["complete"], listed[0]["steps"]) == (2, 2, 2)
    assert (listed[0]["n_rollouts"], listed[0]["deliveries"]) == (2, 1)
    assert [row["prompt_uid"] for row in rows(pool.list_groups, state="ready")] == ["b", "d"]
    assert [row["prompt_uid"] for row in rows(pool.list_groups, prompt_uid="c")] == ["c"]


def test_pages_follow_each_other_without_gaps_or_repeats(pool: Any) -> None:
    names = [f"p{i:02}" for i in range(10)]
    pool.submit_steps([one for name in names for one in trajectory(name, 2)])
    seen: list[str] = []
    page = pool.list_groups(limit=4)
    while True:
        seen += [row["prompt_uid"] for row in page["items"]]
        assert len(page["items"]) <= 4
        if page["next"] is None:
            break
        page = pool.list_groups(limit=4, cursor=page["next"])
    assert seen == names
    assert len(rows(pool.list_trajectories)) == 10
    assert [(row["trajectory_uid"], row["step_index"]) for row in rows(pool.list_steps)] == [
        (name, i) for name in names for i in range(2)
    ]


def test_a_page_looks_at_so_many_rows_and_says_where_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "MAX_PAGE_ROWS", 4)
    with DataPool() as pool:
        pool.submit_steps([step(f"t{at}") for at in range(12)])
        for ask, second in ((pool.list_groups, "4"), (pool.list_trajectories, "4-0"), (pool.list_steps, "4-0-0")):
            assert ask(prompt_uid="t9", limit=2) == {"items": [], "next": second}
            assert [row["prompt_uid"] for row in rows(ask, prompt_uid="t9")] == ["t9"]
            assert ask(prompt_uid="t1", limit=1)["items"] != []


def test_trajectories_are_listed_and_filtered(pool: Any) -> None:
    pool.submit_steps([*trajectory("t", 2, reward=0.5), step("u", reward=3.0), *trajectory("v", 1, "p")])
    listed = {row["trajectory_uid"]: row for row in rows(pool.list_trajectories)}
    assert {uid: (row["steps"], row["reward"], row["complete"]) for uid, row in listed.items()} == {
        "t": (2, 1.0, True),
        "u": (1, 3.0, False),
        "v": (1, None, True),
    }
    for filters, expected in (
        ({"complete": True}, ["t", "v"]),
        ({"complete": False}, ["u"]),
        ({"min_reward": 2}, ["u"]),
        ({"min_reward": 3.0}, ["u"]),
        ({"max_reward": 1.0}, ["t"]),
        ({"max_reward": 2.0}, ["t"]),
        ({"prompt_uid": "p"}, ["v"]),
        ({"state": "queued"}, ["t", "u", "v"]),
        ({"state": "leased"}, []),
    ):
        assert [row["trajectory_uid"] for row in rows(pool.list_trajectories, **filters)] == expected


def test_steps_are_listed_without_tokens_and_filtered(pool: Any) -> None:
    pool.submit_steps(
        [
            step("t", 0, tags=["good"], reward=1.0, finish_reason="stop"),
            step("t", 1, trainable=False),
            step("u", 0, quarantined="bad", policy_version=0),
        ]
    )
    listed = rows(pool.list_steps)
    assert [(row["prompt_tokens"], row["response_tokens"]) for row in listed] == [(3, 2), (5, 2), (3, 2)]
    assert (listed[0]["reward"], listed[0]["finish_reason"], listed[0]["tags"]) == (1.0, "stop", ["good"])
    for filters, expected in (
        ({"trajectory_uid": "t"}, [("t", 0), ("t", 1)]),
        ({"trajectory_uid": "nobody"}, []),
        ({"prompt_uid": "u"}, [("u", 0)]),
        ({"trainable": False}, [("t", 1)]),
        ({"tag": "good"}, [("t", 0)]),
        ({"quarantined": True}, [("u", 0)]),
        ({"quarantined": False}, [("t", 0), ("t", 1)]),
    ):
        found = [(row["trajectory_uid"], row["step_index"]) for row in rows(pool.list_steps, **filters)]
        assert found == expected


def test_an_unknown_filter_or_a_wrong_page_is_refused(pool: Any) -> None:
    for filters, said in (
        ({"colour": "red"}, "unknown filter 'colour'"),
        ({"limit": 0}, "limit"),
        ({"limit": 10**6}, "limit is 1000000"),
        ({"cursor": -1}, "cursor"),
    ):
        for ask in (pool.list_groups, pool.list_trajectories, pool.list_steps):
            with pytest.raises(InvalidInput, match=said):
                ask(**filters)


# -- one trajectory ---------------------------------------------------------------------------------------------------


def test_a_trajectory_is_read_as_it_stands_with_its_tree(pool: Any) -> None:
    pool.open("t", "p", metadata={"agent": "coder"}, n_rollouts=4)
    sent = [step("t", 0, "p"), step("t", 1, "p"), step("t", 2, "p", prompt_ids=[1, 2, 7])]
    pool.submit_steps(sent)
    found = pool.trajectory("t")
    assert (found.uid, found.prompt_uid, found.channel, found.state) == ("t", "p", "train", "queued")
    assert (found.metadata, found.n_rollouts, found.complete) == ({"agent": "coder"}, 4, False)
    assert found.parents == {0: -1, 1: 0, 2: -1}
    assert [one.prompt_ids.tolist() for one in found.steps] == [one.prompt_ids.tolist() for one in sent]
    assert [one.response_ids.tolist() for one in found.steps] == [one.response_ids.tolist() for one in sent]
    pool.complete("t")
    assert pool.trajectory("t").complete is True
    assert found.complete is False


def test_what_is_gone_is_said_to_be_gone(pool: Any) -> None:
    pool.submit_step(step("t", last=True))
    drain(pool)
    with pytest.raises(NotFound, match="consumed"):
        pool.trajectory("t")
    with pytest.raises(NotFound, match="no trajectory 'nobody'"):
        pool.trajectory("nobody")


def test_a_consumed_trajectory_in_the_history_can_be_read(pool: Any) -> None:
    pool.configure(history_size=1)
    pool.submit_step(step("t", last=True))
    drain(pool)
    assert pool.trajectory("t").state == "consumed"


# -- curation ---------------------------------------------------------------------------------------------------------


def test_untrainable_steps_are_masked_out_of_sequences(pool: Any) -> None:
    pool.submit_steps(trajectory("t", 3))
    pool.curate("t", 1, trainable=False, quality=0.25, tags=["reviewed"], note="off topic")
    batch = fetched(pool)
    curated = batch.steps[1]
    assert (curated.trainable, curated.quality, curated.tags, curated.note) == (False, 0.25, ("reviewed",), "off topic")
    (sequence,) = batch.sequences()
    assert [(span.step_index, span.trained) for span in sequence.spans] == [(0, True), (1, False), (2, True)]
    assert int(sequence.loss_mask.sum()) == 4


def test_curation_can_be_taken_back_and_keeps_the_rest(pool: Any) -> None:
    pool.submit_step(step("t", last=True, metadata={"a": 1}, finish_reason="stop", call_id="c"))
    pool.curate("t", 0, trainable=False, note="hm")
    pool.curate("t", 0, trainable=True)
    (found,) = fetched(pool).steps
    assert (found.trainable, found.note, found.metadata, found.finish_reason) == (True, "hm", {"a": 1}, "stop")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainable": 1}, "trainable"),
        ({"quality": float("nan")}, "quality"),
        ({"quality": "high"}, "quality"),
        ({"tags": "one"}, "tags"),
        ({"tags": [1]}, "tags"),
        ({"tags": 5}, "tags"),
        ({"note": 7}, "note"),
        ({"colour": "red"}, "colour"),
        ({"quarantined": None}, "quarantined"),
    ],
)
def test_curation_takes_only_what_is_meant_for_it(pool: Any, changes: dict[str, Any], said: str) -> None:
    pool.submit_step(step("t", last=True, note="as it was"))
    with pytest.raises(InvalidInput, match=said):
        pool.curate("t", 0, **changes)
    assert fetched(pool).steps[0].note == "as it was"


def test_curation_of_what_is_not_there_or_is_out_is_refused(pool: Any) -> None:
    pool.submit_step(step("t", last=True))
    for uid, index in (("nobody", 0), ("t", 3)):
        with pytest.raises(NotFound, match="to curate"):
            pool.curate(uid, index, trainable=False)
    fetched(pool, lease_s=600)
    with pytest.raises(Conflict, match="with a consumer"):
        pool.curate("t", 0, trainable=False)


# -- forgetting -------------------------------------------------------------------------------------------------------


def test_a_forgotten_trajectory_is_gone_and_stays_gone(pool: Any) -> None:
    pool.submit_steps([*trajectory("t", 2), *trajectory("u", 1)])
    assert pool.forget("t") is True
    assert pool.forget("t") is True, "a caller whose answer was lost asks again"
    assert pool.forget("nobody") is False
    with pytest.raises(NotFound, match="forgotten"):
        pool.trajectory("t")
    assert pool.submit_steps(trajectory("t", 2)).late == 2
    assert drain(pool) == ["u"]
    assert ledger(pool) == {"submitted": 5, "consumed": 1, "forgotten": 2, "late": 2}
    assert events(pool, "forget") == [{"trajectory": "t"}]


def test_a_group_goes_on_without_a_forgotten_trajectory(pool: Any) -> None:
    pool.configure(n_rollouts=2)
    pool.submit_steps(group("p", 2))
    assert pool.forget("p/0", erase=False) is True
    assert pool.fetch_batch(1, timeout=0) is None
    pool.submit_steps(trajectory("p/2", 1, "p"))
    assert keys(fetched(pool).steps) == [("p/1", 0), ("p/2", 0)]


@pytest.mark.parametrize("end", ["ack", "nack"])
def test_a_leased_trajectory_can_be_forgotten(pool: Any, end: str) -> None:
    pool.submit_steps([*trajectory("t", 2), *trajectory("u", 1)])
    batch = fetched(pool, 2, lease_s=600)
    assert pool.forget("t") is True
    assert ledger(pool) == {"submitted": 3, "leased": 1, "forgotten": 2}
    getattr(batch, end)()
    assert drain(pool) == ([] if end == "ack" else ["u"])
    assert pool.stats("train")["groups"]["queued"] == 0


@pytest.mark.parametrize("end", ["ack", "nack"])
def test_a_trajectory_whose_single_steps_are_out_can_be_forgotten(pool: Any, end: str) -> None:
    pool.submit_steps([*trajectory("t", 3), *trajectory("u", 1)])
    batch = fetched(pool, 4, unit="step", lease_s=600)
    pool.forget("t")
    assert ledger(pool) == {"submitted": 4, "leased": 1, "forgotten": 3}
    getattr(batch, end)()
    if end == "nack":
        assert keys(fetched(pool, unit="step").steps) == [("u", 0)]
    assert ledger(pool) == {"submitted": 4, "consumed": 1, "forgotten": 3}


def test_what_was_consumed_can_be_forgotten_from_history_and_replies(pool: Any) -> None:
    pool.configure(history_size=10, replay_share=0.5)
    pool.submit_steps([*group("a"), *group("b"), *group("c")])
    fetched(pool, 3, request_id="r")
    assert pool.forget("b/0") is True
    pool.submit_steps([*group("d"), *group("e"), *group("f")])
    again = fetched(pool, 3, request_id="r")
    assert "b/0" not in {one.trajectory_uid for one in again.steps}
    while (batch := pool.fetch_batch(2, order="mixed", timeout=0)) is not None:
        assert "b/0" not in {one.trajectory_uid for one in batch.steps}
    with pytest.raises(NotFound, match="forgotten"):
        pool.trajectory("b/0")


def test_single_steps_kept_for_a_lost_answer_are_forgotten_too(pool: Any) -> None:
    pool.submit_steps([*trajectory("t", 2), *trajectory("u", 1)])
    fetched(pool, 2, unit="step", request_id="r")
    pool.forget("t")
    assert keys(fetched(pool, 1, unit="step", request_id="r").steps) == [("u", 0)]


# -- channels ---------------------------------------------------------------------------------------------------------


def test_channels_are_isolated(pool: Any) -> None:
    pool.configure("eval", n_rollouts=2, max_queue_size=1, require_reward=True)
    pool.submit_steps(trajectory("t", 1, "p"), channel="train")
    pool.submit_steps(trajectory("t", 1, "p", reward=1.0), channel="eval")
    assert pool.stats("train")["config"]["n_rollouts"] == 1
    assert pool.fetch_batch(1, channel="eval", timeout=0) is None
    assert prompts(fetched(pool)) == ["p"]
    pool.submit_steps(trajectory("u", 1, "p", reward=1.0), channel="eval")
    assert len(fetched(pool, channel="eval").groups[0].trajectories) == 2
    assert (ledger(pool), ledger(pool, "eval")) == (
        {"submitted": 1, "consumed": 1},
        {"submitted": 2, "consumed": 2},
    )


def test_a_trajectory_is_forgotten_in_every_channel_or_in_one(pool: Any) -> None:
    for channel in ("a", "b", "c"):
        pool.submit_step(step("t"), channel=channel)
    pool.forget("t", channel="a")
    assert [pool.stats(c)["trajectories"] for c in "abc"] == [0, 1, 1]
    pool.forget("t")
    assert [pool.stats(c)["trajectories"] for c in "abc"] == [0, 0, 0]


def test_pages_go_on_however_many_groups_there_were(pool: Any) -> None:
    names = [f"p{at:03}" for at in range(600)]
    pool.submit_steps([step(name, 0) for name in names])
    for listing in (pool.list_groups, pool.list_trajectories, pool.list_steps):
        seen, page = 0, listing(limit=590)
        while page["next"] is not None:
            seen += len(page["items"])
            page = listing(limit=590, cursor=page["next"])
        assert seen + len(page["items"]) == len(names)
