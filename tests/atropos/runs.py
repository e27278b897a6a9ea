"""Whole runs of atroposlib's own environments with a trainer, against any server of the API at `address`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.atropos.clients import Trainer, environment_of

#: Groups that wait when three batches of 8 do, in fours.
FULL = 6


def one_environment(address: str, tokenizer: Path, folder: Path) -> None:
    """It pauses when three batches wait, carries on when they are taken, evaluates, saves, and ends."""
    trainer = Trainer(address, 8, folder)
    config: dict[str, Any] = {"group_size": 4, "total_steps": 9, "steps_per_eval": 5, "max_batches_offpolicy": 3}
    with environment_of(address, tokenizer, folder / "env.log", **config) as env:
        trainer.await_queue(FULL)
        assert FULL <= trainer.await_still() <= 2 * FULL, "it paused; those on their way when it saw the queue came too"
        batches = []
        for n in range(9):
            if n < 3:
                trainer.await_queue(FULL)
            batches.append(trainer.batch())
        did = env.report()
    trainer.close()
    for batch in batches:
        assert sum(len(group["tokens"]) for group in batch) == 8
    items = [group["generation_params"]["item"] for batch in batches for group in batch]
    assert len(set(items)) == len(items), "no group twice"
    assert set(items) <= set(did["sent"])
    for group in (group for batch in batches for group in batch):
        _is_whole(group, env_id=0)
        assert group["scores"] == [1.0, 0.0, 1.0, 0.0]
    assert did["wandb_prepend"] == "number_0"
    assert did["curr_step"] > 5
    assert did["left"] == {"status": "success"}
    assert [step >= 5 for step in did["evaluated"]] == [True]
    saved = {f"step-{step}.json" for step in did["saved"]}
    assert saved == {path.name for path in (folder / "env_checkpoints" / "number_0").iterdir()} != set()


def two_environments(address: str, tokenizer: Path, folder: Path, *, makes_ahead: bool = False) -> None:
    """Groups of 4 and of 2; half of every batch of 8 is the second's, whenever it has as much. `makes_ahead`: where the
    server makes several batches at once and hands them out later, one may be from before it had as much."""
    trainer = Trainer(address, 8, folder)
    steps = 5  # an environment leaves once what is queued would do for the rest of `total_steps`: well after these
    more: dict[str, Any] = {"total_steps": 4 * steps, "steps_per_eval": 0}
    with (
        environment_of(address, tokenizer, folder / "fours.log", group_size=4, **more) as fours,
        environment_of(
            *(address, tokenizer, folder / "twos.log"),
            group_size=2,
            min_batch_allocation=0.5,
            wandb_name="twos",
            **more,
        ) as twos,
    ):
        trainer.await_environment(1)
        taken = trainer.batches_until_the_end_of(fours, twos, steps=steps, full=FULL + 2)
        did = {report["env_id"]: report for report in (fours.report(), twos.report())}
    trainer.close()
    assert {report["wandb_prepend"] for report in did.values()} == {"number_0", "twos_0"}
    (second,) = (env_id for env_id, report in did.items() if report["wandb_prepend"] == "twos_0")
    assert len(taken) >= steps
    owed = [batch for batch, queued in taken[:steps] if queued[second] >= 2]
    assert owed
    shares = [sum(len(group["tokens"]) for group in batch if group["env_id"] == second) for batch in owed]
    assert (max if makes_ahead else min)(shares) >= 4, shares
    batches = [batch for batch, _ in taken]
    for batch in batches:
        assert sum(len(group["tokens"]) for group in batch) == 8
        for group in batch:
            _is_whole(group, env_id=group["env_id"])
            assert len(group["tokens"]) == (2 if group["env_id"] == second else 4)
    sent = [(group["env_id"], group["generation_params"]["item"]) for batch in batches for group in batch]
    assert len(set(sent)) == len(sent), "no group twice"


def _is_whole(group: dict[str, Any], env_id: int) -> None:
    assert group["env_id"] == env_id
    for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
        assert all(mask in (-100, token) for token, mask in zip(tokens, masks, strict=True))
        assert all((logprob == 1.0) == (mask == -100) for logprob, mask in zip(logprobs, masks, strict=True))
