"""A server whose machine is gone without a word: played in a network of its own, whose only link is cut."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headrace.net import vanished
from headrace.net.async_client import AsyncHttpClient
from headrace.net.blocking_client import BlockingHttpClient
from headrace.net.http_answer import NoAnswer

ROOT = Path(__file__).parents[2]
#: A network namespace, where whoever runs this may change the links.
OWN_NETWORK = ["unshare", "--user", "--map-root-user", "--net"]
#: Seconds that a client waits if nobody tells it that its server is gone; longer than this test may take.
LONG_S = 3600.0


def has_own_networks() -> bool:
    try:
        return subprocess.run([*OWN_NETWORK, "true"], capture_output=True, timeout=120).returncode == 0
    except OSError:
        return False


def set_link(*, up: bool) -> None:
    """Connects this network's loopback, or cuts it."""
    request_flags, if_up = 0x8914, 0x1  # SIOCSIFFLAGS, IFF_UP
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, request_flags, struct.pack("16sh14x", b"lo", if_up if up else 0))


def vanish_in_mid_answer(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
    set_link(up=False)
    threading.Event().wait()


async def ask(address: str) -> None:
    client = AsyncHttpClient(address, total_s=LONG_S)
    try:
        await client.request("GET", "/long")
    finally:
        await client.close()


def say_what_is_noticed(client: str) -> None:
    """Prints what a client says of a server that vanishes; run in a network of its own."""
    set_link(up=True)
    vanished.SILENT_S, vanished.BETWEEN_S, vanished.TIMES = 1, 1, 2
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=vanish_in_mid_answer, args=(listener,), daemon=True).start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        if client == "blocking":
            BlockingHttpClient(address, timeout_s=LONG_S).request("GET", "/long")
        else:
            asyncio.run(ask(address))
    except NoAnswer as error:
        print(error.timed_out, error)


@pytest.mark.skipif(not has_own_networks(), reason="needs unshare, and user namespaces")
@pytest.mark.parametrize("client", ["blocking", "async"])
def test_a_server_that_vanishes_without_a_word_is_noticed(client: str) -> None:
    story = f"from tests.net.test_vanished import *; say_what_is_noticed({client!r})"
    command = [*OWN_NETWORK, sys.executable, "-c", story]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.startswith("False http://127.0.0.1:"), done.stderr
    assert "cannot be reached for /long: " in done.stdout
