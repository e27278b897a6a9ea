"""A function of the user's that looks at every step before it is kept: it drops, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.kit import Running, tokens, told
from tests.gateway.rollout import Rollout, chat, content_of, in_front, user

from headrace.data.errors import InvalidInput
from headrace.gateway import Settings
from headrace.gateway.redaction import load_hook

HOOK = """
import asyncio

seen = []

def keep(step):
    seen.append(step)
    said = step.metadata.get("model") or step.metadata.get("say")
    if said == "raise":
        raise ZeroDivisionError("as told")
    if said == "edit":
        step.metadata["model"] = "changed"
        step.prompt_ids[0] = 7
    if said == "odd":
        return "yes"
    if said == "number":
        return 0
    return False if said == "drop" else None

async def later(step):
    await asyncio.sleep(0)
    return step.metadata.get("model") != "drop"
"""


@contextmanager
def redacting(rollout: Rollout, folder: Path, tmp: Path, function: str = "keep") -> Iterator[Running]:
    (tmp / "rules.py").write_text(HOOK)
    with in_front(rollout, folder, redact=f"{tmp}/rules.py:{function}") as gateway:
        yield gateway


def talk(gateway: Running, base: str, models: list[str], **fields: Any) -> None:
    """A conversation in which each turn names what is to become of its step."""
    said: list[dict[str, Any]] = []
    for at, model in enumerate(models):
        said.append(user(f"turn {at}"))
        answer = chat(gateway, base, said, model=model, **fields)
        assert answer.status_code == 200
        content = content_of(answer.text) if fields.get("stream") else answer.json()["choices"][0]["message"]["content"]
        said.append({"role": "assistant", "content": content})


@pytest.mark.parametrize("stream", [False, True])
def test_a_dropped_step_is_kept_nowhere_and_the_conversation_goes_on_exactly(
    rollout: Rollout, folder: Path, tmp_path: Path, stream: bool
) -> None:
    with redacting(rollout, folder, tmp_path) as gateway:
        begun = gateway.init()
        talk(gateway, begun["base_url"], ["a", "drop", "b", "c", "drop"], stream=stream)
        steps = gateway.steps(begun["trajectory_uid"])
        orders = rollout.orders
        assert [step.metadata["model"] for step in steps] == ["a", "b", "c"]
        assert [step.prompt_ids.tolist() for step in steps] == [orders[at]["prompt"] for at in (0, 2, 3)]
        assert steps[2].prompt_ids.tolist()[: len(tokens(steps[1]))] == tokens(steps[1])
        assert gateway.complete(begun["trajectory_uid"], reward=1) == {"status": "ok", "steps": 3}
        (group,) = gateway.pool.fetch_batch(1).groups
        assert [(len(found), found.reward) for found in group.trajectories] == [(3, 1)]
        assert gateway.counted("redacted") == {"train": {"dropped": 2}}
        assert gateway.counted("steps") == {"train": 3}


@pytest.mark.parametrize("model", ["raise", "odd", "number", "edit"])
def test_a_function_that_fails_drops_the_step_and_never_the_call(
    rollout: Rollout, folder: Path, tmp_path: Path, model: str
) -> None:
    with redacting(rollout, folder, tmp_path) as gateway:
        begun = gateway.init()
        talk(gateway, begun["base_url"], [model, "a"])
        (step,) = gateway.steps(begun["trajectory_uid"])
        assert (step.metadata["model"], step.prompt_ids.tolist()) == ("a", rollout.orders[1]["prompt"])
        assert gateway.counted("redacted") == {"train": {"error": 1}}


def test_a_function_may_be_async(rollout: Rollout, folder: Path, tmp_path: Path) -> None:
    with redacting(rollout, folder, tmp_path, "later") as gateway:
        begun = gateway.init()
        talk(gateway, begun["base_url"], ["drop", "a"])
        assert len(gateway.steps(begun["trajectory_uid"])) == 1


def test_of_a_submitted_step_that_is_dropped_only_its_place_is_kept_and_the_trajectory_ends(
    rollout: Rollout, folder: Path, tmp_path: Path
) -> None:
    with redacting(rollout, folder, tmp_path) as gateway:
        steps = [
            {"prompt_ids": [50 + at], "response_ids": [60 + at], "trajectory_uid": "t", "step_index": at}
            | {"metadata": {"say": say}, "is_last": at == 2}
            for at, say in enumerate(["keep", "drop", "raise"])
        ]
        steps[2]["reward"] = 4.0
        for again in ({"accepted": 3}, {"accepted": 0, "duplicates": 3}):
            said = told(gateway.post("/submit_steps", {"steps": steps}))
            assert said["redacted"] == 2
            assert {name: said[name] for name in again} == again
        found = gateway.pool.trajectory("t")
        assert (found.complete, found.reward) == (True, 4)
        assert [step.quarantined for step in found.steps] == [None, "redacted", "redacted"]
        assert not {51, 61, 52, 62} & {token for step in found.steps for token in tokens(step)}
        (step,) = gateway.pool.fetch_batch(1).steps
        assert tokens(step) == [50, 60]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere.py:keep", "nowhere.py cannot be imported"),
        ("no.such.module:keep", "no.such.module cannot be imported"),
        ("json:keep", "json has no function 'keep'"),
    ],
)
def test_a_function_that_is_not_there_is_named(spec: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        load_hook(spec)


@pytest.mark.parametrize("spec", ["rules", ":keep", "rules:", "rules:a b"])
def test_a_name_that_is_none_is_refused_with_the_setting(spec: str) -> None:
    with pytest.raises(ValueError, match=r"module:function or file\.py:function"):
        Settings(vllm_addresses="http://a:1", tokenizer_path="x", redact=spec)
