"""The calls of a pool: blocking on a pool itself, awaitable on its `aio`.

Each is made from its operation, or from the function that makes the operation of friendlier arguments, and is handed to
`execute`, which an embedded pool carries out and a remote one sends. So what is true of one pool is true of all.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_args, get_type_hints

from headrace.pool.operation import Answer, Operation
from headrace.pool.operations import consume, control, produce, read, score, scored_consume, scored_produce, submit

P = ParamSpec("P")
PoolClass = TypeVar("PoolClass")


def blocking(make: Callable[P, Operation[Answer]]) -> Callable[Concatenate[BlockingPool, P], Answer]:
    """A method that takes the arguments of an operation, and returns its answer."""

    def call(self: BlockingPool, /, *args: P.args, **kwargs: P.kwargs) -> Answer:
        operation = make(*args, **kwargs)
        answer: Answer = self.execute(operation, partial(operation.result, self))
        return answer

    _describe(call, make)
    return call


def awaitable(
    make: Callable[P, Operation[Answer]],
) -> Callable[Concatenate[AsyncPool, P], Coroutine[Any, Any, Answer]]:
    """The same as a method whose answer is awaited. Arguments that are refused are so when it is called."""

    def call(self: AsyncPool, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Answer]:
        operation = make(*args, **kwargs)
        return self._pool.execute_async(operation, partial(operation.result, self))

    _describe(call, make)
    return call


def _describe(call: Any, make: Callable[..., Operation[Any]]) -> None:
    """Gives a method the signature and the documentation that `help` shows."""
    arguments = inspect.signature(make, eval_str=True)
    myself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [myself, *arguments.parameters.values()]
    call.__signature__ = arguments.replace(parameters=parameters, return_annotation=_answer(make))
    call.__doc__ = make.__doc__


def _answer(make: Callable[..., Operation[Any]]) -> Any:
    """The type of the answer to an operation."""
    kind = make if isinstance(make, type) else get_type_hints(make)["return"]
    for base in kind.__mro__:
        for generic in vars(base).get("__orig_bases__", ()):
            for answer in get_args(generic):
                return None if answer is type(None) else answer
    return Any


def _named(pool: type[PoolClass]) -> type[PoolClass]:
    """Gives the methods their names, for `help` and tracebacks."""
    for name, call in vars(pool).items():
        if hasattr(call, "__signature__"):
            call.__name__, call.__qualname__ = name, f"{pool.__qualname__}.{name}"
    return pool


class Executor(Protocol):
    """Carries out awaitable calls. With `pieces`, one that timed out while it waited is answered with `PENDING`."""

    async def execute_async(
        self, operation: Operation[Any], then: Callable[[Any], Any] | None = None, *, pieces: bool = False
    ) -> Any: ...


@_named
class AsyncPool:
    """The calls of a pool, awaitable: what `pool.aio` is."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool

    # Producers.
    submit_steps = awaitable(submit.submit_steps)
    submit_step = awaitable(submit.submit_step)
    open = awaitable(produce.OpenTrajectory)
    complete = awaitable(produce.MarkComplete)
    complete_trajectory = awaitable(produce.MarkCompleteInTime)
    fail = awaitable(produce.FailTrajectory)
    # Whoever scores.
    reward = awaitable(score.SetReward)
    reward_steps = awaitable(score.SetStepRewards)
    unscored = awaitable(score.unscored)
    # Consumers.
    fetch_batch = awaitable(consume.FetchBatch)
    ack = awaitable(consume.AckLease)
    nack = awaitable(consume.NackLease)
    extend = awaitable(consume.ExtendLease)
    # Control.
    configure = awaitable(control.configure)
    set_version = awaitable(control.SetVersion)
    shutdown = awaitable(control.ShutDown)
    reopen = awaitable(control.Reopen)
    curate = awaitable(control.curate)
    forget = awaitable(control.ForgetTrajectory)
    compact = awaitable(control.CompactJournal)
    backup = awaitable(control.backup)
    # Readers.
    trajectory = awaitable(read.ReadTrajectory)
    trajectory_states = awaitable(read.ReadTrajectoryStates)
    stats = awaitable(read.ReadStats)
    events = awaitable(read.ReadEvents)
    list_groups = awaitable(read.list_groups)
    list_trajectories = awaitable(read.list_trajectories)
    list_steps = awaitable(read.list_steps)
    # Scored groups.
    desk_register = awaitable(scored_consume.desk_register)
    desk_end = awaitable(scored_consume.desk_end)
    desk_batch = awaitable(scored_consume.TakeScoredBatch)
    desk_ack = awaitable(scored_consume.AckScoredBatch)
    desk_nack = awaitable(scored_consume.NackScoredBatch)
    desk_received = awaitable(scored_consume.ConfirmScoredBatch)
    desk_release = awaitable(scored_consume.ReleaseScoredBatches)
    desk_register_env = awaitable(scored_produce.desk_register_env)
    desk_disconnect = awaitable(scored_produce.DisconnectEnvironment)
    desk_post = awaitable(scored_produce.desk_post)
    desk_forget = awaitable(scored_produce.desk_forget)
    desk_serve = awaitable(scored_consume.ServeFromChannel)
    desk_reset = awaitable(scored_consume.ResetScoredGroups)
    desk_info = awaitable(scored_consume.ReadScoredInfo)
    desk_status = awaitable(scored_consume.ReadScoredStatus)
    desk_env_status = awaitable(scored_produce.ReadEnvironmentStatus)
    desk_latest = awaitable(scored_produce.ReadLatestGroup)


