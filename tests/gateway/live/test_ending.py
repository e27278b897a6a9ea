"""When a conversation ends, what is said of it later, and who goes on with it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.gateway.kit import Running, running_gateway, told
from tests.gateway.live.kit import IDLE_S, Clock, Talk, complete, conversations, idle, lines, say
from tests.gateway.rollout import Rollout, Say, answers, error_of, in_front, user
from tests.gateway.tenants.test_tenants import TENANTS, by, written
from tests.pool.servers import serving

from headrace import DataPool
from headrace.pool.connect import connect

SESSION = {"x-headrace-session": "s"}


# -- idle --------------------------------------------------------------------------------------------------------------


def test_what_nobody_called_for_so_long_is_complete_and_goes_on_as_another(service: Running, clock: Clock) -> None:
    quiet, busy = Talk(), Talk()
    quiet.says(service, "hi")
    idle(service, clock, IDLE_S / 2)
    busy.says(service, "hi")
    idle(service, clock, IDLE_S / 2)
    assert complete(service) == [True, False]
    for talk in (quiet, busy):
        talk.says(service, "still there?")
    assert lines(service) == [[None], [None, 0], [None]]
    idle(service, clock)
    assert complete(service) == [True, True, True]
    batch = service.pool.fetch_batch(3, timeout=0)
    assert batch is not None
    assert [len(group.trajectories) for group in batch.groups] == [1, 1, 1]


def test_a_call_under_way_keeps_its_conversation(
    service: Running, clock: Clock, rollout: Rollout, threads: ThreadPoolExecutor
) -> None:
    gate = rollout.gate()
    rollout.script.append(Say("slow", at=gate))
    call = threads.submit(say, service, "hi")
    gate.reached()
    idle(service, clock, 10 * IDLE_S, under_way=1)
    gate.open()
    told(call.result(120))
    assert complete(service) == [False]
    idle(service, clock)
    assert complete(service) == [True]


def test_a_conversation_that_is_called_while_others_are_ended_goes_on(
    service: Running, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet, busy = Talk(), Talk()
    quiet.says(service, "hi")
    busy.says(service, "ho")
    first, second = conversations(service)
    endings = service.app.state.live.endings
    end = endings._end

    async def called_meanwhile(held: str) -> None:
        if held == first:
            endings.enter(second)
            endings.leave(second)
        await end(held)

    monkeypatch.setattr(endings, "_end", called_meanwhile)
    idle(service, clock)
    assert complete(service) == [True, False]


def test_a_session_goes_on_in_its_next_part(service: Running, clock: Clock) -> None:
    for part in range(1, 4):
        told(say(service, "hi", headers=SESSION))
        told(say(service, "hi", headers=SESSION))
        found = service.pool.trajectory(conversations(service)[-1])
        assert (len(found), found.metadata) == (2, {"session": "s", "part": part})
        idle(service, clock)
    assert complete(service) == [True, True, True]


def test_sessions_that_an_outage_left_empty_go_without_rewriting_the_journal(
    rollout: Rollout, folder: Path, clock: Clock, tmp_path: Path
) -> None:
    with (
        DataPool(tmp_path / "journal", durability="os") as pool,
        in_front(rollout, folder, pool, open=True, session_idle_s=IDLE_S, clock=clock) as service,
    ):
        for n in range(4):
            rollout.script.append(answers(400, {"error": {"message": "no", "param": None, "code": 400}}))
            error_of(say(service, "hi", headers={"x-headrace-session": f"s{n}"}), 400)
        idle(service, clock)
        assert conversations(service) == []
        assert [event.detail["trajectory"] for event in pool.events() if event.kind == "forget"]
        assert not list((tmp_path / "journal").glob("*.snap"))


def test_an_answer_of_one_that_ended_can_still_be_gone_on_from(service: Running, clock: Clock) -> None:
    with openai.OpenAI(base_url=f"{service.address}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="m", input="hi")
        idle(service, clock)
        second = client.responses.create(model="m", input="more", previous_response_id=first.id)
        client.responses.create(model="m", input="still more", previous_response_id=second.id)
    assert lines(service) == [[None], [None, 0]]


def test_what_one_that_ended_answered_can_still_be_referred_to(service: Running, clock: Clock) -> None:
    """As the Vercel AI SDK goes on: with the ids of all the answers' items, whichever conversation gave them."""
    items: list[Any] = []
    with openai.OpenAI(base_url=f"{service.address}/v1", api_key="none", max_retries=0) as client:
        for turn in range(4):
            items.append({"role": "user", "content": f"turn {turn}"})
            answer = client.responses.create(model="m", input=items)
            items += [{"type": "item_reference", "id": item.id} for item in answer.output]
            if turn == 1:
                idle(service, clock)
    assert lines(service) == [[None, 0], [None, 0]]


