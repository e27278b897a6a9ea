"""`python -m headrace.gateway`: the same as `headrace gateway`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "gateway")
    runpy.run_module("headrace", run_name="__main__", alter_sys=True)
