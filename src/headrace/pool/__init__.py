"""The DataPool: a timestamped queue of trajectories, grouped by prompt.

`core` and `policies` decide, `state` and `channel` hold, `journal` remembers; `embedded`, `ray` and `http` are the
three ways in. They speak the same calls (`calls`).
"""

#: Where a key comes from that no flag and no file gives.
KEY_VARIABLE = "HEADRACE_POOL_KEY"
