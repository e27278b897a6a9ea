"""Every operation of a pool, by its name on the wire.

To add one: write its class, with its arguments, its docstring and how it is carried out, in the module of its kind;
name it here; and give it its line in both classes of `headrace.pool.calls`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.data.block import Block
from headrace.data.errors import InvalidInput
from headrace.pool.operation import Operation
from headrace.pool.operations import consume, control, produce, read, score, scored_consume, scored_produce, submit

_ALL: tuple[type[Operation[Any]], ...] = (
    submit.SubmitBlock,
    consume.FetchBatch,
    produce.OpenTrajectory,
    produce.MarkComplete,
    produce.FailTrajectory,
    score.SetReward,
    score.SetStepRewards,
    score.ListUnscored,
    consume.AckLease,
    consume.NackLease,
    consume.ExtendLease,
    control.ConfigureChannel,
    control.SetVersion,
    control.ShutDown,
    control.Reopen,
    control.CurateStep,
    control.ForgetTrajectory,
    read.ReadTrajectory,
    read.ReadTrajectoryStates,
    read.ReadStats,
    read.ReadEvents,
    read.ListGroups,
    read.ListTrajectories,
    read.ListSteps,
    control.CompactJournal,
    control.BackUpJournal,
    scored_consume.RegisterTrainer,
    scored_produce.RegisterEnvironment,
    scored_produce.DisconnectEnvironment,
    scored_produce.PostScoredGroups,
    scored_produce.ForgetKeys,
    scored_consume.EndTraining,
    scored_consume.TakeScoredBatch,
    scored_consume.AckScoredBatch,
    scored_consume.NackScoredBatch,
    scored_consume.ConfirmScoredBatch,
    scored_consume.ReleaseScoredBatches,
    scored_consume.ServeFromChannel,
    scored_consume.ResetScoredGroups,
    scored_consume.ReadScoredInfo,
    scored_consume.ReadScoredStatus,
    scored_produce.ReadEnvironmentStatus,
    scored_produce.ReadLatestGroup,
)

OPERATIONS: dict[str, type[Operation[Any]]] = {operation.name: operation for operation in _ALL}


def from_wire(name: str, arguments: dict[str, Any], steps: Block | None) -> tuple[Operation[Any], bool]:
    """The operation that another process asks for, and whether it waits in pieces (`PENDING`). `InvalidInput` where the
    operation is unknown, or an argument is missing, unknown or of another type."""
    kind = OPERATIONS.get(name)
    if kind is None:
        raise InvalidInput(f"no operation {name!r}; known: {', '.join(OPERATIONS)}")
    if kind is submit.SubmitBlock:
        if steps is None:
            raise InvalidInput("a submit needs steps")
        arguments = {**arguments, "block": steps}
    try:
        pieces = False
        if kind.waits and "pieces" in arguments:
            arguments = dict(arguments)
            pieces = msgspec.convert(arguments.pop("pieces"), bool)
        return msgspec.convert(arguments, kind), pieces
    except msgspec.ValidationError as error:
        raise InvalidInput(f"operation {name!r}: {error}") from None