# -- feedback ----------------------------------------------------------------------------------------------------------


def feedback(service: Running, response_id: str, reward: float = 1.0, **more: Any) -> Any:
    headers = more.pop("headers", None)
    return service.post("/v1/feedback", {"response_id": response_id, "reward": reward, **more}, headers=headers)


def rewards(service: Running, at: int = 0) -> list[float | None]:
    return [step.reward for step in service.steps(conversations(service)[at])]


def test_feedback_finds_its_step_in_every_dialect(service: Running) -> None:
    talk = Talk()
    for text in ("hi", "more", "still more"):
        talk.says(service, text)
    found = told(feedback(service, talk.ids[1], 0.5, comment="that helped"))
    assert found == {"status": "ok", "trajectory_uid": conversations(service)[0], "steps": 1}
    assert rewards(service) == [None, 0.5, None]
    assert service.steps(conversations(service)[0])[1].note == "that helped"
    asked: dict[str, dict[str, Any]] = {
        "messages": {"max_tokens": 8, "messages": [user("x")]},
        "responses": {"input": "x"},
        "completions": {"prompt": "x"},
    }
    for path, body in asked.items():
        answer = told(service.post(f"/v1/{path}", {"model": "m", **body}))
        assert told(feedback(service, answer["id"], -1))["status"] == "ok"
        assert rewards(service, -1) == [-1]


def test_every_choice_of_an_answer_is_paid(service: Running) -> None:
    answer = told(say(service, "hi", n=3))
    assert told(feedback(service, answer["id"]))["steps"] == 3
    assert rewards(service) == [1, 1, 1]


def test_feedback_is_in_time_until_a_trainer_has_it_and_says_so_after(service: Running, clock: Clock) -> None:
    talk = Talk()
    talk.says(service, "hi")
    idle(service, clock)
    assert told(feedback(service, talk.ids[0]))["status"] == "ok"
    batch = service.pool.fetch_batch(1, timeout=0, lease_s=3600)
    assert batch is not None
    assert batch.groups[0].rewards == [1]
    assert told(feedback(service, talk.ids[0], 0))["status"] == "late"
    batch.ack()
    assert told(feedback(service, talk.ids[0], 0, comment="too late"))["status"] == "late"


@pytest.mark.parametrize("response_id", ["", "x", "chatcmpl-" + "0" * 32, "../" * 20, "é" * 40])
def test_what_is_no_response_id_is_refused(service: Running, response_id: str) -> None:
    answer = feedback(service, response_id)
    assert answer.status_code == 400
    assert "/v1/reward" in answer.json()["detail"]


def test_feedback_on_an_answer_that_nobody_gave_is_404(service: Running) -> None:
    assert feedback(service, "chatcmpl-" + "0" * 40).status_code == 404
    assert feedback(service, "msg_" + "0" * 40, float("1e308")).status_code == 404
    assert service.post("/v1/feedback", b'{"response_id": "x", "reward": NaN}').status_code == 400


def test_feedback_needs_the_reward_key(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder, open=True, api_key="agent", reward_key="payer") as service:
        talk = Talk(headers=by("agent"))
        talk.says(service, "hi")
        assert feedback(service, talk.ids[0], headers=by("agent")).status_code == 401
        assert told(feedback(service, talk.ids[0], headers=by("payer")))["status"] == "ok"


def test_tenants_find_and_pay_only_their_own(rollout: Rollout, folder: Path, tmp_path: Path) -> None:
    rollout.reply = lambda asked: "ok"
    tenants = str(written(tmp_path, TENANTS))
    with in_front(rollout, folder, open=True, tenants=tenants) as service:
        alpha, beta = Talk(headers={**by("alpha-key")}), Talk(headers={**by("beta-key")})
        for text in ("hi", "more"):
            for talk in (alpha, beta):
                talk.says(service, text)
        for key in ("alpha-key", "beta-key"):
            told(say(service, "hi", headers={**SESSION, **by(key)}))
        assert lines(service) == [[None, 0], [None]]
        assert lines(service, "beta") == [[None, 0], [None]]
        assert feedback(service, beta.ids[0], headers=by("alpha-key")).status_code == 404
        assert told(feedback(service, beta.ids[0], headers=by("beta-reward")))["status"] == "ok"


