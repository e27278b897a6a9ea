"""A link passes bytes on, follows its service to another port, and fails as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headrace.storm.network import Link

PATIENCE_S = 60


class Echo:
    """A service that answers every line with it, behind its own name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.heard: list[bytes] = []
        self.address = ""

    async def __aenter__(self) -> Echo:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                self.heard.append(line)
                writer.write(self.name.encode() + b":" + line)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


class Caller:
    def __init__(self, link: Link) -> None:
        self._port = int(link.address.rpartition(":")[2])

    async def connect(self) -> Caller:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def say(self, line: bytes) -> bytes:
        """What comes back; empty where the connection ended. Raises `ConnectionError` where it was reset."""
        self.send(line)
        return await self.hear()

    def send(self, line: bytes) -> None:
        self._writer.write(line)

    async def hear(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readline()


def played(test: Callable[[Link, Echo], Awaitable[None]]) -> None:
    async def play() -> None:
        link = Link("test")
        await link.start()
        async with Echo("one") as echo:
            link.point_at(echo.address)
            await test(link, echo)
            await link.close()

    asyncio.run(play())


async def broken(caller: Caller) -> bool:
    try:
        return await caller.hear() == b""
    except ConnectionError:
        return True


def test_bytes_pass_and_a_new_address_is_followed() -> None:
    async def test(link: Link, echo: Echo) -> None:
        assert await (await Caller(link).connect()).say(b"hi\n") == b"one:hi\n"
        async with Echo("two") as other:
            link.point_at(other.address)
            assert await (await Caller(link).connect()).say(b"hi\n") == b"two:hi\n"

    played(test)


def test_a_reset_breaks_connections_and_the_next_one_works() -> None:
    async def test(link: Link, echo: Echo) -> None:
        caller = await Caller(link).connect()
        await caller.say(b"hi\n")
        link.begin("reset")
        assert await broken(caller)
        assert await (await Caller(link).connect()).say(b"again\n") == b"one:again\n"

    played(test)


def test_what_is_dropped_never_arrives_and_its_connection_breaks_when_the_network_heals() -> None:
    async def test(link: Link, echo: Echo) -> None:
        caller = await Caller(link).connect()
        await caller.say(b"hi\n")
        link.begin("drop")
        caller.send(b"into the void\n")
        waiting = asyncio.create_task(broken(caller))
        await asyncio.sleep(0)
        assert not waiting.done()
        link.heal()
        assert await waiting
        assert await (await Caller(link).connect()).say(b"again\n") == b"one:again\n"
        assert echo.heard == [b"hi\n", b"again\n"]

    played(test)


def test_what_is_duplicated_arrives_twice_and_is_answered_once() -> None:
    async def test(link: Link, echo: Echo) -> None:
        link.begin("duplicate")
        caller = await Caller(link).connect()
        assert await caller.say(b"hi\n") == b"one:hi\n"
        assert await caller.say(b"more\n") == b"one:more\n"
        async with asyncio.timeout(PATIENCE_S):
            while len(echo.heard) < 4:
                await asyncio.sleep(0)
        assert sorted(echo.heard) == [b"hi\n", b"hi\n", b"more\n", b"more\n"]

    played(test)


def test_what_is_delayed_arrives_whole_and_in_order() -> None:
    async def test(link: Link, echo: Echo) -> None:
        link.begin("delay")
        caller = await Caller(link).connect()
        assert [await caller.say(b"%d\n" % n) for n in range(2)] == [b"one:0\n", b"one:1\n"]

    played(test)


@pytest.mark.parametrize("address", [None, "http://127.0.0.1:1"])
def test_a_service_that_is_not_there_is_a_broken_connection(address: str | None) -> None:
    async def test(link: Link, echo: Echo) -> None:
        link.point_at(address)
        assert await broken(await Caller(link).connect())

    played(test)
