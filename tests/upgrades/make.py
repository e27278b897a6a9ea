"""Writes what this release leaves on disk, small, for the releases after it to open:

    python -m tests.upgrades.make

It makes the folder `tests/upgrades/releases/VERSION` anew: a pool's journal, a gateway's outbox, an environment's
spool, a rollouter's state and a trainer's run, and `expected.json`, what a pool says of the journal. A release's folder
is made once, when it is released, and stays: later ones are to open it as it is.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from headrace import DataPool, Step
from headrace.data.json import to_json
from headrace.data.packing import pack
from headrace.version import __version__

RELEASES = Path(__file__).parent / "releases"
#: Made again by whoever opens a journal, and of no content.
LEFT_OUT = ("lock", "reserve")
#: The trajectories in the outbox, with their channels.
IN_OUTBOX = {"box-0": "train", "box-1": "val", "box-2": "train"}
#: A model for a checkpoint of some 100 kB.
MODEL = {
    **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
}
REWARDS = [[0.0, 1.0], [1.0, 0.0], [0.0, 2.0], [3.0, 1.0]]


def step(uid: str, index: int = 0, turns: int = 1, **fields: Any) -> Step:
    """The turn `index` of a conversation of so many; its prompt is all that came before."""
    before = [token for turn in range(index) for token in (10 + turn, 20 + turn, 21 + turn)]
    given: dict[str, Any] = {
        "prompt_ids": [1, 2, *before, 10 + index],
        "response_ids": [20 + index, 21 + index],
        "rollout_log_probs": [-0.5, -0.25],
        "trajectory_uid": uid,
        "prompt_uid": uid.partition("/")[0],
        "step_index": index,
        "is_last": index == turns - 1,
        "policy_version": 3,
        "created_at": 1_790_000_000.0,
        "finish_reason": "stop",
        "sampling": {"temperature": 1.0, "top_p": 0.9},
        "call_id": f"{uid}#{index}",
    }
    return Step(**{**given, **fields})


def steps() -> list[Step]:
    """Steps of every kind that a pool keeps."""
    media = {"image": b"\x89PNG", "pixels": np.arange(6, dtype=np.float32).reshape(2, 3)}
    return [
        *(step("long", turn, 3, metadata={"task": {"n": [1, 2.5, None, "é"]}}) for turn in range(3)),
        *(step(f"pair/{at}", reward=float(at), metadata={"at": at}) for at in range(2)),
        step(
            "seen", multi_modal_data=media, routed_experts=[[1, 2], [3, 4], [5, 300]], tags=["kept"], note="looked at"
        ),
        step("bad", quarantined="log_prob_count", rollout_log_probs=None),
        step("mixed", version_spans=((0, 2), (1, 3)), quality=0.5, trainable=False),
        step("open", 0, 2),
    ]


def describe(pool: DataPool) -> Any:
    """What a pool holds, as JSON; whether steps are with a consumer is left out, since leases run out."""
    stats = pool.stats()
    found: dict[str, Any] = {"channels": {}}
    for name in sorted(stats["channels"]):
        ledger = dict(stats["channels"][name]["ledger"])
        ledger["there"] = ledger.pop("queued") + ledger.pop("leased")
        rows = pool.list_trajectories(name, limit=1000)["items"]
        kept = {row["trajectory_uid"]: pool.trajectory(row["trajectory_uid"], name) for row in rows}
        found["channels"][name] = {
            "ledger": ledger,
            "n_rollouts": stats["channels"][name]["config"]["n_rollouts"],
            "complete": {uid: each.complete for uid, each in sorted(kept.items())},
            "trajectories": {uid: each.to_dict() for uid, each in sorted(kept.items())},
            "failed": [row["trajectory_uid"] for row in pool.list_trajectories(name, state="failed")["items"]],
        }
    found["scored"] = {name: stats["desk"][name] for name in ("posted", "served")}
    return orjson.loads(to_json(found))


def scored(item: int, env_id: int = 0) -> dict[str, Any]:
    """A group as environments post it."""
    return {"tokens": [[1, item]] * 2, "masks": [[-100, item]] * 2, "scores": [0.0, 1.0], "env_id": env_id}


def journal(folder: Path) -> Any:
    """A journal with a snapshot and commits behind it; what its pool says."""
    from headrace.data.scored.read import read_group
    from headrace.pool.scored.types import Posting

    with DataPool(folder, durability="os") as pool:
        pool.configure("pairs", n_rollouts=2)
        pool.set_version(3)
        made = steps()
        pool.submit_steps([each for each in made if each.prompt_uid != "pair"])
        pool.submit_steps([each for each in made if each.prompt_uid == "pair"], "pairs")
        pool.submit_steps([step("gone"), step("lost", 0, 2)])
        batch = pool.fetch_batch(1, lease_s=600)
        assert batch is not None
        batch.ack()
        pool.fail("lost", "the sandbox was gone")
        for item in (7, 8):
            group = read_group(orjson.dumps(scored(item)))
            pool.desk_post([Posting(group.piece, group.sequences, group.env_id, f"key-{item}")])
        pool.compact()
        pool.open("promised", "promised", metadata={"truth": 42})
        pool.reward("mixed", 0.75)
        pool.submit_steps([step("after", metadata={"where": "behind the snapshot"})], "val")
    with DataPool(folder, durability="os") as pool:
        said = describe(pool)
    for name in LEFT_OUT:
        (folder / name).unlink(missing_ok=True)
    return said


def outbox(path: Path) -> None:
    """An outbox with calls for two channels."""
    from headrace.gateway.outbox_file import OutboxFile

    async def fill() -> None:
        for uid, channel in IN_OUTBOX.items():
            await file.append(channel, pack([step(uid)]))

    file = OutboxFile(path)
    asyncio.run(fill())
    file.close()


def spool(folder: Path) -> None:
    """A spool with two posts, of one group and of two."""
    from headrace.envs.sender import GroupSpool

    found = GroupSpool(folder)
    for at, groups in enumerate((scored(5), [scored(6), scored(7)])):
        body = orjson.dumps(groups)
        found.write(found.add(body, len(groups) if isinstance(groups, list) else 1, f"{at:032x}"))
    found.close()


def rollout_state(path: Path) -> None:
    """Where a rollouter stands."""
    from headrace.flows.rollout_state import RolloutStateFile

    with RolloutStateFile(path) as file:
        state = file.load(12, 4)
        state.accepted, state.position, state.failed = 5, 7, {"timeout": 1}
        file.save(state)
    path.with_name(f"{path.name}.lock").unlink()


def trainer_config(run: Path, model: Path, steps: int) -> Any:
    from headrace.trainer.config import TrainerConfig

    given = {"run": run, "model": model, "steps": steps, "pool": {"batch_size": 1, "prefetch": False}}
    checkpoint, optimizer = {"every": 1, "keep": 1}, {"lr": 1e-3}
    return TrainerConfig.model_validate({**given, "checkpoint": checkpoint, "optimizer": optimizer})


def trainer_run(folder: Path, scratch: Path) -> None:
    """A run's checkpoint after two steps, with a model of its own."""
    from tests.trainer.kit import pool_of

    from headrace.engine import tiny
    from headrace.trainer.trainer import Trainer

    model = scratch / "model"
    model.mkdir(parents=True)
    tiny.build(model, 0, **MODEL)
    run = scratch / "run"
    with pool_of(REWARDS) as pool:
        Trainer(trainer_config(run, model, 2), pool=pool).run()
    shutil.copytree(run / "checkpoints", folder / "checkpoints")
    shutil.copy(run / "leases.json", folder)


def main() -> None:
    place = RELEASES / __version__
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    said = journal(place / "journal")
    (place / "expected.json").write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
    outbox(place / "outbox")
    spool(place / "spool")
    rollout_state(place / "state.json")
    scratch = place / "scratch"
    trainer_run(place / "run", scratch)
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
