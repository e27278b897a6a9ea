"""`EnvCore`: an environment as its parts see it. What authors inherit from is `headrace.envs.base.BaseEnv`.

It holds the state, the methods that an author writes, and the steps that the parts call: registering, asking for the
API's status, rolling an item out, handing its groups to the sender. The parts (`manager`, `process`, `cli`) work
through these methods alone, so each of them can be overridden. Nothing here starts work by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.envs import groups
from headrace.envs.api_client import ApiClient, register
from headrace.envs.evaluation import Evaluator
from headrace.envs.files import EnvCheckpoints, GroupFile
from headrace.envs.metrics import Counts, MetricsLog
from headrace.envs.reporting import Reporting, in_thread
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
from headrace.envs.types import UUID, BaseEnvConfig, Item, ScoredDataGroup, ScoredDataItem

log = logging.getLogger("headrace.envs")

#: Failed items in a row that are allowed by default, and no fewer than two for each worker: one failure of a server
#: fails everything under way at once.
MIN_CONSECUTIVE_FAILURES = 16
#: What `collect_trajectories` and `postprocess_histories` return.
Groups = ScoredDataGroup | list[ScoredDataGroup | None] | list[Any] | None


class WorkControl(Protocol):
    """What an environment asks of the manager that runs it."""

    @property
    def held(self) -> bool:
        """Whether no work is started, since enough waits for the trainer."""

    def wake(self) -> None:
        """Something changed that decides what may start."""

    async def start_workers(self) -> None:
        """Starts as many items as may run."""

    async def collected(self) -> None:
        """The current item's rollouts are done: it has no time limit any more, and another item may start."""

    async def send(self, scored: Any) -> None:
        """Hands a group, or a list of groups, to the sender."""


