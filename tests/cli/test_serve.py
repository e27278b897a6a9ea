"""`headrace pool serve` as people run it: a process that is stopped, killed, started again, and asked by others."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path

import httpx
import pytest
from tests.cli.command import Command, Served, spawn, steps

from headrace import DataPool, HeadraceError, Step, connect
from headrace.pool.errors import DiskFull, Unauthorized
from headrace.pool.readonly import JournalView


def test_what_was_acknowledged_outlives_kill_9(headrace: Command, tmp_path: Path) -> None:
    with Served("--journal", tmp_path / "journal", "--channel", "train:n_rollouts=2,max_queue_size=50") as server:
        with connect(server.address) as pool:
            pool.submit_steps([*steps("a", 0), *steps("a", 1), *steps("b", 0)])
            batch = pool.fetch_batch(1, lease_s=600, timeout=60)
            before = json.loads(headrace("pool", "stats", server.address, "--json").out)
        server.end(signal.SIGKILL)

        at_rest = json.loads(headrace("pool", "stats", tmp_path / "journal", "--json").out)
        assert at_rest["channels"] == before["channels"]

    with Served("--journal", tmp_path / "journal") as server:
        after = json.loads(headrace("pool", "stats", server.address, "--json").out)
        assert after["channels"] == before["channels"]
        assert after["ledger"] == before["ledger"] | {"leased": 4, "queued": 2}
        with connect(server.address) as pool:
            pool.ack(batch.lease_id)
            assert pool.stats("train")["ledger"]["consumed"] == 4


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly_and_closes_the_journal(tmp_path: Path, how: signal.Signals) -> None:
    with Served("--journal", tmp_path / "journal", "--durability", "os") as server:
        with connect(server.address) as pool:
            pool.submit_steps(steps("a", 0))
        done = server.end(how)
    assert done.code == 0
    assert "Traceback" not in done.err
    with JournalView(tmp_path / "journal") as view:
        assert view.found.torn is None
        assert view.stats()["ledger"]["queued"] == 2


def test_channels_come_from_flags_and_a_file(headrace: Command, tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text(
        "defaults: {grace_s: 2}\nchannels:\n  train: {n_rollouts: 4, history_size: 8}\n  eval: {overflow: reject}\n"
    )
    args = ["--config", tmp_path / "pool.yaml", "--channel", "train:n_rollouts=8", "--channel", "judge:n_rollouts=3"]
    with Served(*args) as server:
        channels = json.loads(headrace("pool", "stats", server.address, "--json").out)["channels"]
    config = {name: stats["config"] for name, stats in channels.items()}
    assert (config["train"]["n_rollouts"], config["train"]["history_size"], config["train"]["grace_s"]) == (8, 8, 2)
    assert config["eval"]["overflow"] == "reject"
    assert config["judge"]["n_rollouts"] == 3


def test_a_key_is_asked_for(headrace: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_POOL_KEY", raising=False)
    with Served(env={"HEADRACE_POOL_KEY": "s3cret\n"}) as server:  # as a file holds it
        with connect(server.address, retry_s=0) as pool, pytest.raises(Unauthorized):
            pool.stats()
        refused = headrace("pool", "stats", server.address)
        assert refused.code == 1
        assert "key" in refused.err
        assert headrace("pool", "stats", server.address, "--key", "s3cret").code == 0
        monkeypatch.setenv("HEADRACE_POOL_KEY", "s3cret")
        assert headrace("pool", "stats", server.address).code == 0
        monkeypatch.setenv("HEADRACE_POOL_KEY", "s3cret\n")
        assert headrace("pool", "stats", server.address).code == 0
        assert "s3cret" not in headrace("pool", "stats", "--help").out
        done = server.end()
    assert "warning" not in done.err


@pytest.mark.parametrize(
    "args",
    [
        ("pool", "stats", "http://127.0.0.1:9"),
        ("pool", "serve"),
        ("api",),
        ("serve", "--vllm-addresses", "http://127.0.0.1:9", "--tokenizer-path", "x"),
        ("dashboard", "http://127.0.0.1:9"),
        ("check-gateway", "http://127.0.0.1:9"),
    ],
    ids=lambda args: " ".join(args[:2]),
)
def test_a_key_that_no_caller_could_present_is_refused_and_not_shown(
    headrace: Command, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.setattr("headrace.net.server.listener", lambda *args, **options: pytest.fail("it would listen"))
    name = {"pool": "POOL", "dashboard": "DASHBOARD"}.get(args[0], "API")
    flag = {"pool": "--key", "dashboard": "--admin-key"}.get(args[0], "--api-key")
    done = headrace(*args, flag, "сек-рет")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"headrace: {flag}: a key is printable ASCII on one line, and this one has other characters\n"
    monkeypatch.setenv(f"HEADRACE_{name}_KEY", "сек-рет")
    done = headrace(*args)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"headrace: HEADRACE_{name}_KEY: a key is printable ASCII")


def test_listening_to_other_machines_without_a_key_is_warned_about() -> None:
    with Served("--host", "0.0.0.0", env={"HEADRACE_POOL_KEY": ""}) as server:
        done = server.end()
    assert "warning: 0.0.0.0 can be reached from other machines" in done.err
    assert "can read and change this pool without a key" in done.err


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = spawn("pool", "serve", "--port", str(port))
    assert done.code == 1
    assert done.err == f"headrace: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


def test_a_folder_that_a_pool_has_open_is_not_touched(headrace: Command, journal: Path, tmp_path: Path) -> None:
    with Served("--journal", journal) as server:
        for command in (
            ("stats",),
            ("ls",),
            ("show", "a-0"),
            ("export", "--to", tmp_path / "x.jsonl"),
            ("verify",),
            ("repair",),
            ("compact",),
            ("backup", "--to", tmp_path / "copy"),
        ):
            done = headrace("pool", command[0], journal, *command[1:])
            assert done.code == 1
            assert f"is open in process {server.process.pid}; connect to that pool" in done.err
        second = spawn("pool", "serve", "--port", "0", "--journal", journal)
        assert second.code == 1
        assert f"is open in process {server.process.pid}" in second.err
    assert not (tmp_path / "copy").exists()


def test_a_running_pool_is_compacted_and_backed_up(headrace: Command, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    with Served("--journal", tmp_path / "journal", "--durability", "os", "--backups", folder) as server:
        with connect(server.address) as pool:
            for n in range(20):
                pool.submit_step(
                    Step(prompt_ids=range(500), response_ids=[1], trajectory_uid=f"t{n}", step_index=0, is_last=True)
                )
                pool.fetch_batch(1, timeout=60)
        before = json.loads(headrace("pool", "stats", server.address, "--json").out)["journal_bytes"]
        assert headrace("pool", "compact", server.address).out.startswith(f"compacted {server.address}: ")
        after = json.loads(headrace("pool", "stats", server.address, "--json").out)
        assert after["journal_bytes"] < before
        done = headrace("pool", "backup", server.address, "--to", "copy")
        assert (done.code, done.err) == (0, "")
        again = headrace("pool", "backup", server.address, "--to", folder / "copy")
        assert again.code == 1
        assert "is not empty" in again.err
        elsewhere = headrace("pool", "backup", server.address, "--to", tmp_path / "elsewhere")
        assert elsewhere.code == 2
        assert f"over HTTP it goes below {folder}" in elsewhere.err
        evil = {"host": "evil.example"}
        foreign = httpx.get(f"{server.address}/pool/stats", headers=evil, timeout=240, trust_env=False)
        assert foreign.status_code == 403
    assert not (tmp_path / "elsewhere").exists()
    with DataPool(folder / "copy") as copy:
        assert copy.stats()["ledger"] == after["ledger"]


def test_a_quota_bounds_the_journal(tmp_path: Path) -> None:
    args = ["--journal", tmp_path / "journal", "--quota-mb", "0.002", "--segment-mb", "0.5"]
    with Served(*args) as server, connect(server.address, retry_s=0) as pool:
        pool.submit_steps(steps("a", 0))
        with pytest.raises(DiskFull, match="of its quota of"):
            pool.submit_steps([step for n in range(50) for step in steps(f"g{n}", 0)])
        assert pool.stats()["ledger"]["submitted"] == 2


def test_requests_are_bounded() -> None:
    with Served("--max-body-mb", "0.001") as server, connect(server.address, retry_s=0) as pool:
        pool.submit_steps(steps("a", 0))
        many = [step for n in range(50) for step in steps(f"g{n}", 0)]
        with pytest.raises(HeadraceError, match=re.escape("larger than 0.001 MB")):
            pool.submit_steps(many)
        assert pool.stats()["ledger"]["submitted"] == 2
