"""The trainer's ranks as workers of a Ray cluster, started and begun again by Ray Train.

    headrace train CONFIG.yaml --workers 4

Each worker is a rank as one of torchrun's is. This process shows the run and answers its signals; an actor, `RunRelay`,
carries reports from rank 0 to it and the word to stop to rank 0. Where a worker dies, Ray Train ends the others and
begins all of them again, and the run goes on from its last checkpoint, with its leases. Every node sees the model and
the run's folder at the same path.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.trainer.checkpoint import Checkpoints, Progress
from headrace.trainer.config import TrainerConfig, TrainWorkers
from headrace.trainer.ranks import RankLost, portable
from headrace.trainer.reporting import RunOutcome, RunWatcher
from headrace.trainer.stopping import in_thread, on_signals

#: Seconds that a question for new reports waits for one.
REPORT_WAIT_S = 0.25
#: Seconds that the relay may take to answer: it does nothing but that, and the first answer waits for its process,
#: which a busy machine takes a minute to begin.
RELAY_ANSWER_S = 240.0
#: Reports that say how it is now: of several in a row that nobody has read, the last is enough.
STANDING_REPORTS = ("doing", "groups")
#: How much of the resource that names a node a worker takes: enough to be placed there, little enough for thousands.
NODE_SHARE = 0.0001
#: The folder below the run's for what Ray Train itself keeps.
RAY_FOLDER = "ray"


class RunRelay:
    """The actor between rank 0 and the process that shows the run: reports go one way, the word to stop the other. It
    keeps only reports that were not read."""

    def __init__(self) -> None:
        self._reports: list[tuple[str, tuple[Any, ...]]] = []
        #: How many reports came before those that are kept, and how many of all were handed out.
        self._dropped = self._handed_out = 0
        self._news = asyncio.Event()
        self._told = asyncio.Event()
        self._stopped_by = ""
        self._ended: RunOutcome | HeadraceError | None = None

    async def report(self, name: str, given: tuple[Any, ...]) -> None:
        """A call of a `RunWatcher`'s method."""
        unread = self._dropped + len(self._reports) > self._handed_out
        if unread and name in STANDING_REPORTS and self._reports[-1][0] == name:
            self._reports.pop()
        self._reports.append((name, given))
        self._news.set()

    async def reports(self, seen: int) -> list[tuple[str, tuple[Any, ...]]]:
        """All reports but the first `seen`, which are forgotten; waits a moment where there are none."""
        del self._reports[: seen - self._dropped]
        self._dropped = seen
        if not self._reports:
            self._news.clear()
            try:
                async with asyncio.timeout(REPORT_WAIT_S):
                    await self._news.wait()
            except TimeoutError:
                pass
        self._handed_out = seen + len(self._reports)
        return list(self._reports)

    async def stop(self, by: str) -> None:
        """Has the run end after the step under way."""
        self._stopped_by = by
        self._told.set()

    async def stopped_by(self) -> str:
        """Who stopped the run, once somebody has."""
        await self._told.wait()
        return self._stopped_by

    async def end(self, ended: RunOutcome | HeadraceError) -> None:
        """How the run ended, by rank 0's word."""
        self._ended = ended

    async def ended(self) -> RunOutcome | HeadraceError | None:
        """What `end` was given; None where rank 0 has not come to an end."""
        return self._ended


class RelayedWatcher(RunWatcher):
    """Sends what it is told to a relay."""

    def __init__(self, relay: Any) -> None:
        super().__init__()
        self._relay = relay

    def _report(self, name: str, *given: Any) -> None:
        self._relay.report.remote(name, given)

    def ready(self, progress: Progress) -> None:
        self._report("ready", progress)

    def doing(self, words: str) -> None:
        super().doing(words)
        self._report("doing", words)

    def groups(self, words: str) -> None:
        super().groups(words)
        self._report("groups", words)

    def down(self, service: str, words: str | None) -> None:
        super().down(service, words)
        self._report("down", service, words)

    def step(self, row: dict[str, Any]) -> None:
        super().step(row)
        self._report("step", row)

    def stopping(self, by: str) -> None:
        self._report("stopping", by)


