"""Trains with verl's own workers on batches from a Headrace pool: verl 0.9 on Ray, without verl's rollout.

    python examples/verl_recipe.py ray-actor://data_pool ./qwen runs/verl --workers 8 --gateway http://127.0.0.1:8100 \\
        data.max_prompt_length=2048 data.max_response_length=6144 actor_rollout_ref.actor.optim.lr=1e-6

Agents fill the pool through the gateway; verl's actor workers, one a GPU in a `RayWorkerGroup`, learn from it. A step:
a batch under a lease, `VerlBackend` to a `DataProto`, old log-probs by the workers, advantages by verl's functions, the
update by the workers, weights to the gateway's servers, and a checkpoint. The batch is acknowledged last: a crash hands
it out again. Settings are those of verl's `ppo_trainer`. `verl_cpu.py`, beside this file, says how to try it without a
GPU.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import ray
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.metric import reduce_metrics
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from headrace import connect
from headrace.data.errors import InvalidInput
from headrace.trainer.backends import VerlBackend, keep_given_advantages
from headrace.trainer.sync import Probe, Publisher, SyncConfig
from verl import DataProto

#: Seconds for which a batch is this trainer's: more than the steps up to the next checkpoint take.
LEASE_S = 3600.0
#: Tokens of a sequence that a rollout server's weights are verified with.
PROBE_TOKENS = 256
#: What a CPU needs beside verl's defaults, which are for GPUs: an attention that is there, and all in float32.
CPU_SETTINGS = (
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
)


class ActorWorker(ActorRolloutRefWorker):
    """verl's worker, which also runs on a CPU and hands its weights out."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if get_device_name() == "cpu":  # verl would name gloo twice, once as the device's, which torch refuses
            initialize_global_process_group_ray(backend="gloo")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor] | None:
        """All weights by their names in a checkpoint, from the first worker; the others help to collect them."""
        found, _ = self.actor.engine.get_per_tensor_param()
        whole = {name: tensor.detach().cpu().clone() for name, tensor in found}
        return whole if self.rank == 0 else None


class VerlTrainer:
    """verl's actor workers on Ray, and the batches of a pool made theirs. `config` is verl's (`settings`)."""

    def __init__(self, config: DictConfig, workers: int, mini_batches: int = 1) -> None:
        self.config, self.workers, self.mini_batches = config, workers, mini_batches
        if (config.algorithm.rollout_correction or {}).get("bypass_mode"):
            raise InvalidInput("algorithm.rollout_correction.bypass_mode is true; this recipe computes old log-probs")
        lengths = config.data.max_prompt_length, config.data.max_response_length
        self._backend = VerlBackend(*lengths, pad_id=0, world_size=workers * mini_batches)
        use_gpu = get_device_name() != "cpu"
        free = ray.cluster_resources().get("GPU", 0)
        if use_gpu and free < workers:  # verl would wait for them without a word
            raise InvalidInput(
                f"workers is {workers}, and the Ray cluster has {free:g} GPUs; without any, set verl's platform to the "
                "CPU (examples/verl_cpu.py)"
            )
        made = RayClassWithInitArgs(ray.remote(ActorWorker), config=config.actor_rollout_ref, role="actor")
        resources = RayResourcePool([workers], use_gpu=use_gpu, max_colocate_count=1)
        self._group = RayWorkerGroup(resources, made, device_name=get_device_name())
        self._group.init_model()

    def convert(self, batch: Any) -> DataProto:
        """The batch of a pool as the workers take it. Raises `InvalidInput` where a trajectory has no reward."""
        data = self._backend.convert(batch)
        if "token_level_scores" not in data.batch:
            raise InvalidInput("a trajectory of the batch has no reward; set rewards before one is completed")
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
        data.meta_info["global_token_num"] = data.batch["attention_mask"].sum(-1).tolist()
        return data

    def learn(self, data: DataProto) -> dict[str, Any]:
        """One step on a converted batch; returns verl's metrics of it."""
        algorithm, metrics = self.config.algorithm, {}
        data.batch["old_log_probs"] = self.log_probs(data)
        if algorithm.rollout_correction is not None and "rollout_log_probs" in data.batch:
            data, metrics = compute_rollout_correction_and_add_to_batch(data, algorithm.rollout_correction)
        data = compute_advantage(
            data,
            algorithm.adv_estimator,
            algorithm.gamma,
            algorithm.lam,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
        )
        return {**metrics, **self._update(keep_given_advantages(data))}

    def log_probs(self, data: DataProto) -> torch.Tensor:
        """By the workers' weights, the log-probs of each response's tokens."""
        tensors = left_right_2_no_padding(data.to_tensordict())
        return no_padding_2_padding(self._computed(tensors), tensors).float()

    def _computed(self, tensors: Any) -> torch.Tensor:
        """What stands at a token is the log-prob of the next."""
        tu.assign_non_tensor(tensors, calculate_entropy=False, compute_loss=False)
        return tu.get(self._group.compute_log_prob(tensors), "log_probs")

    def _update(self, data: DataProto) -> dict[str, Any]:
        tensors, actor = left_right_2_no_padding(data.to_tensordict()), self.config.actor_rollout_ref.actor
        rows = len(data) // self.mini_batches
        tu.assign_non_tensor(
            tensors,
            calculate_entropy=actor.calculate_entropy or actor.entropy_coeff != 0.0,
            distillation_use_topk=False,
            distillation_only=False,
            global_batch_size=rows,
            mini_batch_size=rows,
            epochs=actor.ppo_epochs,
            seed=actor.data_loader_seed,
            dataloader_kwargs={"shuffle": actor.shuffle},
            compute_loss=True,
        )
        return reduce_metrics(tu.get(self._group.update_actor(tensors), "metrics"))

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights, by their names in a checkpoint."""
        return self._group.weights()[0]

    def probe(self, data: DataProto) -> Probe:
        """Tokens of the batch's first row with the workers' log-probs of them, to verify a server by: all but the last
        at most, since a server takes no prompt that fills its context."""
        row = data.select_idxs([0] * self.workers)
        row.meta_info = {"temperature": 1.0, "global_token_num": data.meta_info["global_token_num"][: self.workers]}
        tokens = data.batch["input_ids"][0][data.batch["attention_mask"][0] == 1].tolist()
        ids = tokens[: max(2, min(PROBE_TOKENS, len(tokens) - 1))]
        found = self._computed(left_right_2_no_padding(row.to_tensordict())).unbind()[0]
        precision = self.config.actor_rollout_ref.actor.fsdp_config.get("mixed_precision") or {}
        dtype = "float32" if precision.get("param_dtype") == "fp32" else "bfloat16"
        return Probe(ids, found[: len(ids) - 1].tolist(), dtype=dtype)

    def save(self, folder: Path, step: int) -> None:
        """Writes verl's checkpoint of the workers."""
        self._group.save_checkpoint(str(folder), global_step=step)

    def load(self, folder: Path) -> None:
        """Goes on from a checkpoint."""
        self._group.load_checkpoint(str(folder))


