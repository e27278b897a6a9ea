"""A fork server whose workers say what they were told."""

from __future__ import annotations

import sys

from headrace.gateway.fork_server import serve_forks

if __name__ == "__main__" and serve_forks(int(sys.argv[1])):
    print(input(), flush=True)
