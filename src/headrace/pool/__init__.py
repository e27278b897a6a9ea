"""The DataPool: a timestamped queue of trajectories, grouped by prompt.

`operations` and `policies` decide, pure: they read the `state` and answer with `facts`. `apply` changes the state by
them, `journal` keeps them. `embedded`, `ray` and `http` are the three ways in, with the same calls (`calls`). Imports
run from there down to `facts` and `config`, without a circle.
"""

#: Where a key comes from that no flag and no file gives.
KEY_VARIABLE = "HEADRACE_POOL_KEY"
