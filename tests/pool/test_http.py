"""What HTTP adds to a pool: keys, limits, answers that get lost, callers that go away, servers that die."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.pool.servers import ServedPool, serving

from headrace import DataPool, Step, connect
from headrace.data.errors import FrameError, InvalidInput
from headrace.net.blocking_client import BlockingHttpClient
from headrace.pool.errors import JournalError, PoolUnreachable, Unauthorized
from headrace.pool.http_transport import HttpTransport
from headrace.pool.remote import RemotePool
from headrace.pool.wire import decode_reply, encode_call, encode_reply


def step(i: int, **fields: Any) -> Step:
    defaults: dict[str, Any] = {"prompt_ids": [1, 2, 3], "response_ids": [4, 5], "rollout_log_probs": [-0.5, -0.25]}
    return Step(**{**defaults, "trajectory_uid": f"t{i}", "step_index": 0, "is_last": True, **fields})


def get(url: str, key: str | None = None) -> Any:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=120) as response:
        return orjson.loads(response.read())


def post(address: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(address + "/pool/call", data=body, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_without_its_key_nothing_is_told_but_health() -> None:
    with serving(DataPool(), key="secret") as address:
        assert get(address + "/health") == {"status": "ok"}
        for path in ("/pool/stats", "/pool/groups", "/pool/trajectories/t0", "/pool/events"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                get(address + path, "wrong")
        with pytest.raises(Unauthorized, match="Bearer"):
            connect(address).stats()
        with pytest.raises(Unauthorized):
            connect(address, key="wrong").submit_step(step(0))
        assert connect(address, key="secret").submit_step(step(0)).accepted == 1
        assert get(address + "/pool/stats", "secret")["ledger"]["queued"] == 1


def test_metadata_whose_keys_are_no_text_is_shown_with_text_for_keys() -> None:
    with DataPool() as pool, serving(pool) as address:
        pool.submit_step(step(0, metadata={"by": {None: 1, True: 2, (1, "b"): 3, b"raw": [{7: 4}], "a": 5}}))
        [found] = get(address + "/pool/trajectories/t0")["steps"]
        keys = {"null": 1, "true": 2, "(1, 'b')": 3, "b'raw'": [{"7": 4}], "a": 5}
        assert found["metadata"] == {"by": keys}


@pytest.mark.parametrize(
    "to", ["", ".", "..", "../elsewhere", "a/../../elsewhere", "/etc/elsewhere", "out/elsewhere", "a\0b"], ids=repr
)
def test_a_backup_that_a_caller_asks_for_goes_below_the_operators_folder(tmp_path: Path, to: str) -> None:
    """By its name or its whole path; `out` leads out of the folder."""
    allowed, outside = tmp_path / "copies", tmp_path / "outside"
    allowed.mkdir()
    outside.mkdir()
    (allowed / "out").symlink_to(outside)
    with DataPool(tmp_path / "journal") as pool, serving(pool, backups=allowed) as address, connect(address) as remote:
        remote.submit_step(step(0))
        with pytest.raises(InvalidInput, match="no backup"):
            remote.backup(to)
        remote.backup("a")
        remote.backup(allowed / "b" / "c")
    for copy in (allowed / "a", allowed / "b" / "c"):
        with DataPool(copy) as found:
            assert found.stats()["ledger"]["submitted"] == 1
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("copies", "journal", "outside")] == []
    assert list(outside.iterdir()) == []


def test_without_a_folder_for_backups_no_caller_gets_one(tmp_path: Path) -> None:
    with DataPool(tmp_path / "journal") as pool, serving(pool) as address, connect(address) as remote:
        remote.submit_step(step(0))
        with pytest.raises(InvalidInput, match="start it with --backups FOLDER"):
            remote.backup(tmp_path / "copy")
        pool.backup(tmp_path / "own")  # whoever opened it may put it anywhere
    assert not (tmp_path / "copy").exists()


def test_people_read_json() -> None:
    with serving(DataPool()) as address:
        pool = connect(address)
        pool.submit_steps([step(0, metadata={"source": "test"}), step(1, reward=0.5)])
        assert get(address + "/pool/stats?channel=train")["groups"]["ready"] == 2
        assert [row["prompt_uid"] for row in get(address + "/pool/groups?limit=1")["items"]] == ["t0"]
        assert [row["reward"] for row in get(address + "/pool/trajectories?min_reward=0.1")["items"]] == [0.5]
        assert get(address + "/pool/steps?trajectory_uid=t1")["items"][0]["response_tokens"] == 2
        shown = get(address + "/pool/trajectories/t0")
        assert shown["steps"][0]["response_ids"] == [4, 5]
        assert shown["steps"][0]["metadata"] == {"source": "test"}
        pool.set_version(3)
        assert get(address + "/pool/events")["events"][-1]["kind"] == "version"
        with pytest.raises(urllib.error.HTTPError, match="422"):
            get(address + "/pool/groups?colour=red")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(address + "/pool/trajectories/nobody")


def test_a_body_that_is_cut_damaged_or_no_frame_is_refused_and_nothing_is_stored() -> None:
    from headrace.data.packing import pack

    body = encode_call("submit", {"channel": "train", "timeout": None}, pack([step(0)]))
    with serving(DataPool()) as address:
        damaged = bytearray(body)
        damaged[-9] ^= 1
        for wrong in (b"", b"{}", body[: len(body) // 2], bytes(damaged), body + b"more"):
            status, answer = post(address, wrong)
            assert status == 400
            with pytest.raises(FrameError):
                decode_reply(answer)
        status, answer = post(address, encode_call("submit", {"channel": "train"}, None))
        assert status == 422
        status, answer = post(address, encode_call("explode", {}, None))
        with pytest.raises(InvalidInput, match="no operation 'explode'"):
            decode_reply(answer)
        status, answer = post(address, encode_call("fetch", {"channel": "train"}, None))
        with pytest.raises(InvalidInput, match="batch_size"):
            decode_reply(answer)
        assert get(address + "/pool/stats")["ledger"]["submitted"] == 0


def test_an_argument_of_the_wrong_type_or_name_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with serving(DataPool()) as address:
        fetch = {"batch_size": 1, "n_rollouts": None, "channel": "train", "order": "fifo", "unit": "group"}
        fetch |= {"max_staleness": None, "lease_s": None, "timeout": 0, "request_id": ""}
        for op, args, said in (
            ("fetch", fetch | {"batch_size": "ten"}, r"\$\.batch_size"),
            ("fetch", fetch | {"channel": {"a": 1}}, r"\$\.channel"),
            ("fetch", fetch | {"colour": 1}, "colour"),
            ("fetch", fetch | {"timeout": "soon"}, r"\$\.timeout"),
            ("stats", {"channel": [1]}, r"\$\.channel"),
            ("reward", {"trajectory_uid": "t", "reward": "much", "step_index": None}, r"\$\.reward"),
            ("events", {"cursor": -1, "limit": 10}, "cursor"),
            ("list_steps", {"channel": "train", "filters": {"limit": []}}, "limit"),
            ("ack", {"channel": "train", "lease_id": None}, r"\$\.lease_id"),
        ):
            status, answer = post(address, encode_call(op, args, None))
            assert status == 422, (op, args)
            with pytest.raises(InvalidInput, match=said):
                decode_reply(answer)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_body_past_the_limit_is_413_whether_or_not_it_says_its_length() -> None:
    with serving(DataPool(), max_body_mb=0.1) as address:
        status, answer = post(address, bytes(200_000))
        assert status == 413
        assert b"0.1 MB" in answer
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=120) as raw:
            raw.sendall(b"POST /pool/call HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n")
            chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
            raw.sendall(chunk * 2)
            assert b" 413 " in raw.recv(4096).split(b"\r\n")[0]


def test_a_caller_that_hangs_up_while_it_waits_takes_nothing() -> None:
    pool = DataPool()
    with serving(pool) as address:
        args = {"batch_size": 1, "n_rollouts": None, "channel": "train", "order": "fifo", "unit": "group"}
        args |= {"max_staleness": None, "lease_s": None, "timeout": 20.0, "request_id": "gone"}
        body = encode_call("fetch", args, None)
        host, port = address.removeprefix("http://").split(":")
        waiting, left = threading.Event(), threading.Event()
        enter, leave = pool._waiters.setdefault, pool._forget_waiter

        class Waiters(dict):  # type: ignore[type-arg]
            def setdefault(self, name: str, default: Any = None) -> Any:
                waiting.set()
                return super().setdefault(name, default)

        def forget(name: str, wake: Any) -> None:
            leave(name, wake)
            left.set()

        assert enter is not None
        pool._waiters = Waiters()
        pool._forget_waiter = forget  # type: ignore[method-assign]
        with socket.create_connection((host, int(port)), timeout=120) as raw:
            head = f"POST /pool/call HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
            raw.sendall(head.encode() + body)
            assert waiting.wait(120)
        assert left.wait(120), "the server noticed that the caller is gone"
        pool.submit_step(step(0))
        batch = connect(address).fetch_batch(1, timeout=0)
        assert batch is not None
        assert [s.trajectory_uid for s in batch.steps] == ["t0"]


def test_an_answer_that_was_lost_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(DataPool()) as address:
        pool = connect(address)
        pool.submit_steps([step(i) for i in range(4)])
        deliver = HttpTransport.call
        lost = {"fetch": 1, "submit": 1, "ack": 1}

        def lossy(self: HttpTransport, op: str, body: bytes, timeout: float) -> bytes:
            from headrace.pool.remote import Unreachable

            answer = deliver(self, op, body, timeout)
            if lost.get(op, 0) > 0:
                lost[op] -= 1
                raise Unreachable("the connection broke after the call was carried out")
            return answer

        monkeypatch.setattr(HttpTransport, "call", lossy)
        first = pool.fetch_batch(2, lease_s=60)
        assert first is not None
        assert [s.trajectory_uid for s in first.steps] == ["t0", "t1"]
        first.ack()
        # Neither an index nor a call id: the client must make the retry recognisable.
        receipt = pool.submit_steps([step(9, step_index=None, is_last=False)])
        assert (receipt.accepted, receipt.duplicates) == (0, 1)
        ledger = pool.stats()["ledger"]
        assert (ledger["submitted"], ledger["consumed"], ledger["queued"]) == (5, 2, 3)
        assert lost == {"fetch": 0, "submit": 0, "ack": 0}


class Upkeep:
    """A pool's upkeep, which does nothing until `go`; `begun` tells that it was asked for."""

    def __init__(self, pool: DataPool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.times = 0
        self._work = pool._upkeep
        monkeypatch.setattr(pool, "_upkeep", self._held)

    def _held(self, operation: Any) -> None:
        self.times += 1
        self.begun.set()
        assert self.go.wait(120)
        self._work(operation)


@pytest.mark.parametrize("awaited", [False, True], ids=["blocking", "awaited"])
@pytest.mark.parametrize("what", ["compact", "backup"])
def test_what_rewrites_or_copies_files_may_take_longer_than_other_answers_and_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, awaited: bool
) -> None:
    monkeypatch.setattr("headrace.pool.remote.SLACK_S", 0.2)
    with (
        DataPool(tmp_path / "journal") as pool,
        serving(pool, backups=tmp_path) as address,
        socket.create_server(("127.0.0.1", 0)) as silent,
        ThreadPoolExecutor(1) as threads,
    ):
        upkeep = Upkeep(pool, monkeypatch)
        remote = connect(address)
        arguments = ("copy",) if what == "backup" else ()

        async def ask() -> None:
            try:
                await getattr(remote.aio, what)(*arguments)
            finally:
                await remote.aclose()

        asked = threads.submit(asyncio.run, ask()) if awaited else threads.submit(getattr(remote, what), *arguments)
        assert upkeep.begun.wait(120)
        other = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PoolUnreachable, match=r"within 0\.2 s"):
            connect(other, retry_s=0).stats()
        upkeep.go.set()
        asked.result(120)
        assert upkeep.times == 1


