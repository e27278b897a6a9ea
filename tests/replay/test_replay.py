"""What was recorded is served again, in every dialect; what was not is refused with where it differs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.kit import Running, await_ready, running_gateway, serving, told
from tests.gateway.rollout import Rollout, chat, content_of, in_front, uid_of, user

from headrace import DataPool
from headrace.dashboard.source import JournalFolder, RunningPool
from headrace.pool.remote import RemotePool
from headrace.replay.recorded import NotRecorded, RecordedAnswers, trajectories_of
from headrace.replay.server import RecordedServer
from headrace.tokens.vocabulary import Vocabulary, load_vocabulary

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> Vocabulary:
    return load_vocabulary(folder)


@pytest.fixture(scope="module")
def rollout(vocabulary: Vocabulary) -> Iterator[Rollout]:
    with Rollout(vocabulary, "<|im_end|>") as scripted:
        yield scripted


@contextmanager
def replaying(pool: DataPool | RemotePool, vocabulary: Vocabulary, folder: Path) -> Iterator[Running]:
    """A gateway in front of what a pool recorded."""
    answers = RecordedAnswers(trajectories_of(RunningPool(pool, "here"), None, None), vocabulary)
    with (
        serving(RecordedServer(answers, vocabulary).app) as address,
        DataPool() as empty,
        running_gateway(empty, address, folder, open=True) as gateway,
    ):
        yield gateway


def two_turns(gateway: Running, base: str, **fields: Any) -> list[str]:
    """An agent that asks, and asks again with the answer in its history."""
    talk = [user("2 + 2?")]
    first = told(chat(gateway, base, talk, **fields))["choices"][0]["message"]
    talk += [{"role": "assistant", "content": first["content"]}, user("sure?")]
    second = told(chat(gateway, base, talk, **fields))["choices"][0]["message"]
    return [first["content"], second["content"]]


def test_an_agent_that_runs_again_gets_the_same_answers_token_by_token(
    rollout: Rollout, vocabulary: Vocabulary, folder: Path
) -> None:
    rollout.script.extend(["it is four", "quite"])
    with in_front(rollout, folder) as gateway:
        base = gateway.init()["base_url"]
        said = two_turns(gateway, base)
        before = gateway.pool.trajectory(uid_of(base)).steps
        with replaying(gateway.pool, vocabulary, folder) as again:
            other = again.init()["base_url"]
            assert two_turns(again, other) == said == ["it is four", "quite"]
            after = again.pool.trajectory(uid_of(other)).steps
    for old, new in zip(before, after, strict=True):
        assert old.prompt_ids.tolist() == new.prompt_ids.tolist()
        assert old.response_ids.tolist() == new.response_ids.tolist()
        assert old.rollout_log_probs is not None
        assert new.rollout_log_probs is not None
        assert old.rollout_log_probs.tolist() == new.rollout_log_probs.tolist()
        assert new.quarantined is None


def test_every_dialect_is_answered_streamed_and_whole(rollout: Rollout, vocabulary: Vocabulary, folder: Path) -> None:
    rollout.script.extend([f"let me see {CALL}", "plain"])
    with in_front(rollout, folder) as gateway:
        base = gateway.init()["base_url"]
        asked = [user("add 2 and 2")]
        recorded = told(chat(gateway, base, asked, tools=TOOLS))["choices"][0]["message"]
        told(chat(gateway, gateway.init()["base_url"], "hello"))
        with replaying(gateway.pool, vocabulary, folder) as again:
            found = told(chat(again, again.init()["base_url"], asked, tools=TOOLS))["choices"][0]["message"]
            assert found["tool_calls"][0]["function"] == recorded["tool_calls"][0]["function"]
            streamed = chat(again, again.init()["base_url"], "hello", stream=True)
            assert content_of(streamed.text) == "plain"
            base = again.init()["base_url"]
            answer = told(again.post(f"{base}/v1/responses", {"model": "m", "input": "hello"}))
            assert answer["output"][-1]["content"][0]["text"] == "plain"
            body = {"model": "m", "max_tokens": 100, "messages": [user("hello")]}
            answer = told(again.post(f"{again.init()['base_url']}/v1/messages", body))
            assert answer["content"][0]["text"] == "plain"
            answer = told(again.post("/v1/chat/completions", {"model": "m", "messages": [user("hello")]}))
            assert answer["choices"][0]["message"]["content"] == "plain"


def test_a_call_that_was_not_recorded_is_409_with_the_first_difference(
    rollout: Rollout, vocabulary: Vocabulary, folder: Path
) -> None:
    rollout.script.append("fine")
    with in_front(rollout, folder) as gateway:
        base = gateway.init()["base_url"]
        told(chat(gateway, base, "how are you today"))
        uid = uid_of(base)
        with replaying(gateway.pool, vocabulary, folder) as again:
            answer = chat(again, again.init()["base_url"], "how are they today")
            assert answer.status_code == 409
            said = answer.json()["error"]["message"]
            assert f"The nearest is step 0 of trajectory {uid!r}" in said
            recorded, asked = said.split("Then the recording has ")[1].split(", and this call ")
            assert "you" in recorded
            assert "they" in asked
            body = {"model": "m", "max_tokens": 100, "messages": [user("hello")]}
            answer = again.post(f"{again.init()['base_url']}/v1/messages", body)
            assert answer.status_code == 409
            assert answer.json()["type"] == "error"


def test_the_rollouts_of_one_prompt_come_in_turn(rollout: Rollout, vocabulary: Vocabulary, folder: Path) -> None:
    rollout.script.extend(["one", "two", "three"])
    with in_front(rollout, folder) as gateway:
        for _ in range(3):
            told(chat(gateway, gateway.init()["base_url"], "count"))
        prompt = gateway.pool.trajectory(gateway.pool.list_trajectories()["items"][0]["trajectory_uid"]).steps[0]
        source = RunningPool(gateway.pool, "here")
        answers = RecordedAnswers(trajectories_of(source, None, None), vocabulary)
        texts = [vocabulary.decode(answers.next(prompt.prompt_ids).ids, skip_special=True) for _ in range(4)]
        assert texts == ["one", "two", "three", "one"]
        first = [answers.next(prompt.prompt_ids).trajectory_uid for _ in range(1)]
        only = RecordedAnswers(trajectories_of(source, "train", first[0]), vocabulary)
        assert (len(only), only.steps) == (1, 1)
    with pytest.raises(NotRecorded, match="nothing is recorded here"):
        RecordedAnswers([], vocabulary).next([1])


@pytest.mark.system
def test_the_command_serves_a_journal_also_what_was_trained_on(rollout: Rollout, folder: Path, tmp_path: Path) -> None:
    rollout.script.append("kept")
    with DataPool(tmp_path / "journal", durability="os") as pool, in_front(rollout, folder, pool) as gateway:
        base = gateway.init()["base_url"]
        told(chat(gateway, base, "hello"))
        told(gateway.post(f"{base}/v1/complete_trajectory", {"reward": 1.0}))
        pool.fetch_batch(1, timeout=0)
    assert JournalFolder(tmp_path / "journal").stats()["ledger"]["consumed"] == 1
    command = ["replay", str(tmp_path / "journal"), "--port", "0", "--tokenizer-path", str(folder)]
    with subprocess.Popen([sys.executable, "-m", "headrace", *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("replay ready on http://127.0.0.1:")
            address = line.split()[3]
            await_ready(address)
            body = {"model": "m", "messages": [user("hello")]}
            answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=120, trust_env=False)
            assert answer.json()["choices"][0]["message"]["content"] == "kept"
        finally:
            process.terminate()
    assert process.returncode == 0