def settings(model: str, given: list[str]) -> DictConfig:
    """verl's settings for a model: its defaults, this recipe's, and those that were given, which go before."""
    ours = [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "algorithm.adv_estimator=grpo",
        *(CPU_SETTINGS if get_device_name() == "cpu" else ()),
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*ours, *given])


def ray_environment() -> dict[str, Any]:
    """What every Ray worker of a run needs: this file, and verl's own variables of this process."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("VERL_")}
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"env_vars": {**kept, "PYTHONPATH": os.pathsep.join(folders)}}


def train(
    pool: Any,
    trainer: VerlTrainer,
    run: Path,
    *,
    steps: int,
    groups: int,
    publisher: Publisher | None = None,
    checkpoint_every: int = 1,
) -> None:
    """Learns from batches of `groups` groups until `steps` are done or the pool's channel is shut down; goes on from
    the newest checkpoint in `run`. Batches are acknowledged once a checkpoint has what was learned from them."""
    done = max((int(folder.name) for folder in run.glob("[0-9]*")), default=0)
    if done:
        trainer.load(run / str(done))
    learned: list[Any] = []
    step = done
    while step < steps:
        batch = pool.fetch_batch(groups, lease_s=LEASE_S)
        if batch is None:
            break
        step += 1
        data = trainer.convert(batch)
        metrics = trainer.learn(data) if data.batch["response_mask"].any() else {}
        reward = data.batch["token_level_scores"].sum(-1).mean().item()
        told = {"step": step, "reward": reward, **data.meta_info["headrace"], **metrics}
        print(json.dumps(told, default=float), flush=True)
        if publisher is not None:
            publisher.publish(trainer.weights(), step, trainer.probe(data))
        else:
            pool.set_version(step)
        learned.append(batch)
        if step % checkpoint_every == 0:
            checkpoint(trainer, run / str(step), step, learned)
    if learned:
        checkpoint(trainer, run / str(step), step, learned)


def checkpoint(trainer: VerlTrainer, folder: Path, step: int, learned: list[Any]) -> None:
    """Writes a checkpoint, then acknowledges the batches in it."""
    trainer.save(folder, step)
    while learned:
        learned.pop(0).ack()


def main() -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pool", help="the pool's address: ray-actor://NAME or http://HOST:PORT")
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument("run", type=Path, help="where checkpoints go")
    parser.add_argument("settings", nargs="*", help="verl's, as NAME=VALUE")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--groups", type=int, default=8, help="of a batch")
    parser.add_argument("--workers", type=int, default=1, help="verl's processes: one a GPU")
    parser.add_argument("--mini-batches", type=int, default=1, help="optimizer steps a batch")
    parser.add_argument("--checkpoint-every", type=int, default=1, help="steps; leases must last as long")
    parser.add_argument("--gateway", help="whose servers get the weights; none: nobody does")
    given = parser.parse_intermixed_args()
    ray.init(runtime_env=ray_environment())
    publisher = None
    if given.gateway is not None:
        publisher = Publisher(SyncConfig(gateway=given.gateway, folder=given.run.absolute() / "sync"))
    trainer = VerlTrainer(settings(given.model, given.settings), given.workers, given.mini_batches)
    train(
        connect(given.pool),
        trainer,
        given.run,
        steps=given.steps,
        groups=given.groups,
        publisher=publisher,
        checkpoint_every=given.checkpoint_every,
    )


if __name__ == "__main__":
    main()