def test_only_a_forget_that_rewrites_the_journal_may_take_long() -> None:
    class Noting:
        address = "noted"

        def call(self, op: str, body: bytes, timeout: float) -> bytes:
            self.timeout = timeout
            return encode_reply(True)

    noting = Noting()
    pool = RemotePool(noting)  # type: ignore[arg-type]
    assert pool.forget("t")
    assert noting.timeout > 3600
    assert pool.forget("t", erase=False)
    assert noting.timeout < 60


@pytest.mark.parametrize("kept", [False, True], ids=["first call", "kept connection"])
def test_a_backup_whose_answer_was_lost_is_not_asked_for_again_and_the_error_says_that_it_may_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    with DataPool(tmp_path / "journal") as pool, serving(pool, backups=tmp_path) as address:
        pool.submit_step(step(0))
        remote = connect(address)
        if kept:
            remote.stats()
        exchange, sent = BlockingHttpClient._exchange, []

        def lossy(self: BlockingHttpClient, *args: Any) -> Any:
            sent.append(exchange(self, *args))
            raise ConnectionResetError("the connection broke after the call was carried out")

        with monkeypatch.context() as patched:
            patched.setattr(BlockingHttpClient, "_exchange", lossy)
            with pytest.raises(PoolUnreachable, match="the backup may be there"):
                remote.backup("copy")
        assert len(sent) == 1
        with pytest.raises(JournalError, match="is not empty"):
            remote.backup("copy")
    with DataPool(tmp_path / "copy") as copy:
        assert copy.stats()["ledger"]["submitted"] == 1


