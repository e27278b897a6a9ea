"""A gateway keeps nothing that is not in the pool: others go on where it stopped, with the same exact tokens.

Processes are real and are killed: no half step, no lost acknowledged step, no duplicate.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.gateway.kit import Running, await_ready, running_gateway, told, tree
from tests.gateway.rollout import RETRY, Rollout, Say, chat, content_of, error_of, in_front, user
from tests.pool.servers import ServedPool, serving

from headrace import DataPool
from headrace.gateway.planner import Planner
from headrace.pool.connect import connect


@pytest.fixture
def rollout(rollout: Rollout) -> Rollout:
    rollout.reply = lambda asked: f"answer {len(rollout.orders)}"
    return rollout


class Child:
    """`python -m headrace.gateway` as a process of its own."""

    def __init__(self, rollout: Rollout, folder: Path, journal: Path, *flags: str) -> None:
        module = [sys.executable, "-m", "headrace.gateway", "--host", "127.0.0.1", "--port", "0"]
        where = ["--vllm-addresses", rollout.address, "--tokenizer-path", str(folder), "--journal", str(journal)]
        self.process = subprocess.Popen([*module, *where, *flags], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line.startswith("gateway listening on http://"), line
        self.address = line.rpartition(" ")[2]
        await_ready(self.address)
        self.http = httpx.Client(base_url=self.address, timeout=240, trust_env=False)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def base(self, uid: str) -> str:
        return f"{self.address}/{uid}/{uid}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(120)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def child(rollout: Rollout, folder: Path, journal: Path, *flags: str) -> Iterator[Child]:
    found = Child(rollout, folder, journal, *flags)
    try:
        yield found
    finally:
        found.close()


def prompts(rollout: Rollout) -> list[list[int]]:
    return [order["prompt"] for order in rollout.orders]


# -- processes that are killed -----------------------------------------------------------------------------------------


@pytest.mark.system
def test_what_was_answered_survives_a_kill_and_what_was_not_leaves_nothing(
    rollout: Rollout, folder: Path, tmp_path: Path
) -> None:
    """Killed with one call read by halves, one held upstream, one in mid-stream, and one at its last event."""
    with child(rollout, folder, tmp_path) as gateway, ExitStack() as under_way:
        uid = told(gateway.post("/init_trajectory"))["trajectory_uid"]
        url = f"{gateway.base(uid)}/v1/chat/completions"
        first = {"model": "m", "messages": [user("hi")]}
        whole = told(gateway.post(url, first))

        where = urlsplit(url)
        head = f"POST {where.path} HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-length: "
        half = under_way.enter_context(socket.create_connection((where.hostname, where.port)))
        half.sendall(f"{head}99\r\n\r\n{{".encode())
        held, cut = rollout.gate(), rollout.gate()
        rollout.script += [Say(at=held), Say("one two three four", after=(5, cut))]
        waiting = under_way.enter_context(socket.create_connection((where.hostname, where.port)))
        body = json.dumps({"messages": [user("held")]})
        waiting.sendall(f"{head}{len(body)}\r\n\r\n{body}".encode())
        held.reached()
        streamed = {"messages": [user("cut")], "stream": True}
        stream = under_way.enter_context(httpx.stream("POST", url, json=streamed, timeout=240, trust_env=False))
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        cut.reached()

        second = {"model": "m", "messages": [user("hi"), whole["choices"][0]["message"], user("more")], "stream": True}
        said = ""
        with httpx.stream("POST", url, json=second, timeout=240, trust_env=False) as answer:
            for line in answer.iter_lines():
                choice = json.loads(line[6:])["choices"][0] if line.startswith("data: {") else None
                said += (choice["delta"].get("content") or "") if choice is not None else ""
                if choice is not None and choice["finish_reason"]:
                    gateway.kill()  # the agent has seen how it ended: its step must be there
                    break
        with pytest.raises(httpx.TransportError):
            list(lines)
    answered = [prompts(rollout)[0], prompts(rollout)[-1]]

    with DataPool(tmp_path) as pool, in_front(rollout, folder, pool) as after:
        steps = after.steps(uid)
        assert [step.prompt_ids.tolist() for step in steps] == answered
        assert [step.step_index for step in steps] == [0, 1]
        base = f"{after.address}/{uid}/{uid}"
        # The answer may have been lost on its way: asked for again, it is the same, and no step.
        repeated = told(chat(after, base, first["messages"], headers=RETRY))
        assert {**repeated, "created": 0} == {**whole, "created": 0}  # a recorded answer was created when it was whole
        again = chat(after, base, second["messages"], stream=True, headers=RETRY)
        assert content_of(again.text) == said
        assert len(after.steps(uid)) == 2
        # And the conversation goes on, bit for bit.
        told(chat(after, base, [*second["messages"], {"role": "assistant", "content": said}, user("go on")]))
        told(chat(after, base, "held"))
        assert tree(after.steps(uid)) == [None, 0, 1, None]
        assert after.complete(uid, reward=1.0) == {"status": "ok", "steps": 4}


@pytest.mark.system
def test_sigterm_lets_a_call_under_way_end_and_keeps_its_step(rollout: Rollout, folder: Path, tmp_path: Path) -> None:
    gate = rollout.gate()
    with child(rollout, folder, tmp_path) as gateway, ThreadPoolExecutor(2) as threads:
        uid = told(gateway.post("/init_trajectory"))["trajectory_uid"]
        url = f"{gateway.base(uid)}/v1/chat/completions"
        rollout.reply = lambda asked: Say("x y z", **({"after": (3, gate)} if asked.get("stream") else {"at": gate}))
        calls = [
            threads.submit(httpx.post, url, json={"messages": [user("hi")], "stream": s}, timeout=240, trust_env=False)
            for s in (True, False)
        ]
        rollout.until(lambda: len(rollout.orders) == 2)
        gate.reached()
        gateway.process.send_signal(signal.SIGTERM)
        refused = _refuses(gateway)
        gate.open()
        both = [call.result(240) for call in calls]
        assert both[0].text.endswith("data: [DONE]\n\n")
        assert both[1].json()["choices"][0]["message"]["content"] == "x y z"
        assert gateway.process.wait(120) == 0
        assert refused
    with DataPool(tmp_path) as pool:
        assert [step.step_index for step in pool.trajectory(uid).steps] == [0, 1]


def _refuses(gateway: Child) -> bool:
    """Whether new connections are refused, waited for as long as it takes."""
    where = urlsplit(gateway.address)
    for _ in range(30_000):
        try:
            socket.create_connection((where.hostname, where.port), timeout=5).close()
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.system
def test_the_outbox_of_a_killed_gateway_is_sent_by_the_next_one(rollout: Rollout, folder: Path, tmp_path: Path) -> None:
    with ServedPool(tmp_path / "pool") as served:
        with child(rollout, folder, tmp_path / "mine", "--pool-address", served.address) as gateway:
            uid = told(gateway.post("/init_trajectory"))["trajectory_uid"]
            messages: list[Any] = [user("hi")]
            for turn in range(4):
                if turn == 2:
                    served.kill()
                body = {"model": "m", "messages": messages}
                answer = told(gateway.post(f"/{uid}/{uid}/v1/chat/completions", body))
                messages += [answer["choices"][0]["message"], user(f"turn {turn}")]
            gateway.kill()
        served.start()
        with (
            connect(served.address) as pool,
            running_gateway(pool, rollout.address, folder, outbox_file=tmp_path / "mine" / "outbox") as after,
        ):
            told(chat(after, f"{after.address}/{uid}/{uid}", messages))
            shown = told(after.get(f"/trajectories/{uid}"))  # with all that was handed over
            assert [step["prompt_ids"] for step in shown["steps"]] == prompts(rollout)
            assert tree(after.steps(uid)) == [None, 0, 1, 2, 3]


# -- several at once ---------------------------------------------------------------------------------------------------


@contextmanager
def two_gateways(rollout: Rollout, folder: Path) -> Iterator[list[Running]]:
    """Two gateways on one pool that runs elsewhere."""
    with DataPool() as pool, serving(pool) as address, ExitStack() as stack:
        yield [
            stack.enter_context(
                running_gateway(stack.enter_context(connect(address)), rollout.address, folder, ack="pool")
            )
            for _ in range(2)
        ]


def test_a_conversation_may_change_its_gateway_at_every_turn(
    rollout: Rollout, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the second that a call waits for it, a busy machine may not have read what the other sampled.
    monkeypatch.setattr(Planner._refresh, "__defaults__", (240,))
    with two_gateways(rollout, folder) as gateways:
        uid = gateways[0].init()["trajectory_uid"]
        messages: list[Any] = [user("hi")]
        text = "Once"
        for turn in range(6):
            gateway = gateways[turn % 2]
            base = f"{gateway.address}/{uid}/{uid}"
            answer = told(chat(gateway, base, messages))["choices"][0]["message"]
            messages = [*messages, answer, user(f"turn {turn}")]
            body = {"prompt": text, "max_tokens": 64}
            text += told(gateway.post(f"{base}/v1/completions", body))["choices"][0]["text"] + " and"
        steps = gateways[0].steps(uid)
        assert [step.prompt_ids.tolist() for step in steps] == prompts(rollout)
        assert tree(steps) == [None, None, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_calls_through_two_gateways_never_share_an_index(rollout: Rollout, folder: Path) -> None:
    with two_gateways(rollout, folder) as gateways, ThreadPoolExecutor(8) as threads:
        uid = gateways[0].init()["trajectory_uid"]

        def call(number: int) -> int:
            url = f"{gateways[number % 2].address}/{uid}/{uid}/v1/chat/completions"
            body = {"messages": [user(f"call {number}")]}
            return httpx.post(url, json=body, timeout=240, trust_env=False).status_code

        assert list(threads.map(call, range(24))) == [200] * 24
        assert [step.step_index for step in gateways[1].steps(uid)] == list(range(24))


def test_a_completion_through_one_gateway_is_seen_by_the_other(rollout: Rollout, folder: Path) -> None:
    """Its next call is refused, or its step is late; either way nothing is added to what was completed."""
    with two_gateways(rollout, folder) as (one, other):
        uid = one.init()["trajectory_uid"]
        told(chat(one, f"{one.address}/{uid}/{uid}", "hi"))
        other.complete(uid, reward=1.0)
        chat(one, f"{one.address}/{uid}/{uid}", "more")
        assert len(other.steps(uid)) == 1
        assert error_of(chat(one, f"{one.address}/{uid}/{uid}", "more still"), 409)["code"] == "trajectory_complete"
        assert len(other.steps(uid)) == 1


def test_a_trajectory_that_was_consumed_through_one_gateway_is_gone_for_the_other(
    rollout: Rollout, folder: Path
) -> None:
    """Where the other has to ask the pool, for a history that it does not know; whether it is to be recorded or not."""
    with two_gateways(rollout, folder) as (one, other):
        uid = one.init()["trajectory_uid"]
        told(chat(one, f"{one.address}/{uid}/{uid}", "hi"))
        other.complete(uid, reward=1.0)
        assert other.pool.fetch_batch(1, timeout=60) is not None
        history = [user("hi"), {"role": "assistant", "content": "never said"}, user("more")]
        for headers in ({}, {"x-headrace-record": "off"}):
            found = error_of(chat(one, f"{one.address}/{uid}/{uid}", history, headers=headers), 409)
            assert found["code"] == "trajectory_complete"
        assert len(rollout.orders) == 1


def test_a_session_that_was_forgotten_is_read_again(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder, cached_tokens=0) as gateway:
        bases = [gateway.init()["base_url"] for _ in range(3)]
        messages: dict[str, list[Any]] = {base: [user("hi")] for base in bases}
        for _ in range(3):
            for base in bases:
                answer = told(chat(gateway, base, messages[base]))["choices"][0]["message"]
                messages[base] = [*messages[base], answer, user("more")]
        assert gateway.counted("sessions")["tokens"] == 0
        for base in bases:
            assert tree(gateway.steps(base.split("/")[3])) == [None, 0, 1]