# -- other processes ---------------------------------------------------------------------------------------------------


def test_a_restarted_gateway_goes_on_with_what_is_running(
    rollout: Rollout, folder: Path, tmp_path: Path, clock: Clock
) -> None:
    options: dict[str, Any] = {"open": True, "session_idle_s": IDLE_S, "clock": clock}
    talks = [Talk(), Talk(), Talk(headers=SESSION)]
    with DataPool(tmp_path) as pool, in_front(rollout, folder, pool, **options) as before:
        for talk in talks:
            talk.says(before, "hi")
    with DataPool(tmp_path) as pool, in_front(rollout, folder, pool, **options) as after:
        idle(after, clock, IDLE_S / 2)
        for talk in talks[1:]:
            talk.says(after, "more")
        assert lines(after) == [[None], [None, 0], [None, 0]]
        assert told(feedback(after, talks[0].ids[0], 0.25))["status"] == "ok"
        idle(after, clock, IDLE_S / 2)
        assert complete(after) == [True, False, False]
        assert rewards(after) == [0.25]
        idle(after, clock, IDLE_S / 2)
        assert complete(after) == [True, True, True]


def test_a_restarted_gateway_knows_texts_too(rollout: Rollout, folder: Path, pool: DataPool) -> None:
    prompt = "once upon a time " * 40
    found: list[list[int | None]] = []
    for _ in range(2):
        with in_front(rollout, folder, pool, open=True) as service:
            answer = told(service.post("/v1/completions", {"prompt": prompt, "max_tokens": 8}))
            prompt += answer["choices"][0]["text"] + " and"
            found = lines(service)
    assert found == [[None, 0]]


@contextmanager
def two(rollout: Rollout, folder: Path, clock: Clock) -> Iterator[tuple[Running, Running]]:
    """Two gateways on one pool elsewhere."""
    options: dict[str, Any] = {"open": True, "session_idle_s": IDLE_S, "clock": clock, "ack": "pool"}
    with (
        DataPool() as pool,
        serving(pool) as address,
        connect(address) as mine,
        connect(address) as yours,
        running_gateway(mine, rollout.address, folder, **options) as one,
        running_gateway(yours, rollout.address, folder, **options) as other,
    ):
        yield one, other


def test_a_conversation_goes_on_in_whichever_gateway_it_reaches(rollout: Rollout, folder: Path, clock: Clock) -> None:
    with two(rollout, folder, clock) as (one, other):
        talks = [Talk(), Talk(), Talk(headers=SESSION)]
        for text, gateway in (("hi", one), ("more", other), ("so", one), ("and", other), ("more", other)):
            for talk in talks:
                talk.says(gateway, text)
        assert lines(one) == [[None, 0, 1, 2, 3]] * 3


def test_two_that_are_alike_are_told_apart_wherever_they_went_on(rollout: Rollout, folder: Path, clock: Clock) -> None:
    with two(rollout, folder, clock) as (one, other):
        rollout.reply = lambda asked: "ok"
        mine, yours = Talk(), Talk()
        mine.says(one, "hi")
        yours.says(other, "hi")
        rollout.reply = lambda asked: f"answer {len(rollout.orders)}"
        yours.says(other, "more")
        yours.says(one, "so")  # its last answer is known to the other alone, its first looks like mine
        mine.says(other, "more")
        mine.says(one, "so")
        assert lines(one) == [[None, 0, 1]] * 2


def test_the_gateway_that_answered_last_ends_it(rollout: Rollout, folder: Path, clock: Clock) -> None:
    with two(rollout, folder, clock) as (one, other):
        talk = Talk()
        talk.says(one, "hi")
        idle(one, clock)  # it has been looked at once
        talk.says(other, "more")
        idle(one, clock, 0)
        clock.now += IDLE_S
        idle(one, clock, 0)
        assert complete(one) == [False]
        idle(other, clock, IDLE_S)
        idle(other, clock, IDLE_S)
        assert complete(one) == [True]
