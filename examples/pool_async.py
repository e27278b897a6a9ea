"""The awaitable twins (`pool.aio`): agents and a trainer in one event loop, none of them holding a thread."""

import asyncio

from headrace import DataPool, Step


async def agent(pool: DataPool, name: str, turns: int) -> None:
    """Each turn's prompt is the whole conversation so far; the pool keeps every token once."""
    prompt = [1, 2, 3]
    for turn in range(turns):
        response = [10 + turn]
        last = turn == turns - 1
        step = Step(prompt_ids=prompt, response_ids=response, trajectory_uid=name, is_last=last, reward=float(last))
        await pool.aio.submit_step(step)  # no step_index: the pool assigns the next one
        prompt = [*prompt, *response, 4]


async def trainer(pool: DataPool, groups: int) -> None:
    for _ in range(groups):
        batch = await pool.aio.fetch_batch(1, lease_s=30, timeout=10)  # woken when a group is ready; nothing polls
        for sequence in batch.sequences():
            print(sequence.trajectory_uid, "tokens", sequence.tokens.tolist(), "trained", int(sequence.loss_mask.sum()))
        await batch.ack()


async def main() -> None:
    with DataPool() as pool:
        await asyncio.gather(trainer(pool, 3), *(agent(pool, f"agent{i}", turns=i + 1) for i in range(3)))
        print(pool.stats()["ledger"])


asyncio.run(main())
