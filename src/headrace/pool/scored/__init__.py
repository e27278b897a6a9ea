"""Scored groups: what environments post over the Trajectory API, and a trainer takes in batches of exact size.

A scored group is one JSON object of Atropos' wire (tokens, masks, scores, … of several sequences of one prompt). The
pool never looks into it again once it was read: it is kept compressed, as a `Piece` whose bytes are spliced into the
answer of `GET /batch`. Here is what is held of them, and what facts do to it. What decides are the pool's `desk_*`
operations (`headrace.pool.operations.scored_produce`, `scored_consume`); `headrace.api` serves them over HTTP.

Why they are kept apart from the groups of a channel. A channel's group grows step by step, is complete when its
trajectories are, and is handed out by policy version and age. A scored group arrives whole, has no uids, versions or
rewards that the pool knows of, and waits for others whose sizes add up to `batch_size` exactly, under shares of
environments that a channel does not have; and its bytes may lie on disk. What the two have in common is shared: plans,
facts, the journal, its snapshots and its repair, the clock, the errors, and the arithmetic of the ledger. With
`desk_serve` either serves from the other's groups (`headrace.pool.operations.transfer`).

What always holds:

- Every group that was posted is in exactly one place: queued, buffered, out under a lease, or counted as served, moved
  to a channel, dead, or cleared. `ScoredGroups.balanced` says so, over restarts too.
- A batch has exactly `batch_size` sequences, and whole groups. Its step is counted when it is handed out, and taken
  back if it did not arrive.
- A group under a key that was posted before is answered as it was, and not queued again.
- Operations decide, facts change (`apply`); a journal replays to the same state.

    types         what the calls take and answer
    facts, apply  what can happen, and what it does to the state
    groups        the state: registrations, leases, retries, and the ledger
    batching      which groups are queued, buffered and out, and which can never be served
    queue, environments, exact_fill   the line, who posts, and which groups fill a batch
    piece_store   the groups' bytes, in memory and in scratch files
    snapshot      the state as facts, and back
"""
