"""What earlier releases wrote opens in this one, and nothing of it is lost: their files are kept, as they left them.

`tests/upgrades/make.py` writes a release's folder; the newest is this release's own, or the one before it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.envs.api import Api
from tests.gateway.kit import running_gateway, told
from tests.gateway.rollout import Rollout, chat, scripted
from tests.pool.servers import ServedPool
from tests.trainer.kit import pool_of
from tests.upgrades.make import IN_OUTBOX, RELEASES, REWARDS, describe, steps, trainer_config

from headrace import DataPool, connect
from headrace.envs.api_client import ApiClient
from headrace.envs.sender import GroupSpool, Sender
from headrace.flows.rollout_state import RolloutStateFile
from headrace.gateway.outbox_file import OutboxFile
from headrace.pool.journal.repair import verify

KEPT = sorted(RELEASES.iterdir())


@pytest.fixture(params=KEPT, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A release's files, to be changed as whoever opens them does."""
    return Path(shutil.copytree(request.param, tmp_path / "kept"))


def expected(release: Path) -> Any:
    return json.loads((release / "expected.json").read_text())


def test_a_journal_opens_with_all_that_it_held(release: Path) -> None:
    found = verify(release / "journal")
    assert (found.damage, found.torn) == ([], None)
    with DataPool(release / "journal") as pool:
        assert describe(pool) == expected(release)
        assert pool.stats()["balanced"]


def test_what_is_sent_again_after_an_upgrade_counts_once(release: Path) -> None:
    with DataPool(release / "journal") as pool:
        before = pool.stats()["ledger"]
        again = pool.submit_steps([each for each in steps() if each.prompt_uid != "pair"])  # some are consumed by now
        assert (again.accepted, again.late) == (0, 0)
        assert pool.stats()["ledger"]["submitted"] == before["submitted"]
        pool.compact()
    with DataPool(release / "journal") as pool:
        assert describe(pool) == expected(release)


def test_an_outbox_is_read_whole(release: Path) -> None:
    file = OutboxFile(release / "outbox")
    found = [(channel, block.heads[0].trajectory_uid) for _, channel, block in file.read()]
    file.close()
    assert found == [(channel, uid) for uid, channel in IN_OUTBOX.items()]
    assert (file.damaged, file.aside.exists()) == (0, False)


async def test_a_spool_is_sent(release: Path, api: Api) -> None:
    client = ApiClient(api.address)
    sending = Sender(client, GroupSpool(release / "spool"), most_bytes=1 << 20, acknowledged=lambda: None)
    sending.start()
    assert await sending.drain(120) == 0
    await sending.close()
    await client.close()
    assert [group["tokens"][0][1] for group in api.received] == [5, 6, 7]


def test_a_rollouter_goes_on_where_it_was(release: Path) -> None:
    with RolloutStateFile(release / "state.json") as file:
        state = file.load(12, 4)
    assert (state.rows, state.val_rows, state.accepted, state.position) == (12, 4, 5, 7)
    assert state.failed == {"timeout": 1}


def test_a_training_run_goes_on(release: Path) -> None:
    from headrace.trainer.trainer import Trainer

    latest = max((release / "run" / "checkpoints").iterdir())
    model = Path(shutil.copytree(latest, release / "model"))
    with pool_of(REWARDS) as pool:
        done = Trainer(trainer_config(release / "run", model, 3), resume=True, pool=pool).run()
    assert (done.step, done.batches) == (3, 3)


def test_a_pool_and_a_gateway_upgraded_in_turn_lose_nothing(release: Path, folder: Path) -> None:
    """The pool first, on the journal of the release before; then the gateway, on that release's outbox; then the pool
    once more, while agents call."""
    with ServedPool(release / "journal") as served, scripted(folder) as rollout:
        said = played(served, rollout, folder, release / "outbox")
        with connect(served.address) as pool:
            assert pool.stats()["balanced"]
            for uid, channel in IN_OUTBOX.items():
                assert len(pool.trajectory(uid, channel)) == 1
            assert [len(pool.trajectory(uid, "train")) for uid in said] == [3, 3]
            held = expected(release)["channels"]["train"]
            assert pool.stats("train")["ledger"]["submitted"] == held["ledger"]["submitted"] + 2 + 2 * 3


def played(served: ServedPool, rollout: Rollout, folder: Path, outbox: Path) -> list[str]:
    """Two conversations, in each of which the pool is away for a call; their trajectories."""
    said: list[str] = []
    for end in (served.stop, served.kill):
        with connect(served.address, retry_s=0.05) as pool:
            running = running_gateway(pool, rollout.address, folder, outbox_file=outbox, drain_s=None)
            with running as gateway:
                begun = gateway.init()
                said.append(begun["trajectory_uid"])
                told(chat(gateway, begun["base_url"], "before"))
                end()
                told(chat(gateway, begun["base_url"], "while it is away"))
                served.start()
                told(chat(gateway, begun["base_url"], "after"))
    return said
