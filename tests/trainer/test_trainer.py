"""The loop: what is learned from once, what survives a crash, what is told."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.kit import pool_of, submit_group

from headrace import DataPool
from headrace.data.errors import InvalidInput
from headrace.trainer import Trainer, TrainerConfig
from headrace.trainer.checkpoint import BadCheckpoint, Checkpoints, LeaseFile
from headrace.trainer.learner import Learner
from headrace.trainer.sync import Probe, Publisher, SyncReport

GROUPS = [[0.0, 1.0], [1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [0.0, 1.0], [1.0, 0.5], [0.0, 1.0], [1.0, 0.0]]


class Killed(BaseException):
    """What nothing catches, as nothing catches SIGKILL."""


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Callable[..., TrainerConfig]:
    def made(**changes: Any) -> TrainerConfig:
        given: dict[str, Any] = {
            "model": model,
            "run": tmp_path / "run",
            "steps": 4,
            "pool": {"batch_size": 2, "prefetch": False, **changes.pop("pool", {})},
            "optimizer": {"lr": 1e-3, "minibatches": 2, **changes.pop("optimizer", {})},
            "checkpoint": {"every": 1, **changes.pop("checkpoint", {})},
        }
        return TrainerConfig.model_validate({**given, **changes})

    return made


Config = Callable[..., TrainerConfig]


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The trajectories that were learned from, in order."""
    seen: list[str] = []
    learn = Learner.learn

    def noting(self: Learner, sequences: Any, step: int, version: int) -> dict[str, float]:
        found = learn(self, sequences, step, version)
        seen.extend(sequence.trajectory_uid for sequence in sequences)
        return found

    monkeypatch.setattr(Learner, "learn", noting)
    return seen


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Probe]]:
    """The versions that servers were given, with their probes: servers that take whatever comes."""
    found: list[tuple[int, Probe]] = []

    def publish(self: Publisher, weights: Any, version: int, probe: Probe) -> SyncReport:
        found.append((version, probe))
        return SyncReport(version, "keep", 0.0, 0.0)

    monkeypatch.setattr(Publisher, "check", lambda *given: None)
    monkeypatch.setattr(Publisher, "publish", publish)
    return found


#: Servers without a gateway.
SERVERS = {"servers": ["http://127.0.0.1:9"]}


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def ledger(pool: DataPool) -> dict[str, int]:
    stats = pool.stats()
    assert stats["balanced"]
    return dict(stats["ledger"])


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in trainer.learner.policy.weights().values()])


def run_until(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, where: str, step: int) -> None:
    """Runs and dies in the middle of a step, at the call of a method of this name."""
    owner: Any = trainer.feed if where == "ack" else trainer.checkpoints if where == "save" else trainer
    method = getattr(owner, where)

    def dying(*args: Any, **kwargs: Any) -> Any:
        if trainer.progress.step >= step:
            raise Killed
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, where, dying)
    # A killed process gives nothing back.
    monkeypatch.setattr(trainer.feed, "_give_back", lambda lease: None)
    with pytest.raises(Killed):
        trainer.run()


def test_a_run_learns_from_every_batch_once_and_tells_each_step(config: Config, learned: list[str]) -> None:
    pool = pool_of(GROUPS, vocabulary=300)
    done = Trainer(config(), pool=pool).run()
    assert (done.step, done.version, done.batches, done.trajectories) == (4, 4, 4, 16)
    assert len(learned) == len(set(learned)) == 16
    assert ledger(pool)["consumed"] == 16
    told = rows(config().run)
    assert [row["step"] for row in told] == [1, 2, 3, 4]
    assert [row["staleness_max"] for row in told] == [0, 1, 2, 3]
    assert told[0]["versions"] == {"0": told[0]["tokens"]}
    assert {"reward", "loss", "entropy", "kl", "clip_fraction", "ratio_max", "tokens_s", "queue", "times"} <= set(
        told[0]
    )


def test_with_prefetch_the_run_is_the_same(config: Config) -> None:
    ends = []
    for prefetch in (True, False):
        trainer = Trainer(config(pool={"prefetch": prefetch}, run=config().run / str(prefetch)), pool=pool_of(GROUPS))
        trainer.run()
        ends.append(weights(trainer))
    assert torch.equal(*ends)


