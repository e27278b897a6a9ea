"""A model whose tool calls cannot be read takes calls, and says wherever one looks that agents miss their tools."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gateway.kit import Running, told
from tests.gateway.rollout import Rollout, in_front, scripted
from tests.tokens.kit import LOOK_UP

from headrace.checkup import checkup

#: Turns as `tiny` marks them. Of calls it writes names and keys, and no value that could be read.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "({{ call.function.name }}: {{ call.function.arguments | list }})"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WARNING = "tool calls in answers are not read"


@pytest.fixture(scope="module")
def speechless(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template writes calls that nobody could read."""
    found = tmp_path_factory.mktemp("speechless") / "model"
    shutil.copytree(folder, found)
    config = found / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    fields.pop("chat_template", None)
    config.write_text(json.dumps(fields))
    (found / "chat_template.jinja").write_text(TEMPLATE)
    return found


@pytest.fixture
def begun(speechless: Path, caplog: pytest.LogCaptureFixture) -> Iterator[tuple[Running, Rollout]]:
    caplog.set_level(logging.WARNING, "headrace.gateway")
    with scripted(speechless) as rollout, in_front(rollout, speechless) as gateway:
        yield gateway, rollout


def test_it_is_said_at_the_start_and_to_agents_with_tools(
    begun: tuple[Running, Rollout], caplog: pytest.LogCaptureFixture
) -> None:
    gateway, rollout = begun
    ready = told(gateway.get("/ready"))
    assert ready["status"] == "ready"
    (warning,) = ready["warnings"]
    assert warning.startswith(WARNING)
    assert [record.getMessage() for record in caplog.get_records("setup")] == [warning]
    assert "headrace_gateway_calls_unread 1.0" in gateway.get("/metrics").text
    assert WARNING in gateway.get("/", headers={"accept": "text/html"}).text

    base = gateway.init()["base_url"]
    written = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
    rollout.script += [written] * 4
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    path = f"{base}/v1/chat/completions"
    for stream in (False, True):
        answer = gateway.post(path, {**asked, "tools": [LOOK_UP], "stream": stream})
        assert answer.status_code == 200
        assert answer.headers["x-headrace-warning"] == " ".join(warning.split())
    assert told(gateway.post(path, {**asked, "tools": [LOOK_UP]}))["choices"][0]["message"]["content"] == written
    assert "x-headrace-warning" not in gateway.post(path, asked).headers
    assert sum("an agent offers tools" in record.getMessage() for record in caplog.records) == 1

    refused = gateway.post(path, {**asked, "tools": [LOOK_UP], "tool_choice": "required"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tool_choice"


def test_check_gateway_says_it(begun: tuple[Running, Rollout]) -> None:
    gateway, _ = begun
    report = asyncio.run(checkup(gateway.address, dialects=["chat"]))
    (finding,) = [finding for finding in report.findings if finding.check == "tools"]
    assert (finding.cause, finding.verdict) == ("calls_unread", "note")
    assert finding.said.startswith(WARNING)


def test_a_model_whose_calls_are_read_warns_of_nothing(common: Running) -> None:
    assert told(common.get("/ready")) == {"status": "ready"}
    assert "headrace_gateway_calls_unread 0.0" in common.get("/metrics").text
