"""A peer whose machine lost its power or its network says no word of it: the kernel is told to ask."""

from __future__ import annotations

import socket

#: Seconds of silence after which a peer's machine is asked for a sign of life, seconds between two times of asking, and
#: how often in vain until the connection counts as broken: a minute and a half in all.
SILENT_S, BETWEEN_S, TIMES = 30, 10, 6
#: Linux' name for the first of them, and macOS'.
_SILENT_OPTION = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)


def notice_vanished_peer(sock: socket.socket) -> None:
    """Has a TCP connection break when its peer's machine is gone, however long an answer may take. A peer that is there
    and says nothing is left alone: it may be at a long call, or be stopped."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if _SILENT_OPTION is not None:
        sock.setsockopt(socket.IPPROTO_TCP, _SILENT_OPTION, SILENT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, BETWEEN_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, TIMES)
