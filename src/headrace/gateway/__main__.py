"""`python -m headrace.gateway`: the same as `headrace gateway`."""

import sys

from headrace.cli import main

if __name__ == "__main__":
    main(["gateway", *sys.argv[1:]])
