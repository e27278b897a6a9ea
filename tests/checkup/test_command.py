"""`headrace check-gateway`: what it prints, what it writes and how it ends."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from starlette.applications import Starlette
from tests.checkup.speaker import Speaker
from tests.cli.command import Command
from tests.gateway.kit import serving


def test_an_exact_server_ends_with_0_and_a_line_a_finding(headrace: Command, tmp_path: Path) -> None:
    with serving(Speaker().app) as address:
        done = headrace("check-gateway", address, "--dialects", "chat", "--json", tmp_path / "found.json")
    assert (done.code, done.err) == (0, "")
    *lines, last = done.out.splitlines()
    assert last == f"{address} (OpenAI-compatible server, speaker): trainable exactly"
    written = json.loads((tmp_path / "found.json").read_bytes())
    assert written["exact"] is True
    named = [[each[name] for name in ("dialect", "check", "verdict", "cause")] for each in written["findings"]]
    assert [line.split("\t")[:4] for line in lines] == named
    assert ["chat", "drift", "ok", "prefix"] in named


def test_a_server_that_drifts_ends_with_1(headrace: Command) -> None:
    with serving(Speaker("strips_reasoning").app) as address:
        done = headrace("check-gateway", address, "--dialects", "chat")
    assert done.code == 1
    assert "chat\tdrift\tbad\treasoning_stripped\t" in done.out
    assert done.out.endswith("not trainable exactly\n")


def test_where_findings_cannot_be_written_nothing_is_asked(headrace: Command, tmp_path: Path) -> None:
    for place, said in ((tmp_path / "missing" / "x.json", f"no folder {tmp_path / 'missing'}"), (tmp_path, "a folder")):
        done = headrace("check-gateway", "http://127.0.0.1:9", "--json", place)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"headrace: {place} cannot be written: ")
        assert said in done.err


def test_nobody_there_ends_with_2(headrace: Command) -> None:
    with socket.socket() as taken:  # bound and not listening: whoever connects is refused
        taken.bind(("127.0.0.1", 0))
        done = headrace("check-gateway", f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("headrace: out of reach: http://127.0.0.1")


def test_a_server_of_something_else_ends_with_2(headrace: Command) -> None:
    with serving(Starlette()) as address:
        done = headrace("check-gateway", address)
    assert done.code == 2
    assert "--model" in done.err


def test_bad_usage_names_what_would_be_right(headrace: Command) -> None:
    done = headrace("check-gateway", "http://127.0.0.1:1", "--dialects", "chat,latin")
    assert done.code == 2
    assert "no dialect 'latin'; there are chat,completions,responses,messages" in done.err
    assert "must begin with http://" in headrace("check-gateway", "127.0.0.1:1").err