@_named
class BlockingPool(ABC):
    """What a producer, a consumer or a reader can ask of a pool, embedded or remote."""

    aio: AsyncPool

    @abstractmethod
    def execute(self, operation: Operation[Any], then: Callable[[Any], Any] | None = None) -> Any:
        """Carries an operation out and returns the pool's answer, passed through `then`."""

    # Producers.
    submit_steps = blocking(submit.submit_steps)
    submit_step = blocking(submit.submit_step)
    open = blocking(produce.OpenTrajectory)
    complete = blocking(produce.MarkComplete)
    complete_trajectory = blocking(produce.MarkCompleteInTime)
    fail = blocking(produce.FailTrajectory)
    # Whoever scores.
    reward = blocking(score.SetReward)
    reward_steps = blocking(score.SetStepRewards)
    unscored = blocking(score.unscored)
    # Consumers.
    fetch_batch = blocking(consume.FetchBatch)
    ack = blocking(consume.AckLease)
    nack = blocking(consume.NackLease)
    extend = blocking(consume.ExtendLease)
    # Control.
    configure = blocking(control.configure)
    set_version = blocking(control.SetVersion)
    shutdown = blocking(control.ShutDown)
    reopen = blocking(control.Reopen)
    curate = blocking(control.curate)
    forget = blocking(control.ForgetTrajectory)
    compact = blocking(control.CompactJournal)
    backup = blocking(control.backup)
    # Readers.
    trajectory = blocking(read.ReadTrajectory)
    trajectory_states = blocking(read.ReadTrajectoryStates)
    stats = blocking(read.ReadStats)
    events = blocking(read.ReadEvents)
    list_groups = blocking(read.list_groups)
    list_trajectories = blocking(read.list_trajectories)
    list_steps = blocking(read.list_steps)
    # Scored groups.
    desk_register = blocking(scored_consume.desk_register)
    desk_end = blocking(scored_consume.desk_end)
    desk_batch = blocking(scored_consume.TakeScoredBatch)
    desk_ack = blocking(scored_consume.AckScoredBatch)
    desk_nack = blocking(scored_consume.NackScoredBatch)
    desk_received = blocking(scored_consume.ConfirmScoredBatch)
    desk_release = blocking(scored_consume.ReleaseScoredBatches)
    desk_register_env = blocking(scored_produce.desk_register_env)
    desk_disconnect = blocking(scored_produce.DisconnectEnvironment)
    desk_post = blocking(scored_produce.desk_post)
    desk_forget = blocking(scored_produce.desk_forget)
    desk_serve = blocking(scored_consume.ServeFromChannel)
    desk_reset = blocking(scored_consume.ResetScoredGroups)
    desk_info = blocking(scored_consume.ReadScoredInfo)
    desk_status = blocking(scored_consume.ReadScoredStatus)
    desk_env_status = blocking(scored_produce.ReadEnvironmentStatus)
    desk_latest = blocking(scored_produce.ReadLatestGroup)
