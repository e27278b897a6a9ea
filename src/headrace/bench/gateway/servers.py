"""The three servers that a run needs: the stub, the proxy in front of it, and the gateway in front of it."""

from __future__ import annotations

from pathlib import Path

from headrace.bench.gateway import tokenizer
from headrace.bench.gateway.child import Child
from headrace.bench.gateway.sizes import Sizes


def start_stub(folder: Path, sizes: Sizes, *, first_token_ms: float = 0) -> Child:
    """The rollout server, and its tokenizer in `folder`."""
    tokenizer.build(folder)
    return Child("headrace.bench.gateway.stub", folder, sizes.sampled, first_token_ms)


def start_proxy(stub: Child) -> Child:
    return Child("headrace.bench.gateway.proxy", stub.address)


def start_gateway(stub: Child, folder: Path, *flags: object) -> Child:
    """A gateway that is on its way; `ready` waits for it, so that several can start at once.

    The renderer is the one that `auto` would find for this tokenizer after it had tried all others.
    """
    where = ("--vllm-addresses", stub.address, "--tokenizer-path", folder, "--renderer", "template")
    return Child("headrace.gateway", *where, "--host", "127.0.0.1", "--port", 0, *flags)


def ready(*gateways: Child) -> None:
    for gateway in gateways:
        gateway.wait_until("/ready")
