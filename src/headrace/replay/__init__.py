"""Replay: recorded trajectories as a model server that always answers the same, so that an agent is run again without a
model.

`recorded` finds the answer that was recorded for a prompt; `server` speaks a rollout server's wire with it. A gateway
in front of that server speaks every dialect.
"""
