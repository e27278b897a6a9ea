"""Checkups of what is built here: a gateway, whose every dialect is exact, and a bare engine, whose chat is not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.engine.kit import Client
from tests.gateway.kit import running_gateway
from tests.gateway.rollout import Rollout, Say, in_front, scripted

from headrace import DataPool
from headrace.checkup import CheckReport, Verdict, checkup

DIALECTS = ["chat", "completions", "responses", "messages"]


def of(report: CheckReport, check: str) -> dict[str, tuple[Verdict, str]]:
    """What a check found, by dialect."""
    return {each.dialect: (each.verdict, each.cause) for each in report.findings if each.check == check}


def test_a_gateway_on_an_engine_is_exact_in_every_dialect(engine: Client, folder: Path) -> None:
    with DataPool() as pool, running_gateway(pool, f"http://{engine.host}", folder) as gateway:
        report = asyncio.run(checkup(f"{gateway.address}/v1"))
        channels = set(pool.stats()["channels"])
    assert report.exact, report
    assert report.kind == "headrace gateway"
    assert of(report, "ids") == dict.fromkeys(DIALECTS, (Verdict.OK, "exact"))
    assert of(report, "drift") == dict.fromkeys(["chat", "responses", "messages"], (Verdict.OK, "prefix"))
    assert of(report, "streaming") == dict.fromkeys(DIALECTS, (Verdict.OK, "same"))
    assert of(report, "versions") == dict.fromkeys(DIALECTS, (Verdict.OK, "told"))
    assert of(report, "log-probs") == dict.fromkeys(["chat", "completions"], (Verdict.OK, "processed"))
    assert of(report, "n") == dict.fromkeys(["chat", "completions"], (Verdict.OK, "sampled"))
    assert channels == {"checkup"}, "a checkup must not come into anybody's batches"


def test_a_bare_engine_tells_its_ids_and_encodes_answers_again(engine: Client) -> None:
    report = asyncio.run(checkup(f"http://{engine.host}"))
    assert not report.exact
    assert report.kind == "OpenAI-compatible server"
    assert of(report, "ids") == dict.fromkeys(["chat", "completions"], (Verdict.OK, "exact"))
    assert "retokenized" in report.causes("drift")
    assert {each.check for each in report.findings if each.verdict == Verdict.BAD} == {"drift"}
    assert report.causes("versions", Verdict.NOTE) == ["beside"]


def test_a_gateway_brings_calls_back_as_they_were_sampled_in_every_dialect(folder: Path) -> None:
    with scripted(folder) as rollout:
        rollout.reply = lambda asked: Say(ids=_odd(rollout, _line(rollout, asked)))
        with in_front(rollout, folder) as gateway:
            report = asyncio.run(checkup(gateway.address, dialects=["chat", "responses", "messages"]))
    assert of(report, "tools") == dict.fromkeys(["chat", "responses", "messages"], (Verdict.OK, "prefix"))


def test_what_an_agent_s_key_does_not_open_is_said(engine: Client, folder: Path) -> None:
    with (
        DataPool() as pool,
        running_gateway(pool, f"http://{engine.host}", folder, api_key="agent", admin_key="admin") as gateway,
    ):
        agent = asyncio.run(checkup(gateway.address, api_key="agent", dialects=["chat", "messages"]))
        admin = asyncio.run(checkup(gateway.address, api_key="agent", admin_key="admin", dialects=["messages"]))
    assert agent.exact
    assert of(agent, "ids") == {"chat": (Verdict.OK, "exact"), "messages": (Verdict.NOTE, "closed")}
    assert of(admin, "ids") == {"messages": (Verdict.OK, "exact")}


def _line(rollout: Rollout, asked: Any) -> str:
    """What the scripted model says: a call where it is asked for one, then what it came to."""
    prompt = rollout.vocabulary.decode(asked["prompt"])
    if "<|im_start|>tool" in prompt:
        return "It is 5."
    return '<tool_call>{"name":"add", "arguments":{"b":3,"a":2}}</tool_call>' if "# Tools" in prompt else "The end."


def _odd(rollout: Rollout, text: str) -> list[int]:
    """A text in ids that no encoder would choose: each character by itself, but for the marks of a call."""
    found: list[int] = []
    for part in text.replace("<tool_call>", "\0<\0").replace("</tool_call>", "\0>\0").split("\0"):
        mark = {"<": "<tool_call>", ">": "</tool_call>"}.get(part)
        found += rollout.vocabulary.encode(mark) if mark else [i for c in part for i in rollout.vocabulary.encode(c)]
    return found