def test_a_pool_that_is_killed_under_load_comes_back_with_all_it_acknowledged(tmp_path: Path) -> None:
    with ServedPool(tmp_path / "journal") as server:
        acknowledged: list[str] = []
        half, done = threading.Event(), threading.Event()

        def write(worker: int) -> None:
            pool = connect(server.address, retry_s=240)
            for i in range(40):
                uid = f"{worker}-{i}"
                pool.submit_steps([step(0, trajectory_uid=uid)])
                acknowledged.append(uid)
                if len(acknowledged) > 60:
                    half.set()
                if worker == 0 and i == 30:
                    done.wait(120)

        writers = [threading.Thread(target=write, args=(n,)) for n in range(4)]
        for writer in writers:
            writer.start()
        assert half.wait(120)
        server.kill()
        server.start()
        done.set()
        for writer in writers:
            writer.join(240)
        pool = connect(server.address)
        assert len(acknowledged) == 160
        batch = pool.fetch_batch(160, timeout=0)
        assert batch is not None
        assert sorted(s.trajectory_uid for s in batch.steps) == sorted(acknowledged)
        assert pool.stats()["balanced"]
        assert server.stop() == 0


def test_a_pool_that_is_not_there_is_said_to_be_unreachable() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(PoolUnreachable, match="did not answer"):
            connect(address, retry_s=0).stats()

        async def ask() -> None:
            await connect(address, retry_s=0).aio.stats()

        with pytest.raises(PoolUnreachable):
            asyncio.run(ask())


@pytest.mark.parametrize("address", ["127.0.0.1:8200", "ftp://host", "http://", "ray://x"])
def test_an_address_that_is_none_is_refused_with_one_that_would_work(address: str) -> None:
    with pytest.raises(InvalidInput, match=r"http://127\.0\.0\.1:8200"):
        connect(address)


def test_many_awaited_calls_share_one_loop_and_no_threads() -> None:
    with serving(DataPool()) as address:

        async def run() -> int:
            pool = connect(address)
            before = threading.active_count()
            await asyncio.gather(*(pool.aio.submit_step(step(i)) for i in range(100)))
            waiting = [asyncio.ensure_future(pool.aio.fetch_batch(2, lease_s=30)) for _ in range(50)]
            batches = await asyncio.gather(*waiting)
            assert threading.active_count() <= before
            uids = {s.trajectory_uid for batch in batches if batch is not None for s in batch.steps}
            await pool.aclose()
            return len(uids)

        assert asyncio.run(run()) == 100
