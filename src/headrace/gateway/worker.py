"""One worker of a gateway: `python -m headrace.gateway.worker`, started by `workers`, told what to do on its stdin."""

from __future__ import annotations

import logging
import os
import signal
import threading

import msgspec

from headrace import files
from headrace.gateway.app import create_app
from headrace.gateway.gateway import Gateway
from headrace.gateway.settings import GatewaySettings
from headrace.gateway.startup import WorkerReporter
from headrace.gateway.worker_control import ControlRelay
from headrace.gateway.workers import POOL_RETRY_S, WorkerTask
from headrace.pool.connect import connect
from headrace.serving import LocalOnly, Server, loopback, settle_memory
from headrace.tokens import do_without_torch


def main() -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(levelname)s %(name)s[{os.getpid()}]: %(message)s")
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        task = msgspec.json.decode(stdin.readline(), type=WorkerTask)
    for path, held in task.files.items():
        files.hand_on(path, held)
    do_without_torch()
    threading.Thread(target=_watch_parent, name="headrace-parent", daemon=True).start()
    with connect(task.pool, key=task.pool_key, retry_s=POOL_RETRY_S) as pool:
        settings = GatewaySettings.model_validate(task.settings)
        app = create_app(pool, settings, drain_s=task.drain_s)
        hub = ControlRelay(app, socket=task.hub, secret=task.secret)
        gateway: Gateway = app.state.gateway
        gateway.others = hub
        gateway.loaded = settle_memory
        gateway.told = None
        local = not settings.keyed and loopback(task.host)
        front = LocalOnly(hub) if local else hub
        server = Server(front, task.host, task.port, lifespan=True, grace_s=None, shared=True)
        lines = WorkerReporter()

        def serves(address: str) -> None:
            lines.listening(server.private)
            gateway.tell(lines)

        server.run(serves)


def _watch_parent() -> None:
    """Ends with the parent: its end of our standard input closes, however it died."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
