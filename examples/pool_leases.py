"""Leases: what a trainer fetched and did not acknowledge is handed out again, in its old place."""

from headrace import DataPool, Step
from headrace.pool.errors import LeaseLost

pool = DataPool(channels={"train": {"n_rollouts": 2}})
for game in range(2):
    for rollout in range(2):
        steps = [
            Step(
                prompt_ids=[1, 2, 3],
                response_ids=[4 + rollout],
                trajectory_uid=f"game{game}-{rollout}",
                prompt_uid=f"game{game}",
                is_last=True,
                reward=float(rollout),
            )
        ]
        pool.submit_steps(steps)

first = pool.fetch_batch(1, lease_s=30)
print("leased:", first.groups[0].prompt_uid, "rewards", first.groups[0].rewards)
first.nack()  # the trainer could not use it: back to its old place, before game1

again = pool.fetch_batch(1, lease_s=30)
print("again:", again.groups[0].prompt_uid, "delivery", again.groups[0].deliveries)
try:
    first.ack()
except LeaseLost as error:
    print("a stale lease is refused:", error)
again.ack()
print("ledger:", pool.stats()["ledger"])
pool.close()
