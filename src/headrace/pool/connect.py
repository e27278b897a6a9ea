"""`connect`: a pool by its address."""

from __future__ import annotations

import urllib.parse

from headrace.data.errors import InvalidInput
from headrace.pool.remote import RemotePool


def connect(address: str, *, key: str | None = None, retry_s: float = 30.0) -> RemotePool:
    """A pool that runs elsewhere.

    `http://host:port` is a `headrace pool serve`, with its `key` where it has one, `unix:///path` the same on a socket
    and `frames:///path` a gateway's own to its workers;
    `ray-actor://NAME?namespace=default&address=auto` the named actor of a `headrace pool start`.
    """
    scheme = urllib.parse.urlsplit(address).scheme
    # Each transport brings a library that who uses another, or only converts batches, need not have.
    if scheme in ("http", "https"):
        from headrace.pool.http_transport import HttpTransport

        return RemotePool(HttpTransport(address, key), retry_s=retry_s)
    if scheme == "unix":
        from headrace.pool.http_transport import UnixTransport

        return RemotePool(UnixTransport(urllib.parse.urlsplit(address).path), retry_s=retry_s)
    if scheme == "frames":
        from headrace.pool.frame_transport import FrameTransport

        return RemotePool(FrameTransport(urllib.parse.urlsplit(address).path), retry_s=retry_s)
    if scheme == "ray-actor":
        from headrace.pool.ray import RayTransport

        return RemotePool(RayTransport(address), retry_s=retry_s)
    raise InvalidInput(
        f"{address!r} is no pool's address; it looks like http://127.0.0.1:8200 or ray-actor://data_pool?namespace=default"
    )