def test_batches_are_acknowledged_with_the_checkpoint_that_learned_from_them(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of(GROUPS)
    trainer = Trainer(config(checkpoint={"every": 2}), pool=pool)
    found = []
    step = trainer._step

    def looking(batch: Any) -> None:
        step(batch)
        found.append(ledger(pool)["consumed"])

    monkeypatch.setattr(trainer, "_step", looking)
    trainer.run()
    assert found == [0, 8, 8, 16]


def test_a_resumed_run_ends_exactly_where_an_uninterrupted_one_does(config: Config) -> None:
    whole = Trainer(config(run=config().run / "whole"), pool=pool_of(GROUPS))
    whole.run()
    pool = pool_of(GROUPS)
    Trainer(config(steps=2), pool=pool).run()
    again = Trainer(config(), resume=True, pool=pool)
    assert again.run().step == 4
    assert torch.equal(weights(whole), weights(again))
    first, second = rows(whole.config.run), rows(again.config.run)
    assert [row["loss"] for row in first] == [row["loss"] for row in second]


@pytest.mark.parametrize("where", ["_step", "save", "ack"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_crash_loses_no_batch_and_repeats_none(
    config: Config, monkeypatch: pytest.MonkeyPatch, learned: list[str], where: str, every: int
) -> None:
    whole = Trainer(config(checkpoint={"every": every}, run=config().run / "whole"), pool=pool_of(GROUPS))
    whole.run()
    learned.clear()
    pool = pool_of(GROUPS)
    run_until(Trainer(config(checkpoint={"every": every}), pool=pool), monkeypatch, where, step=2)
    kept = Checkpoints(config().run, config().model, 2).latest
    assert kept is not None or every == 2
    monkeypatch.undo()
    again = Trainer(config(checkpoint={"every": every}), resume=True, pool=pool)
    survived = again.progress.trajectories
    again.run()
    assert again.progress.trajectories == 16
    assert torch.equal(weights(whole), weights(again))
    assert ledger(pool) | {"consumed": 16, "queued": 0, "leased": 0} == ledger(pool)
    assert survived <= 8


def test_a_device_that_is_not_there_is_refused(config: Config) -> None:
    with pytest.raises(InvalidInput, match=r"device is 'cuda:99'.*set one of auto, cpu"):
        Trainer(config(device="cuda:99"), pool=pool_of(GROUPS))


def test_what_was_learned_from_and_is_handed_out_again_is_passed_over(
    config: Config, monkeypatch: pytest.MonkeyPatch, learned: list[str]
) -> None:
    pool = pool_of(GROUPS)
    run_until(Trainer(config(), pool=pool), monkeypatch, "ack", step=2)
    monkeypatch.undo()
    # While nobody was there, the lease ran out: its groups went back to their place.
    for lease in LeaseFile(config().run).read()[0]:
        pool.nack(lease)
    again = Trainer(config(), resume=True, pool=pool)
    learned_before = set(
        json.loads((again.checkpoints.latest or Path()).joinpath("progress.json").read_text())["leases"]
    )
    assert learned_before
    seen: list[str] = []
    fetch = again.feed.next

    def noting(**kwargs: Any) -> Any:
        batch = fetch(**kwargs)
        seen.extend(batch.trajectories)
        return batch

    monkeypatch.setattr(again.feed, "next", noting)
    again.run()
    assert len(seen) == len(set(seen)) == 8
    assert ledger(pool)["consumed"] == 16
    assert again.progress.trajectories == 16
    assert not again.feed.repeats


def test_a_batch_that_teaches_nothing_is_counted_and_makes_no_version(config: Config) -> None:
    pool = pool_of([[1.0, 1.0]] * 4 + [[0.0, 1.0]] * 2)
    done = Trainer(config(steps=3), pool=pool).run()
    assert (done.step, done.version) == (3, 1)
    assert [row["skipped_zero_variance"] for row in rows(config().run)] == [2, 2, 0]
    assert ledger(pool)["consumed"] == 12


def test_a_batch_that_teaches_nothing_is_a_version_where_that_is_asked_for(config: Config) -> None:
    pool = pool_of([[1.0, 1.0]] * 4 + [[0.0, 1.0]] * 2)
    done = Trainer(config(steps=3, version_each_step=True), pool=pool).run()
    assert (done.step, done.version) == (3, 3)


def test_the_run_ends_when_the_channel_is_shut_down_and_empty(config: Config) -> None:
    pool = pool_of(GROUPS[:4])
    pool.shutdown()
    assert Trainer(config(steps=100), pool=pool).run().step == 2


def test_the_run_ends_where_the_reward_is_what_was_asked_for(config: Config) -> None:
    pool = pool_of([[0.0, 1.0]] * 4 + [[1.0, 3.0]] * 8)
    done = Trainer(config(steps=3, stop_at_reward=1.9, stop_window=2), pool=pool).run()
    assert done.step == 3
    again = Trainer(config(steps=9, stop_at_reward=1.9, stop_window=2), resume=True, pool=pool).run()
    assert again.step == 4  # the last step before it counts too: 0.5, 0.5, 2, 2
    assert [row["reward"] for row in rows(config().run)] == [0.5, 0.5, 2.0, 2.0]


def test_stop_ends_the_run_after_its_step_with_a_checkpoint(config: Config) -> None:
    pool = pool_of(GROUPS)
    trainer = Trainer(config(checkpoint={"every": 100}), pool=pool)
    step = trainer._step

    def stopping(batch: Any) -> None:
        step(batch)
        trainer.stop()

    trainer._step = stopping  # type: ignore[method-assign]
    assert trainer.run().step == 1
    assert ledger(pool)["consumed"] == 4
    assert ledger(pool)["leased"] == 0
    assert trainer.checkpoints.latest is not None


def test_versions_that_were_published_and_lost_are_not_used_again(config: Config) -> None:
    pool = pool_of(GROUPS)
    Trainer(config(steps=1), pool=pool).run()
    pool.set_version(7, channel="train")
    done = Trainer(config(steps=2), resume=True, pool=pool).run()
    assert done.version > 7


def test_without_a_gateway_the_pool_is_told_a_version_once_the_servers_have_it(
    config: Config, published: list[tuple[int, Probe]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, publish = pool_of(GROUPS), Publisher.publish
    seen: list[int] = []

    def looking(self: Publisher, weights: Any, version: int, probe: Probe) -> SyncReport:
        seen.append(int(pool.stats("train")["policy_version"] or 0))
        return publish(self, weights, version, probe)

    monkeypatch.setattr(Publisher, "publish", looking)
    Trainer(config(sync=SERVERS), pool=pool).run()
    assert [version for version, _ in published] == [0, 1, 2, 3, 4]
    assert seen == [0, 0, 1, 2, 3]
    assert pool.stats("train")["policy_version"] == 4


def test_without_a_gateway_a_version_that_was_published_and_lost_is_not_used_again(
    config: Config, published: list[tuple[int, Probe]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of(GROUPS)
    run_until(Trainer(config(sync=SERVERS), pool=pool), monkeypatch, "save", step=1)
    before = [version for version, _ in published]
    Trainer(config(sync=SERVERS, steps=1), resume=True, pool=pool).run()
    assert before == [0, 1]
    assert [version for version, _ in published[2:]] == [2, 3]


def test_servers_are_probed_with_less_than_a_sequence_that_may_fill_their_context(
    config: Config, published: list[tuple[int, Probe]]
) -> None:
    Trainer(config(sync=SERVERS, steps=2), pool=pool_of(GROUPS, tokens=9)).run()
    assert [len(probe.ids) for _, probe in published] == [32, 11, 11]  # of three tokens of a prompt, nine of an answer


def test_validation_looks_at_its_own_channel_and_learns_nothing_from_it(config: Config, learned: list[str]) -> None:
    pool = pool_of(GROUPS)
    pool.configure("val", n_rollouts=2)
    for at in range(3):
        submit_group(_Channel(pool, "val"), f"val{at}", [1.0, 0.0])
    Trainer(config(steps=2, validation={"every": 2}), pool=pool).run()
    told = rows(config().run)
    assert "validation" not in told[0]
    assert told[1]["validation"] == {"reward": 0.5, "trajectories": 6}
    assert not [uid for uid in learned if uid.startswith("val")]


class _Channel:
    def __init__(self, pool: DataPool, channel: str) -> None:
        self._pool, self._channel = pool, channel

    def submit_steps(self, steps: Any) -> None:
        self._pool.submit_steps(steps, channel=self._channel)


def test_groups_of_the_history_are_learned_from_again_where_the_order_is_mixed(
    config: Config, learned: list[str]
) -> None:
    pool = pool_of(GROUPS)
    pool.configure("train", history_size=10, replay_share=0.5)
    Trainer(config(steps=2), pool=pool).run()
    mixed = config(steps=4, pool={"order": "mixed"}, algorithm={"loss": "tis"})
    Trainer(mixed, resume=True, pool=pool).run()
    assert [row["replayed"] for row in rows(mixed.run)] == [0, 0, 1, 1]
    assert len(learned) > len(set(learned))


def test_a_lease_is_prolonged_while_its_batch_is_held(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(GROUPS)
    prolonged = threading.Event()
    extend = pool.extend

    def noting(lease: str, lease_s: float, channel: str = "train") -> float:
        deadline = extend(lease, lease_s, channel=channel)
        prolonged.set()
        return deadline

    monkeypatch.setattr(pool, "extend", noting)
    trainer = Trainer(config(steps=1, pool={"lease_s": 9.0}), pool=pool)
    step = trainer._step

    def slow(batch: Any) -> None:
        assert prolonged.wait(120)
        step(batch)

    monkeypatch.setattr(trainer, "_step", slow)
    trainer.run()
    assert ledger(pool)["consumed"] == 4
    assert ledger(pool)["leased"] == 0


def test_a_folder_that_holds_a_run_is_not_begun_anew(config: Config) -> None:
    Trainer(config(steps=1), pool=pool_of(GROUPS)).run()
    with pytest.raises(InvalidInput, match="--resume"):
        Trainer(config(), pool=pool_of(GROUPS))


def test_a_damaged_checkpoint_is_named(config: Config) -> None:
    trainer = Trainer(config(steps=1), pool=pool_of(GROUPS))
    trainer.run()
    latest = trainer.checkpoints.latest
    assert latest is not None
    (latest / "trainer.pt").write_bytes(b"no")
    with pytest.raises(BadCheckpoint, match=latest.name):
        Trainer(config(), resume=True, pool=pool_of(GROUPS))


def test_only_the_newest_checkpoints_stay_and_a_server_can_load_them(config: Config) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = Trainer(config(checkpoint={"every": 1, "keep": 2}), pool=pool_of(GROUPS))
    trainer.run()
    assert sorted(path.name for path in trainer.checkpoints.folder.iterdir()) == ["00000003", "00000004"]
    latest = trainer.checkpoints.latest
    assert AutoTokenizer.from_pretrained(latest).chat_template
    loaded = AutoModelForCausalLM.from_pretrained(latest)
    assert torch.equal(torch.cat([p.detach().flatten() for p in loaded.parameters()]), weights(trainer).cpu())


def test_a_checkpoint_of_a_hub_models_run_has_its_configuration_and_tokenizer(
    config: Config, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached, commit = tmp_path / "hub" / "models--someone--small", "0" * 40
    shutil.copytree(model, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    trainer = Trainer(config(model=Path("someone/small"), steps=1), pool=pool_of(GROUPS))
    trainer.run()
    latest = trainer.checkpoints.latest
    assert AutoTokenizer.from_pretrained(latest).chat_template
    loaded = AutoModelForCausalLM.from_pretrained(latest)
    assert torch.equal(torch.cat([p.detach().flatten() for p in loaded.parameters()]), weights(trainer).cpu())


def test_a_line_that_was_not_written_to_its_end_is_dropped_on_resume(config: Config) -> None:
    pool = pool_of(GROUPS)
    Trainer(config(steps=2), pool=pool).run()
    with (config().run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    Trainer(config(steps=3), resume=True, pool=pool).run()
    assert [row["step"] for row in rows(config().run)] == [1, 2, 3]
