"""Runs a module in a process whose wall clock is wrong by what a file says, at any time.

    python wrong_clock.py FILE MODULE ARGUMENT...

The file holds a number of seconds as eight bytes (`AHEAD`); whoever writes another sets the clock. `time.time` and
`time.time_ns` say so; the monotonic clock goes on, as it does on a machine whose clock is set. It is run by its path,
before Headrace is imported, so that it works with any version of it.
"""

import mmap
import runpy
import struct
import sys
import time

#: How the file says by how many seconds the clock is ahead.
AHEAD = struct.Struct("=d")


def set_wrong(path: str) -> None:
    """Makes this process' wall clock follow a file, from now on."""
    with open(path, "rb") as file:
        told = mmap.mmap(file.fileno(), AHEAD.size, prot=mmap.PROT_READ)
    right, right_ns = time.time, time.time_ns

    def wrong() -> float:
        ahead: float = AHEAD.unpack(told)[0]
        return right() + ahead

    def wrong_ns() -> int:
        return right_ns() + int(AHEAD.unpack(told)[0] * 1e9)

    time.time, time.time_ns = wrong, wrong_ns


if __name__ == "__main__":
    script, clock, module, *arguments = sys.argv
    sys.path[0] = ""  # as with `python -m`; this file's folder has modules that hide others
    set_wrong(clock)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