class EnvCore(Reporting, ABC):
    """See `BaseEnv`, its only subclass here."""

    name: ClassVar[str | None] = None
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    #: The class of the rollout servers; `APIServer` itself stands for the class of each server's `server_type`.
    server_cls: ClassVar[type[APIServer]] = APIServer  # type: ignore[type-abstract]
    #: Set by `process`, for environments that then behave differently.
    process_mode = False
    n_groups_to_process: int | None = None
    group_size_to_process: int | None = None
    #: What runs the environment for a trainer; None before it does.
    manager: WorkControl | None

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
        self.manager = None
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
        """The next item to roll out; None where there is none at the moment."""

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | Any | None, list[Item]]:
        """One rollout of the item, and items to roll out later."""
        raise NotImplementedError(f"{type(self).__name__} must define collect_trajectory() or collect_trajectories()")

    async def collect_trajectories(self, item: Item) -> tuple[Groups, list[Item]]:
        """A group of rollouts of the item, or several groups, and items to roll out later."""
        times, retries = self.config.group_size, self.config.rollout_retries
        make = partial(self.collect_trajectory, item)
        return groups.merge_rollouts(await groups.run_rollouts(make, times, retries, self.counts))

    async def postprocess_histories(self, trajectories: Groups) -> Groups:
        """Filters or changes what was collected, before it is sent."""
        return trajectories

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Called every `steps_per_eval` steps."""

    async def cleanup(self) -> None:
        """Called after every item, also after one that failed or ran out of time."""
        return

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, ServerBaseline | Sequence[APIServerConfig]]:
        """The configurations of the environment and of its servers, before flags and files."""
        return cls.env_config_cls(), ServerBaseline()

    # How it is run, which `BaseEnv` defines.

    @abstractmethod
    async def env_manager(self) -> None:
        """Works for a trainer until its steps are done or a signal comes; ends with everything sent."""

    @abstractmethod
    async def process_manager(self) -> None:
        """Makes groups without a trainer, into `data_path_to_save_groups`, and a page of them."""

    @abstractmethod
    async def _run_evaluate(self) -> None:
        """Evaluates once, from `setup` to the files."""

    @classmethod
    @abstractmethod
    def get_cli_serve_config_cls(cls) -> type[Any]:
        """The `serve` command (`headrace.envs.cli.ServeSubcommand`); an override returns a subclass of it."""

    @classmethod
    @abstractmethod
    def get_cli_process_config_cls(cls) -> type[Any]:
        """The `process` command; an override returns a subclass of it."""

    @classmethod
    @abstractmethod
    def get_cli_evaluate_config_cls(cls) -> type[Any]:
        """The `evaluate` command; an override returns a subclass of it."""

    # State that outlives a process.

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Writes `data`, whose keys come back as attributes. Called at the trainer's `checkpoint_interval`."""
        if data is not None:
            self._checkpoints.save(step, data)

    def load_checkpoint(self) -> None:
        """Sets attributes from the newest checkpoint up to `curr_step`. Called when a run is resumed."""
        for key, value in (self._checkpoints.load(self.curr_step) or {}).items():
            setattr(self, key, value)

    @property
    def _checkpoints(self) -> EnvCheckpoints:
        return EnvCheckpoints(self.checkpoint_dir, self.wandb_prepend or self._name)

    # Before work begins.

    async def preflight(self) -> None:
        """Returns once the tokenizer is loaded and a rollout server answers, where they are known to be needed.

        Raises `NoTokenizer`, or `NoServerAvailable` where no server answers within `server_wait_s`: one error before
        anything is registered or rolled out, instead of one per rollout. Where no tokenizer is configured, that of the
        server's model is taken, if it is a folder on this machine.
        """
        if self.names_tokenizer:
            await in_thread(lambda: self.tokenizer)
        await self.server.ready(self.config.server_wait_s, wait=self.needs_server)
        if not self.names_tokenizer:
            root = await self.server.model_root()
            if root is not None and Path(root).is_dir():
                log.info("the tokenizer is that of the server's model, %s", root)
                self.config.tokenizer_name = root
        if self.names_tokenizer or self.needs_tokenizer:
            await in_thread(lambda: self.tokenizer)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of `tokenizer_name`: loaded before anything else where that is configured, else when first
        used. Raises `NoTokenizer`; after the first failure at once, without trying again.
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
        """Whether the configuration names a tokenizer other than the default one."""
        return bool(self.config.tokenizer_name != BaseEnvConfig.model_fields["tokenizer_name"].default)

    @property
    def needs_tokenizer(self) -> bool:
        """Whether rollouts are known to use the tokenizer, so that it is loaded before they begin."""
        return False

    @property
    def needs_server(self) -> bool:
        """Whether rollouts are known to call a rollout server: an address was configured."""
        return self.server.named_servers

    async def register_env(self) -> None:
        """Registers at the API, once it answers and the trainer has begun."""
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
        """Takes over the trainer's batch size and token limit."""
        found = await self.api.get("/info")
        if found["batch_size"] != -1:
            self.config.batch_size = found["batch_size"]
        if found["max_token_len"] != -1:
            self.max_token_len = found["max_token_len"]
        group, batch = self.config.group_size, self.config.batch_size
        if 0 < batch < group:
            raise InvalidInput(f"group_size is {group}, more than the {batch} sequences of a batch; lower it")

    # While it works for a trainer.

    async def get_status(self) -> None:
        """Fetches the API's status into `status_dict`, and applies the environment's weight to its servers."""
        found = await self.api.get("/status-env", {"env_id": self.env_id})
        if found.get("ended_at") is not None:  # `current_step` is past the last step then, for those who know no end
            found["current_step"] = found["ended_at"]
        self.status_dict = found
        await self.server.update_weight(self.status_dict.get("env_weight", 1.0))

    async def env_step_checks(self) -> None:
        """Evaluates, saves and logs where the trainer's step calls for it."""
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
        """Starts as many items as may run."""
        assert self.manager is not None
        await self.manager.start_workers()

    async def handle_env(self, item_uuid: str) -> Groups:
        """Rolls out one item of `running_items` and sends its groups."""
        item = self.running_items[item_uuid]["item"]
        found: Groups = None
        try:
            try:
                found = await self.roll_out(item)
            except groups.RolloutFailed:
                pass  # counted and logged where it failed
            if found:
                rubbish = self.counts.skipped["rubbish"]
                await self.handle_send_to_api(found, item)
                if self.counts.skipped["rubbish"] == rubbish:
                    self.counts.item_succeeded()  # also where an override sends in its own way
        finally:
            with self.counts.guard("cleanup"):
                await self.cleanup()
        return found

    async def roll_out(self, item: Item) -> Groups:
        """The groups of an item, ready to be sent. Raises `RolloutFailed` where its rollouts failed for good."""
        began = time.monotonic()
        found: Groups = None
        try:
            with new_group():
                collected, later = await groups.with_retries(
                    partial(self._collect, item), self.config.rollout_retries, self.counts
                )
            self.backlog.extend(later)
            if collected:
                found = await self._postprocess(collected)
            if not found:
                self.counts.skip("no_group")
        except groups.RolloutFailed as error:
            self.counts.item_failed(str(error))
            raise
        finally:
            self._add_duration(time.monotonic() - began, succeeded=bool(found))
        return found

    async def _collect(self, item: Item) -> tuple[Groups, list[Item]]:
        return groups.check_result(await self.collect_trajectories(item), "collect_trajectories")

    async def _postprocess(self, collected: Groups) -> Groups:
        try:
            return await self.postprocess_histories(collected)
        except Exception as error:
            self.counts.fail("postprocess_histories", error)
            raise groups.RolloutFailed(str(error) or type(error).__name__) from error

    def _add_duration(self, seconds: float, *, succeeded: bool) -> None:
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
        """Hands the groups that are fit to be sent to the sender, and returns once it has taken them.

        The others are counted, by the reason. Failures to write the file of groups or the table of rollouts are
        counted too, and cost no group.
        """
        if do_send_to_api and self.manager is None:
            raise HeadraceError("groups are sent by env_manager(), which is not running")
        if self.manager is not None:
            await self.manager.collected()
        many = isinstance(scored_data, list)
        given: Sequence[Any] = scored_data if isinstance(scored_data, list) else [scored_data]
        fit = []
        for group in given:
            if self._is_sendable(group, skip_long=abort_on_any_max_length_exceeded):
                await self._complete_group(group, item)
                fit.append(group)
        if fit and do_send_to_api and self.manager is not None:
            addressed = [self.server.with_uids(group) | {"env_id": self.env_id} for group in fit]
            await self.manager.send(addressed if many else addressed[0])
            self.items_sent_this_step += len(fit)

    def _is_sendable(self, group: Any, *, skip_long: bool) -> bool:
        """Whether a group is sent; one that is not is counted, by the reason."""
        reason: str | None = "no_group"
        if group is not None:
            try:
                groups.check_group(group, self.config.group_size)
            except groups.BadGroup as error:
                self.counts.fail("rubbish", error)
                self.counts.item_failed(str(error))
                reason = "rubbish"
            else:
                self.counts.item_succeeded()
                reason = self._skip_reason(group, skip_long)
        if reason is not None:
            self.counts.skip(reason)
        return reason is None

    def _skip_reason(self, group: dict[str, Any], skip_long: bool) -> str | None:
        """Why a valid group is not sent; None where it is."""
        if self.config.ensure_scores_are_not_same and groups.scores_equal(group["scores"]):
            return "equal_scores"
        self.completion_lengths.extend(len(mask) - list(mask).count(-100) for mask in group["masks"])
        limit = self.max_token_len
        if skip_long and limit > 0 and any(len(tokens) >= limit for tokens in group["tokens"]):
            return "too_long"
        return None

    async def _complete_group(self, group: dict[str, Any], item: Item) -> None:
        """Adds what a sent group must have, and puts it into the table, the file and the counts."""
        for key in ("ref_logprobs", "overrides", "group_overrides", "distill_token_ids", "distill_logprobs"):
            group.setdefault(key, None)
        if self.config.include_messages and not group.get("messages"):
            with self.counts.guard("include_messages"):
                texts = await self.decoded(group["tokens"])
                messages = [[{"role": "user", "content": text}] for text in texts] if texts is not None else None
                group["messages"] = messages
        with self.counts.guard("add_rollouts_for_wandb"):
            await self.add_rollouts_for_wandb(group, item)  # type: ignore[arg-type]
        if self.jsonl_writer is not None:
            with self.counts.guard("data_path_to_save_groups"):
                self.jsonl_writer.write(group)
        self.counts.groups += 1
        self.counts.sequences += len(group["scores"])
        self.counts.scores += sum(group["scores"])

    async def disconnect_env(self) -> None:
        """Tells the API that this environment leaves."""
        if self.env_id >= 0:
            await self.api.post("/disconnect-env", {"env_id": self.env_id})

    async def close(self) -> None:
        """Closes files and connections."""
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
        """Sequences of a batch that this environment can fill, given the shares that others are promised."""
        size = self.config.batch_size
        if size == -1 or not self.status_dict:
            return size
        free = self.status_dict.get("unallocated_fraction", 1.0) + (self.config.min_batch_allocation or 0.0)
        return int(size * free)

    @property
    def max_failures(self) -> int | None:
        """Failed items in a row after which the environment ends, of `max_consecutive_failures`; None: any number."""
        given = self.config.max_consecutive_failures
        if given == -1:
            return max(MIN_CONSECUTIVE_FAILURES, 2 * self.max_num_workers)
        return given or None

    @property
    def _name(self) -> str:
        return self.config.wandb_name or self.name or type(self).__name__

    def _wake(self) -> None:
        if self.manager is not None:
            self.manager.wake()
