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
from headrace.pool.operations import consume, control, produce, read, scored

_ALL: tuple[type[Operation[Any]], ...] = (
    produce.SubmitBlock,
    consume.FetchBatch,
    produce.OpenTrajectory,
    produce.SetReward,
    produce.MarkComplete,
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
    read.ReadStats,
    read.ReadEvents,
    read.ListGroups,
    read.ListTrajectories,
    read.ListSteps,
    control.CompactJournal,
    control.BackUpJournal,
    scored.RegisterTrainer,
    scored.RegisterEnvironment,
    scored.DisconnectEnvironment,
    scored.PostScoredGroups,
    scored.ForgetKeys,
    scored.TakeScoredBatch,
    scored.AckScoredBatch,
    scored.NackScoredBatch,
    scored.ConfirmScoredBatch,
    scored.ReleaseScoredBatches,
    scored.ServeFromChannel,
    scored.ResetScoredGroups,
    scored.ReadScoredInfo,
    scored.ReadScoredStatus,
    scored.ReadEnvironmentStatus,
    scored.ReadLatestGroup,
)

OPERATIONS: dict[str, type[Operation[Any]]] = {operation.name: operation for operation in _ALL}


def from_wire(name: str, arguments: dict[str, Any], steps: Block | None) -> tuple[Operation[Any], bool]:
    """The operation that another process asks for, and whether it waits in pieces (`PENDING`). `InvalidInput` where the
    operation is unknown, or an argument is missing, unknown or of another type."""
    kind = OPERATIONS.get(name)
    if kind is None:
        raise InvalidInput(f"no operation {name!r}; known: {', '.join(OPERATIONS)}")
    if kind is produce.SubmitBlock:
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
