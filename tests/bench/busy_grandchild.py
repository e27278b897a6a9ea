"""A server whose work is done by a process that its child started: ready once that one has used `BUSY_S` of CPU."""

from __future__ import annotations

import subprocess
import sys
import time

BUSY_S = 0.3


def run(below: int) -> None:
    """Starts as many processes below this one; the last one works, and all end with the first."""
    if below:
        command = [sys.executable, "-m", "tests.bench.busy_grandchild", str(below - 1)]
        subprocess.Popen(command, stdin=subprocess.PIPE if len(sys.argv) == 1 else None).wait()
        return
    while time.process_time() < BUSY_S:
        pass
    print("it is ready on http://nowhere", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    run(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
