"""Ranks: the processes that train one model together, each with its own device.

    torchrun --nproc-per-node 4 -m headrace train CONFIG.yaml

Rank 0 is the trainer as it is alone: it fetches, publishes, writes checkpoints and speaks to the user. The others
follow it (`shared_learner`). They exchange two kinds of things: tensors, in the default process group (NCCL on GPUs,
gloo on CPUs), and Python objects, in a group of their own that waits as long as rank 0 waits for a batch.

Whatever goes wrong is said once, by rank 0. A rank that fails while all of them set up tells it its error; one that
dies later closes its connections, which ends the others.
"""

from __future__ import annotations

import heapq
import os
import pickle
import socket
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from headrace.data.errors import HeadraceError, InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.trainer.config import TrainerConfig

T = TypeVar("T")

#: What torchrun and Ray Train set for each process: its number, how many there are, and its number on its machine.
RANK, COUNT, LOCAL_RANK = "RANK", "WORLD_SIZE", "LOCAL_RANK"
#: How often torchrun has begun the processes again after one of them died.
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
#: Longest wait for an object of another rank: a run may wait days for its next batch, and a rank that is gone is
#: noticed by its connection.
OBJECT_WAIT = timedelta(days=365)
#: What the messages of gloo, NCCL and the store have in common when another process is gone.
LOST_WORDS = ("gloo", "nccl", "connection", "socket", "timed out", "peer")
#: How much dearer than the mean a rank's share may be, for groups to stay together.
MOST_OVER_MEAN = 1.1
#: Exit code of a rank that ends since another has failed; that one says why.
FOLLOWED = 1


class RankLost(HeadraceError):
    """A process of the run is gone, and with it its part of the model."""

    code = "rank_lost"


@dataclass(slots=True)
class Ranks:
    """This process's number among `count`, and its ways to the others. With a count of 1 nothing is exchanged."""

    rank: int = 0
    count: int = 1
    #: Its number on its machine: which of the GPUs is its own.
    local: int = 0
    #: Times that the launcher has begun all ranks again; such a start resumes.
    restarts: int = 0
    #: The group for objects, and the mesh over which weights are sharded.
    objects: Any = None
    mesh: Any = None
    #: Whether the ranks are set up: from then on they wait for rank 0's commands.
    settled: bool = False
    #: Whether a command is under way: what another is sent meanwhile it would not take, and the sender wait for ever.
    busy: bool = False

    @property
    def alone(self) -> bool:
        return self.count == 1 and self.mesh is None

    def placed(self, device: str) -> str:
        """This rank's device, where all are told `device` (`auto` too); makes the mesh over all of theirs. Of several
        GPUs on a machine each rank has its own. Raises `InvalidInput` where there is no such device, or one GPU is
        named and there are several ranks."""
        from headrace.engine.device import device_of

        if self.alone:
            return device_of(device)
        from torch.distributed.device_mesh import init_device_mesh

        if device.startswith("cuda:"):
            raise InvalidInput(f"device {device} is one GPU, and there are {self.count} ranks; name cuda or auto")
        device = device_of(device)
        if device not in ("cpu", "cuda"):
            raise InvalidInput(f"device is {device}, and there are {self.count} ranks; name cpu, cuda or auto")
        self.mesh = init_device_mesh(device, (self.count,))
        return device if device == "cpu" else f"cuda:{self.local}"

    # -- objects -------------------------------------------------------------------------------------------------------

    def exchange(self, mine: T) -> list[T]:
        """Every rank's object, by rank. All ranks call it at the same point. Raises `RankLost`."""
        if self.alone:
            return [mine]
        import torch.distributed as dist

        found: list[Any] = [None] * self.count
        self.heard(lambda: dist.all_gather_object(found, mine, group=self.objects))
        return found

    def send(self, command: Any) -> None:
        """Rank 0's: gives every other rank an object that it `receive`s. Raises `RankLost`."""
        self._broadcast([command])

    def receive(self) -> Any:
        """What rank 0 sent. Raises `RankLost`."""
        return self._broadcast([None])[0]

    def _broadcast(self, held: list[Any]) -> list[Any]:
        import torch.distributed as dist

        self.heard(lambda: dist.broadcast_object_list(held, src=0, group=self.objects))
        return held

    def heard(self, call: Callable[[], T]) -> T:
        """What a call with exchanges in it returns. Raises `RankLost` in place of what their library says where another
        rank is gone."""
        if self.alone:
            return call()
        try:
            return call()
        except RuntimeError as error:
            if not _is_lost(error):
                raise
            raise RankLost(
                f"another of the {self.count} ranks is gone ({_first_line(error)}); the run goes on from its last "
                "checkpoint with --resume, on as many ranks as there are"
            ) from error

    def together(self, work: Callable[[], T]) -> T:
        """Does what every rank must succeed in. Where one fails, rank 0 raises its error, with the rank in front, and
        the others end without a word."""
        if self.alone:
            return work()
        error: HeadraceError | None = None
        found: list[T] = []
        try:
            found.append(work())
        except RankLost:
            raise
        except Exception as raised:
            error = portable(raised)
        failed = [(rank, told) for rank, told in enumerate(self.exchange(error)) if told is not None]
        if not failed:
            return found[0]
        if self.rank:
            raise SystemExit(FOLLOWED)
        rank, told = failed[0]
        self.settled = True
        self.count_out()
        raise told if rank == 0 else InvalidInput(f"rank {rank}: {told}")

    def count_out(self) -> None:
        """Rank 0's: the others have ended by themselves; nothing is sent to them any more."""
        self.objects = None

    def agreed(self, load: Callable[[], TrainerConfig]) -> TrainerConfig:
        """The configuration, which must be the same on every rank. Raises `InvalidInput` on rank 0 where one rank
        cannot read it, or has another: the field, and both values."""
        config = self.together(load)
        if self.alone:
            return config
        dumped = config.model_dump(mode="json")
        every = self.exchange((socket.gethostname(), dumped, config.shown()))
        self.together(lambda: _check_same(every))
        return config

    # -- tensors -------------------------------------------------------------------------------------------------------

    def add_up(self, mine: Tensor) -> Tensor:
        """The sum of every rank's tensor of this shape; it may be the given one, changed."""
        if not self.alone:
            import torch.distributed as dist

            self.heard(lambda: dist.all_reduce(mine))
        return mine

    # -- begin and end -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Rank 0 tells the others that the run has ended, where they are still there."""
        if self.alone or self.rank or self.objects is None or self.busy:
            return
        with suppress(RankLost):
            if self.settled:
                self.send(None)
            else:  # they wait to hear whether all could set up
                self.exchange(portable(error) if isinstance(error, Exception) else InvalidInput("rank 0 has ended"))


