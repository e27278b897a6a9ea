"""`headrace gateway` and `headrace serve`: what is refused before anything starts, and what is said."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.cli.command import Command, spawn

NEEDED = ("--vllm-addresses", "http://127.0.0.1:1", "--tokenizer-path", "nowhere")
WRONG = {
    "no address": (
        ("gateway", "--vllm-addresses", "foo", "--tokenizer-path", "x"),
        "--vllm-addresses: 'foo' is no address",
    ),
    "twice": (
        ("gateway", "--vllm-addresses", "http://a:1,http://a:1/", "--tokenizer-path", "x"),
        "names a server twice",
    ),
    "ray without lengths": (
        ("gateway", *NEEDED, "--data-pool-name", "data_pool", "--response-length", "8"),
        "headrace: with --data-pool-name, --prompt-length must be given too",
    ),
    "two pools": (
        (
            *("gateway", *NEEDED, "--data-pool-name", "p", "--prompt-length", "8", "--response-length", "8"),
            *("--pool-address", "http://a:1"),
        ),
        "name two pools",
    ),
    "serve elsewhere": (("serve", *NEEDED, "--data-pool-name", "p"), "serve has its pool embedded"),
    "sampling": (("serve", *NEEDED, "--sampling", "train"), "should be CHANNEL:name=value"),
    "history": (("serve", *NEEDED, "--history", "glue"), "--history"),
}


@pytest.mark.parametrize(("args", "said"), WRONG.values(), ids=WRONG)
def test_what_could_not_work_is_refused_by_its_flag(headrace: Command, args: tuple[str, ...], said: str) -> None:
    done = headrace(*args)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_port_that_is_taken_is_named_and_the_journal_let_go(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = spawn("serve", *NEEDED, "--host", "127.0.0.1", "--port", port, "--journal", str(tmp_path / "journal"))
    assert done.code == 1
    assert done.err == f"headrace: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