def train_on_ray(
    config: TrainerConfig, workers: TrainWorkers, *, address: str, namespace: str, resume: bool, watcher: RunWatcher
) -> RunOutcome:
    """A run whose ranks are workers of a cluster; how it ended. Raises what rank 0 raised, `InvalidInput` where the
    folder holds a run and `resume` is not set, and `HeadraceError` where workers died more often than they may."""
    import ray

    from headrace.net.ray_cluster import cause_of, join_cluster

    config = with_absolute_paths(config)
    if not resume and Checkpoints(config.run, config.model, config.checkpoint.keep).latest is not None:
        raise InvalidInput(f"{config.run} holds a run already; go on with --resume, or name another folder")
    config.run.mkdir(parents=True, exist_ok=True)
    join_cluster(address, namespace)
    relay = ray.remote(num_cpus=0)(RunRelay).remote()
    watcher.doing(f"waiting for the cluster to begin {workers.workers} workers")
    fitted = in_thread(_torch_trainer(config, workers, relay).fit)
    told = threading.Event()

    def stop(by: str) -> None:
        told.set()
        relay.stop.remote(by)

    seen = 0
    with on_signals(stop, watcher.ending_at_once):
        while not fitted.done():
            if told.is_set() and not seen:
                raise HeadraceError("stopped before the cluster had begun the workers; nothing was learned")
            seen += _shown(watcher, ray.get(relay.reports.remote(seen), timeout=RELAY_ANSWER_S))
            if isinstance(failed := ray.get(relay.ended.remote(), timeout=RELAY_ANSWER_S), HeadraceError):
                raise failed  # the workers end with this process: others of them may wait for rank 0
        _shown(watcher, ray.get(relay.reports.remote(seen), timeout=RELAY_ANSWER_S))
    ended = ray.get(relay.ended.remote(), timeout=RELAY_ANSWER_S)
    if isinstance(ended, HeadraceError):
        raise ended
    if ended is None:
        error = fitted.exception()
        why = "they ended without a word" if error is None else cause_of(error)
        raise HeadraceError(
            f"the {workers.workers} workers failed: {why}; go on from the last checkpoint with --resume"
        )
    found: RunOutcome = ended
    return found


def with_absolute_paths(config: TrainerConfig) -> TrainerConfig:
    """The same with absolute paths: a worker's folder is one of Ray's."""
    model = config.model.absolute() if config.model.exists() else config.model
    changes: dict[str, Any] = {"model": model, "run": config.run.absolute()}
    reference = config.algorithm.reference
    if reference is not None and reference.exists():
        changes["algorithm"] = config.algorithm.model_copy(update={"reference": reference.absolute()})
    return config.model_copy(update=changes)


def _shown(watcher: RunWatcher, reports: list[tuple[str, tuple[Any, ...]]]) -> int:
    for name, given in reports:
        getattr(watcher, name)(*given)
    return len(reports)


def _torch_trainer(config: TrainerConfig, workers: TrainWorkers, relay: Any) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    on_gpus = workers.gpus > 0
    resources = {"CPU": workers.num_cpus, **({"GPU": workers.gpus} if on_gpus else {}), **workers.resources}
    if workers.here:
        resources[_own_node()] = NODE_SHARE
    return TorchTrainer(
        work,
        train_loop_config={"config": config.model_dump(mode="json"), "relay": relay},
        scaling_config=ScalingConfig(num_workers=workers.workers, use_gpu=on_gpus, resources_per_worker=resources),
        run_config=RunConfig(
            name=config.run.name,
            storage_path=str(config.run / RAY_FOLDER),
            failure_config=FailureConfig(max_failures=workers.max_failures),
        ),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if on_gpus else "gloo"),
    )


def _own_node() -> str:
    """The resource that only this machine's node has. Raises `InvalidInput` where this machine is none."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] == own and not ray.util.client.ray.is_connected():
            return f"node:{node['NodeManagerAddress']}"
    raise InvalidInput("--here keeps the workers on this machine, which is no node of the cluster; leave it out")


def work(given: dict[str, Any]) -> None:
    """What each worker does. Where a rank is lost it raises, so that Ray Train begins all of them again; any other
    error of the run is its end, and goes to the relay."""
    from headrace.trainer.ranks import joined
    from headrace.trainer.shared_learner import follow
    from headrace.trainer.trainer import Trainer

    config, relay = TrainerConfig.model_validate(given["config"]), given["relay"]
    with joined() as ranks:
        if ranks.rank:
            try:
                follow(config, config.device, ranks)
            except SystemExit:  # rank 0 has said why
                return
            return

        def learned() -> RunOutcome:
            trainer = Trainer(config, resume=True, watcher=RelayedWatcher(relay), ranks=ranks)
            _stop_when_told(relay, trainer.stop)
            trainer.run()
            return trainer.outcome

        _answer(relay, learned)


def _answer(relay: Any, learned: Callable[[], RunOutcome]) -> None:
    import ray

    ended: RunOutcome | HeadraceError
    try:
        ended = learned()
    except RankLost:
        raise
    except HeadraceError as error:
        ended = portable(error)
    ray.get(relay.end.remote(ended))


def _stop_when_told(relay: Any, stop: Callable[[str], None]) -> None:
    import ray

    in_thread(lambda: stop(ray.get(relay.stopped_by.remote())), name="headrace-stop")
