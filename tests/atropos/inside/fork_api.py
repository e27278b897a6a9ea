"""Starts the original Trajectory API as often as it is asked for: imported once, each server is a fork of that.

Runs in atroposlib's own Python. A line `start PORT LOG` is answered with the new server's pid, `end PID` with `ended`
once that server is gone. What still runs when stdin ends is killed.
"""

import os
import signal
import sys
import time

import uvicorn
from atroposlib.api import app

STOP_S = 20


def serve(port, log):
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    os.close(0)
    uvicorn.run(app, host="127.0.0.1", port=port)


def end(pid):
    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + STOP_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # there is no event of a child's that a deadline could be waited for with


running = set()
for line in sys.stdin:
    word, *given = line.rstrip("\n").split("\t")
    if word == "start":
        child = os.fork()
        if child == 0:
            try:
                serve(int(given[0]), given[1])
            finally:
                os._exit(0)
        running.add(child)
        print(child, flush=True)
    else:
        end(int(given[0]))
        running.remove(int(given[0]))
        print("ended", flush=True)
for child in running:
    os.kill(child, signal.SIGKILL)
