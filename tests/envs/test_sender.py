"""Groups reach the API once each and in order, whatever happens to it, to the disk, or to the process."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from tests.api.kit import api_on
from tests.envs.api import Api
from tests.envs.kit import items_of

from headrace import DataPool
from headrace.data.errors import InvalidInput
from headrace.envs.api_client import ApiClient
from headrace.envs.sender import GroupPost, GroupSpool, Sender


def group(item: int, size: int = 2) -> dict[str, Any]:
    return {"tokens": [[1, item]] * size, "masks": [[-100, item]] * size, "scores": [0.0] * size, "env_id": 0}


@pytest.fixture
async def client(api: Api) -> Any:
    found = ApiClient(api.address)
    yield found
    await found.close()


def sender(client: ApiClient, folder: Path, most_bytes: int = 1 << 20) -> Sender:
    return Sender(client, GroupSpool(folder), most_bytes=most_bytes, acknowledged=lambda: None)


def owed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.json"))


async def test_groups_arrive_in_order_and_nothing_is_owed_then(api: Api, client: ApiClient, tmp_path: Path) -> None:
    sending = sender(client, tmp_path)
    sending.start()
    for item in range(20):
        await sending.put(group(item) if item % 2 else [group(item), group(item + 100)])
    assert await sending.drain(60) == 0
    assert [item for item in items_of(api.received) if item < 100] == list(range(20))
    assert len(api.received) == 30
    assert owed(tmp_path) == []
    await sending.close()


async def test_what_is_made_while_the_api_is_away_arrives_when_it_is_back(
    api: Api, client: ApiClient, tmp_path: Path
) -> None:
    await api.stop()
    sending = sender(client, tmp_path)
    sending.start()
    for item in range(5):
        await sending.put(group(item))
    assert sending.waiting == 5
    await api.start()
    assert await sending.drain(60) == 0
    assert items_of(api.received) == list(range(5))
    await sending.close()


async def test_a_lost_answer_makes_no_second_group(api: Api, client: ApiClient, tmp_path: Path) -> None:
    api.lose_answers = 2
    sending = sender(client, tmp_path)
    sending.start()
    for item in range(3):
        await sending.put(group(item))
    assert await sending.drain(60) == 0
    assert items_of(api.received) == [0, 1, 2]
    await sending.close()


async def test_the_next_process_sends_what_this_one_could_not_and_first(
    api: Api, client: ApiClient, tmp_path: Path
) -> None:
    await api.stop()
    first = sender(client, tmp_path)
    first.start()
    for item in range(3):
        await first.put(group(item))
    assert await first.drain(0) == 3
    await first.close()
    assert len(owed(tmp_path)) == 3
    (tmp_path / f"{3:012}-1-{'a' * 32}.json.part").write_bytes(b'{"tok')
    await api.start()
    second = sender(client, tmp_path)
    second.start()
    await second.put(group(3))
    assert await second.drain(60) == 0
    assert items_of(api.received) == [0, 1, 2, 3]
    assert owed(tmp_path) == []
    await second.close()


async def test_an_answer_that_passes_is_waited_out_and_a_refusal_is_set_aside(
    api: Api, client: ApiClient, tmp_path: Path
) -> None:
    answers = iter([503, 401, None, 422])
    api.refuse = lambda groups: next(answers, None)
    sending = sender(client, tmp_path)
    sending.start()
    for item in range(3):
        await sending.put(group(item))
    assert await sending.drain(60) == 0
    assert items_of(api.received) == [0, 2]
    assert (sending.acknowledged, sending.lost) == (2, 1)
    assert len(owed(tmp_path / "refused")) == 1
    await sending.close()


async def test_who_comes_with_more_than_there_is_room_for_waits_and_may_be_cancelled(
    api: Api, client: ApiClient, tmp_path: Path
) -> None:
    await api.stop()
    sending = sender(client, tmp_path, most_bytes=1)
    sending.start()
    await sending.put(group(0))
    given_up = asyncio.create_task(sending.put(group(1)))
    patient = asyncio.create_task(sending.put(group(2)))
    await asyncio.wait({given_up, patient}, timeout=0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(given_up, 0)
    assert not patient.done()
    assert sending.accepted == 2
    await api.start()
    await patient
    assert await sending.drain(60) == 0
    assert items_of(api.received) == [0, 2]
    await sending.close()


async def test_an_end_with_no_room_and_no_api_comes(api: Api, client: ApiClient, tmp_path: Path) -> None:
    await api.stop()
    sending = sender(client, tmp_path, most_bytes=1)
    sending.start()
    await sending.put(group(0))
    waiting = asyncio.create_task(sending.put(group(1)))
    await asyncio.wait({waiting}, timeout=0)
    sending.lift_limit()
    await waiting
    assert await sending.drain(0) == 2
    await sending.close()
    assert len(owed(tmp_path)) == 2


async def test_a_disk_that_is_full_costs_no_group(
    api: Api, client: ApiClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    answers = iter([503, 503])
    api.refuse = lambda groups: next(answers, None)
    sending = sender(client, tmp_path)
    sending.start()
    for item in range(3):
        await sending.put(group(item))
    assert await sending.drain(60) == 0
    assert items_of(api.received) == [0, 1, 2]
    assert owed(tmp_path) == []
    await sending.close()


async def test_one_failed_read_does_not_end_the_sender(
    api: Api, client: ApiClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.EIO, "Input/output error")]
    read = Path.read_bytes

    def failing(path: Path) -> bytes:
        if failures:
            raise failures.pop()
        return read(path)

    before = sender(client, tmp_path)
    for item in range(2):
        await before.put(group(item))
    await before.close()
    monkeypatch.setattr(Path, "read_bytes", failing)
    sending = sender(client, tmp_path)
    sending.start()
    assert await sending.drain(60) == 0
    assert items_of(api.received) == [0, 1]
    await sending.close()


async def test_what_an_answer_is_long_in_coming_for_is_on_disk_meanwhile(
    api: Api, client: ApiClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.envs.sender.WRITE_S", 0.01)
    written, write = asyncio.Event(), GroupSpool.write

    def noted(spool: GroupSpool, post: GroupPost) -> None:
        write(spool, post)
        written.set()

    monkeypatch.setattr(GroupSpool, "write", noted)
    api.slow = asyncio.Event()
    sending = sender(client, tmp_path)
    sending.start()
    await sending.put(group(0))
    await written.wait()
    assert len(owed(tmp_path)) == 1
    api.slow.set()
    assert await sending.drain(60) == 0
    assert owed(tmp_path) == []
    await sending.close()


async def test_two_environments_do_not_share_a_spool(client: ApiClient, tmp_path: Path) -> None:
    first = sender(client, tmp_path)
    with pytest.raises(InvalidInput, match="is in use: give each environment its own"):
        sender(client, tmp_path)
    await first.close()
    await sender(client, tmp_path).close()


async def test_a_temporary_spool_lasts_only_if_something_is_owed(api: Api, client: ApiClient) -> None:
    empty = GroupSpool(None)
    empty.close()
    assert not empty.folder.exists()
    await api.stop()
    spool = GroupSpool(None)
    sending = Sender(client, spool, most_bytes=1 << 20, acknowledged=lambda: None)
    sending.start()
    await sending.put(group(0))
    await sending.close()
    await api.start()
    again = sender(client, spool.folder)
    again.start()
    assert await again.drain(60) == 0
    assert items_of(api.received) == [0]
    await again.close()
    for path in spool.folder.iterdir():
        path.unlink()
    spool.folder.rmdir()


async def test_a_file_that_a_crash_left_is_set_aside_and_holds_up_nothing(tmp_path: Path) -> None:
    """Under an id that was changed too, for which a post has to be read."""
    with DataPool() as pool, api_on(pool) as real:
        (env,) = real.opened(8, 2)
        client = ApiClient(real.address)
        for number, left in enumerate((b'{"tokens": [[1', b"", b"[7]")):
            (tmp_path / f"{number:012}-1-{number:032x}.json").write_bytes(left)
        sending = sender(client, tmp_path)
        sending.change_env_id(7, env)
        sending.start()
        await sending.put({**group(5), "env_id": 7})
        assert await sending.drain(120) == 0
        await sending.close()
        await client.close()
        assert (sending.lost, sending.acknowledged) == (3, 1)
        assert len(owed(tmp_path / "refused")) == 3
        assert real.queued() == 1