#: One process, which is all there is.
ALONE = Ranks()


def joined() -> Ranks:
    """The ranks that this process belongs to, once all of them are there: those of torchrun's environment, or of a
    process group that Ray Train has made; `ALONE` where there is but one."""
    count = int(os.environ.get(COUNT) or 1)
    if count == 1:
        return ALONE
    import torch
    import torch.distributed as dist

    rank, local = int(os.environ[RANK]), int(os.environ.get(LOCAL_RANK) or 0)
    restarts = int(os.environ.get(RESTARTS) or 0)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        # torchrun keeps its store over restarts, with the addresses of processes that are gone.
        store = dist.PrefixStore(f"start-{restarts}", next(dist.rendezvous("env://", rank, count))[0])
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    objects = dist.new_group(backend="gloo", timeout=OBJECT_WAIT)
    return Ranks(rank, count, local, restarts, objects)


def sequence_cost(tokens: int, width: int) -> float:
    """What a sequence costs to compute, in tokens of a short one: matrices cost the same for each token, attention as
    much as them once a sequence is 12 times as long as the model is wide."""
    return tokens * (1 + tokens / (12 * width))


def deal(costs: Sequence[float], groups: Sequence[Hashable], count: int) -> list[list[int]]:
    """Which of the costs' indices each rank gets, in order, so that the dearest share is cheap: each goes to the rank
    that has least, the dearest first. Those of one group, which begin alike and are cheaper together, stay together
    where no share is then much dearer than the mean."""
    if count == 1:
        return [list(range(len(costs)))]
    members: dict[Hashable, list[int]] = {}
    for at, group in enumerate(groups):
        members.setdefault(group, []).append(at)
    shares = _dealt(costs, list(members.values()), count)
    if max(sum(costs[at] for at in share) for share in shares) > MOST_OVER_MEAN * sum(costs) / count:
        shares = _dealt(costs, [[at] for at in range(len(costs))], count)
    return shares


def _dealt(costs: Sequence[float], units: Sequence[list[int]], count: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(count)]
    least = [(0.0, rank) for rank in range(count)]
    weighed = [(sum(costs[at] for at in unit), unit) for unit in units]
    for cost, unit in sorted(weighed, key=lambda one: (-one[0], one[1])):
        load, rank = heapq.heappop(least)
        shares[rank] += unit
        heapq.heappush(least, (load + cost, rank))
    return [sorted(share) for share in shares]


def _check_same(every: Sequence[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    """Raises `InvalidInput` with the first field in which a rank's configuration is not rank 0's."""
    (_, ours, ours_shown), *others = every
    for rank, (host, theirs, theirs_shown) in enumerate(others, 1):
        for name in _differing(ours, theirs):
            raise InvalidInput(
                f"the ranks disagree on {name}: it is {_at(ours_shown, name)!r} on rank 0 and "
                f"{_at(theirs_shown, name)!r} on rank {rank} ({host}); give every rank the same file and flags"
            )


def _differing(ours: Any, theirs: Any, name: str = "") -> list[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = dict.fromkeys([*ours, *theirs])
        return [
            found
            for key in keys
            for found in _differing(ours.get(key), theirs.get(key), f"{name}.{key}" if name else str(key))
        ]
    return [] if ours == theirs else [name]


def _at(values: Any, name: str) -> Any:
    for key in name.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


def portable(error: Exception) -> HeadraceError:
    """An error that another process can read: our own as they are, others by their text."""
    if isinstance(error, HeadraceError):
        with suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
        return HeadraceError(str(error))
    return HeadraceError(f"{type(error).__name__}: {error}")


def _is_lost(error: RuntimeError) -> bool:
    words = str(error).lower()
    return any(lost in words for lost in LOST_WORDS)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
