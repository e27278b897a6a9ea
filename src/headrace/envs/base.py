"""`BaseEnv`: what an author of an environment inherits from.

An author writes `setup`, `get_next_item`, `collect_trajectory` (or `collect_trajectories`) and `evaluate`. The rest is
done by parts that each have one job: `manager` (what runs when), `sender` (groups to the API), `poller` (the API's
queue), `evaluator`, `checkpoints`. They work through the methods below, so each of these can be overridden.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.envs import delivery, rollouts
from headrace.envs.api_client import ApiClient
from headrace.envs.checkpoints import Checkpoints
from headrace.envs.commands import CommandLine
from headrace.envs.config import BaseEnvConfig
from headrace.envs.counts import Counts
from headrace.envs.evaluator import Evaluator
from headrace.envs.group_file import GroupFile
from headrace.envs.manager import Manager
from headrace.envs.metrics import MetricsLog
from headrace.envs.registration import register
from headrace.envs.reporting import Reporting
from headrace.envs.schedule import crossed
from headrace.envs.server import (
    APIServer,
    APIServerConfig,
    NoTokenizer,
    ReasoningConfig,
    ServerBaseline,
    ServerManager,
    new_group,
)
from headrace.envs.server.tokenizing import load_tokenizer
from headrace.envs.types import UUID, Item, ScoredDataGroup, ScoredDataItem

log = logging.getLogger("headrace.envs")

#: Items in a row that may come to nothing where nothing else is said, and no fewer than two rounds of the workers: a
#: hiccup of a server fails all that are under way at once, and is one cause.
LEAST_FAILURES = 16
#: What `collect_trajectories` and `postprocess_histories` hand on.
Groups = ScoredDataGroup | list[ScoredDataGroup | None] | list[Any] | None


class BaseEnv(Reporting, CommandLine, ABC):
    name: ClassVar[str | None] = None
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    #: What speaks to the servers; the base's own class stands for the one of each server's `server_type`.
    server_cls: ClassVar[type[APIServer]] = APIServer  # type: ignore[type-abstract]

    def __init__(
        self,
        config: BaseEnvConfig,
        server_configs: ServerBaseline | Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        self.config = config
        self.server = ServerManager(
            server_configs,
            server_class=self.server_cls,
            slurm=slurm,
            testing=testing,
            reasoning_config=ReasoningConfig.from_env_config(config),
        )
        self.api = ApiClient(config.rollout_server_url, config.rollout_server_key)
        self.counts = Counts()
        self.metrics_log = MetricsLog(config.metrics_path, config.tensorboard_dir)
        self.manager: Manager | None = None
        self.evaluator = Evaluator(self.evaluate, self.counts, self._wake)
        self.jsonl_writer = GroupFile(config.data_path_to_save_groups) if config.data_path_to_save_groups else None

        self.env_id = -1
        self.curr_step = 0
        self.status_dict: dict[str, Any] = {}
        self.max_token_len = -1
        self.checkpoint_dir, self.checkpoint_interval = "", -1
        self.wandb_project: str | None = None
        self.wandb_group: str | None = None
        self.wandb_prepend: str | None = None

        self.backlog: list[Item] = []
        self.running_items: dict[UUID, dict[str, Any]] = {}
        self.workers: set[asyncio.Task[Any]] = set()
        self.eval_workers: set[asyncio.Task[Any]] = set()
        self.last_completed_item: Item | None = None

        self.items_sent_this_step = 0
        self.completion_lengths: list[int] = []
        self.rollouts_for_wandb: list[list[tuple[Any, ...]]] = []
        self.task_duration: list[float] = []
        self.succeeded_task_duration: list[float] = []
        self.failed_task_duration: list[float] = []
        self.task_successful: list[int] = []
        self.workers_added_list: list[int] = []

        self.max_num_workers = config.max_num_workers
        if self.max_num_workers == -1:
            self.max_num_workers = config.max_num_workers_per_node * max(1, len(self.server.servers))

    # What an author writes.

    async def setup(self) -> None:
        """Called once, before anything else."""
        raise NotImplementedError(f"{type(self).__name__} must define setup()")

    @abstractmethod
    async def get_next_item(self) -> Item:
        """The next item to be rolled out; None where there is none now."""

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | Any | None, list[Item]]:
        """One rollout of the item, and items to be rolled out later."""
        raise NotImplementedError(f"{type(self).__name__} must define collect_trajectory() or collect_trajectories()")

    async def collect_trajectories(self, item: Item) -> tuple[Groups, list[Item]]:
        """A group of rollouts of the item, or several, and items to be rolled out later."""
        times, retries = self.config.group_size, self.config.rollout_retries
        make = partial(self.collect_trajectory, item)
        return rollouts.joined(await rollouts.side_by_side(make, times, retries, self.counts))

    async def postprocess_histories(self, trajectories: Groups) -> Groups:
        """The last look at what was collected, before it is sent."""
        return trajectories

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Called every `steps_per_eval` steps."""

    async def cleanup(self) -> None:
        """Called after every item."""
        return

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, ServerBaseline | Sequence[APIServerConfig]]:
        """The configuration before flags and files: the environment's, and its servers'."""
        return cls.env_config_cls(), ServerBaseline()

    # State that outlives a process.

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Writes `data`, whose keys come back as attributes. Called at every `checkpoint_interval` of the trainer's."""
        if data is not None:
            self._checkpoints.save(step, data)

    def load_checkpoint(self) -> None:
        """Restores attributes from the newest checkpoint up to `curr_step`. Called when a run goes on."""
        for key, value in (self._checkpoints.load(self.curr_step) or {}).items():
            setattr(self, key, value)

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.checkpoint_dir, self.wandb_prepend or self._name)

    # What the parts call.

    async def env_manager(self) -> None:
        """Works for a trainer until its steps are done or SIGINT; ends with everything sent."""
        self.manager = Manager(self)
        await self.manager.run()

    async def register_env(self) -> None:
        """Registers at the API, once it is there and the trainer has begun."""
        first = self.env_id < 0
        found = await register(self.api, self.config, self._name)
        self.env_id, self.wandb_prepend, self.curr_step = found.env_id, found.wandb_name, found.starting_step
        self.checkpoint_dir, self.checkpoint_interval = found.checkpoint_dir, found.checkpoint_interval
        if self.config.total_steps == -1:
            self.config.total_steps = found.num_steps
        if self.config.total_steps < 0:
            raise InvalidInput("total_steps is -1, and the trainer gives no num_steps: set one of them")
        log.info("registered as %s (environment %d) at step %d", self.wandb_prepend, self.env_id, self.curr_step)
        if first and self.curr_step > 0:
            self.load_checkpoint()

    async def get_server_info(self) -> None:
        """Takes the trainer's batch size and token limit over."""
        found = await self.api.get("/info")
        if found["batch_size"] != -1:
            self.config.batch_size = found["batch_size"]
        if found["max_token_len"] != -1:
            self.max_token_len = found["max_token_len"]
        group, batch = self.config.group_size, self.config.batch_size
        if 0 < batch < group:
            raise InvalidInput(f"group_size is {group}, more than the {batch} sequences of a batch; lower it")

    async def get_status(self) -> None:
        """Asks for the API's queue, as `status_dict`."""
        self.status_dict = await self.api.get("/status-env", {"env_id": self.env_id})
        await self.server.update_weight(self.status_dict.get("env_weight", 1.0))

    async def env_step_checks(self) -> None:
        """Evaluates, saves and logs when the trainer's step calls for it."""
        before, now = self.curr_step, self.status_dict["current_step"]
        if now == before:
            return
        self.curr_step = now
        if (step := crossed(before, now, self.config.steps_per_eval)) is not None:
            self.evaluator.begin(step)
        if (step := crossed(before, now, self.checkpoint_interval)) is not None:
            with self.counts.guard("save_checkpoint"):
                self.save_checkpoint(step)
        if self.items_sent_this_step >= self.config.min_items_sent_before_logging:
            self.items_sent_this_step = 0
            with self.counts.guard("wandb_log"):
                await self.wandb_log({})

    async def add_train_workers(self) -> None:
        """Starts items, as many as may run."""
        assert self.manager is not None
        await self.manager.start_workers()

    async def handle_env(self, item_uuid: str) -> Groups:
        """Rolls one item out, from `running_items`, and sends what comes of it."""
        item = self.running_items[item_uuid]["item"]
        found: Groups = None
        try:
            found = await self.roll_out(item)
        except rollouts.RolloutFailed:
            pass  # counted and told where it failed
        if found:
            rubbish = self.counts.skipped["rubbish"]
            await self.handle_send_to_api(found, item)
            if self.counts.skipped["rubbish"] == rubbish:
                self.counts.came_to_something()  # also where an override sends otherwise
        with self.counts.guard("cleanup"):
            await self.cleanup()
        return found

    async def roll_out(self, item: Item) -> Groups:
        """What comes of an item, ready to be sent. Raises `RolloutFailed` where its rollouts failed for good."""
        began = time.monotonic()
        found: Groups = None
        try:
            with new_group():
                collected, later = await rollouts.again(
                    partial(self._collect, item), self.config.rollout_retries, self.counts
                )
            self.backlog.extend(later)
            if collected:
                found = await self._postprocessed(collected)
            if not found:
                self.counts.skip("no_group")
        except rollouts.RolloutFailed as error:
            self.counts.came_to_nothing(str(error))
            raise
        finally:
            self._note_duration(time.monotonic() - began, succeeded=bool(found))
        return found

    async def _collect(self, item: Item) -> tuple[Groups, list[Item]]:
        return rollouts.pair(await self.collect_trajectories(item), "collect_trajectories")

    async def _postprocessed(self, collected: Groups) -> Groups:
        try:
            return await self.postprocess_histories(collected)
        except Exception as error:
            self.counts.fail("postprocess_histories", error)
            raise rollouts.RolloutFailed(str(error) or type(error).__name__) from error

    def _note_duration(self, seconds: float, *, succeeded: bool) -> None:
        self.task_duration.append(seconds)
        self.task_successful.append(int(succeeded))
        (self.succeeded_task_duration if succeeded else self.failed_task_duration).append(seconds)

    async def handle_send_to_api(
        self,
        scored_data: Groups,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Hands the groups that are fit to be sent to the sender. Returns once it has them."""
        if do_send_to_api and self.manager is None:
            raise HeadraceError("groups are sent by env_manager(), which is not running")
        if self.manager is not None:
            await self.manager.collected()
        many = isinstance(scored_data, list)
        groups = scored_data if isinstance(scored_data, list) else [scored_data]
        fit = await delivery.sendable(self, groups, item, skip_long=abort_on_any_max_length_exceeded)
        if fit and do_send_to_api and self.manager is not None:
            named = [self.server.with_uids(group) | {"env_id": self.env_id} for group in fit]
            await self.manager.send(named if many else named[0])
            self.items_sent_this_step += len(fit)

    async def disconnect_env(self) -> None:
        """Tells the API that we leave."""
        if self.env_id >= 0:
            await self.api.post("/disconnect-env", {"env_id": self.env_id})

    async def close(self) -> None:
        """Closes what the environment holds open."""
        if self.jsonl_writer is not None:
            self.jsonl_writer.close()
        await asyncio.to_thread(self.metrics_log.close)
        await self.server.close()
        await self.api.close()

    @property
    def eval_runner(self) -> asyncio.Task[None] | None:
        """The evaluation that runs, or ran last."""
        return self.evaluator.task

    @property
    def derived_batch_size(self) -> int:
        """Sequences of a batch that this environment can have, given the shares that others are promised."""
        size = self.config.batch_size
        if size == -1 or not self.status_dict:
            return size
        free = self.status_dict.get("unallocated_fraction", 1.0) + (self.config.min_batch_allocation or 0.0)
        return int(size * free)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of `tokenizer_name`. It is loaded before anything else where that is set, else when it is first
        used. Raises `NoTokenizer`, also the times after the first, without trying again.
        """
        if self._no_tokenizer is None:
            try:
                loaded = load_tokenizer(self.config.tokenizer_name, "--env.tokenizer_name")
            except NoTokenizer as error:
                self._no_tokenizer = str(error)
            else:
                self.server.use_tokenizer(loaded)
                return loaded
        raise NoTokenizer(self._no_tokenizer)

    @property
    def names_tokenizer(self) -> bool:
        """Whether the configuration says which tokenizer it is, and does not leave it to the default."""
        return bool(self.config.tokenizer_name != BaseEnvConfig.model_fields["tokenizer_name"].default)

    @property
    def needs_tokenizer(self) -> bool:
        """Whether rollouts are known to use the tokenizer, so that it is tried before they begin."""
        return False

    @property
    def needs_server(self) -> bool:
        """Whether rollouts are known to ask a rollout server: somebody said where it is."""
        return self.server.named_servers

    @property
    def most_failures(self) -> int | None:
        """Items in a row that may come to nothing; None: any number. `max_consecutive_failures`, made a number."""
        given = self.config.max_consecutive_failures
        if given == -1:
            return max(LEAST_FAILURES, 2 * self.max_num_workers)
        return given or None

    @property
    def _name(self) -> str:
        return self.config.wandb_name or self.name or type(self).__name__

    def _wake(self) -> None:
        if self.manager is not None:
            self.manager.wake()
