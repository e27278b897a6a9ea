"""These tests run where they are asked for (HEADRACE_VERL=1): verl takes a gigabyte of disk and minutes to install.

What lies in `inside` runs in verl's own environment, started by the test out here.
"""

from __future__ import annotations

collect_ignore = ["inside"]
