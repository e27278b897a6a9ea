"""`headrace reward start`, `stop` and `try`: see `headrace.rewards`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator
from rich.console import Console

from headrace.cli.actors import ActorOptions, attended
from headrace.cli.common import (
    RETRY_S,
    StopHandler,
    on_terminal,
    pool_key,
    print_json,
    print_rows,
    remark,
)
from headrace.commands import CommandModel, Positional, command, group
from headrace.data.errors import HeadraceError
from headrace.data.visible import log_to_stderr, visible
from headrace.extras import require_for
from headrace.files import Key
from headrace.pool import KEY_VARIABLE
from headrace.pool.config import DEFAULT_CHANNEL

if TYPE_CHECKING:
    from headrace.data.trajectory import Trajectory
    from headrace.pool.embedded import DataPool
    from headrace.pool.remote import RemotePool
    from headrace.rewards.config import RewardConfig
    from headrace.rewards.recorded import SampleReader

#: Trajectories that a page of a trial's reading has.
PAGE_ROWS = 1000
#: The heights of a histogram's bars.
BARS = " ▁▂▃▄▅▆▇█"


class RewardStartCommand(ActorOptions, CommandModel):
    """Score what agents recorded, until SIGTERM or Ctrl-C: takes complete trajectories without a reward from a pool,
    scores them and annotates them there. Their channels hand out nothing before it has a reward. Prints one line once
    it is ready, and at its end what it did, as JSON.

    With --name it is a detached, named actor of a Ray cluster that a gateway's --reward-worker-name asks; with --pool
    the actor does the above too. The command then ends, unless --attach is given, and Ray restarts the actor when it
    dies.
    """

    reward: Path = Field(description="file (YAML, JSON or TOML) of the reward; docs/rewards.md has every field")
    pool: str | None = Field(
        None, description="the pool to score: http://HOST:PORT (a gateway's, too) or ray-actor://NAME?namespace=NAME"
    )
    channel: list[str] = Field([DEFAULT_CHANNEL], description="a channel to score; may be given several times")
    tokenizer_path: str | None = Field(None, description="folder of the tokenizer that agents were served with")
    key: Key = Field(None, description=f"the pool's key over HTTP (or set {KEY_VARIABLE})")
    patience_s: float = Field(
        1800, ge=0, description="how long a judge may be out of reach before what it should score is quarantined"
    )
    name: str | None = Field(None, min_length=1, description="be a Ray actor of this name")
    ray_address: str = Field("auto", description="the cluster: auto, or its HOST:PORT")
    ray_namespace: str = Field("default", description="the actor's namespace")

    @model_validator(mode="after")
    def _has_work(self) -> RewardStartCommand:
        if self.pool is None and self.name is None:
            raise ValueError("--pool must be given (a pool to score), or --name (a Ray actor that others ask), or both")
        if self.pool is not None and self.tokenizer_path is None:
            raise ValueError("with --pool, --tokenizer-path must be given too: a pool holds ids, a reward reads text")
        if self.attach and self.name is None:
            raise ValueError("--attach is about an actor; give --name too, or leave it out: the loop stays anyway")
        return self

    def execute(self) -> None:
        require_for("reward start" if self.name is None else "reward start --name")
        from headrace.rewards.config import RewardConfig

        log_to_stderr()
        config = RewardConfig.read(self.reward)
        if self.name is not None:
            self._start_actor(self.name)
            return
        from headrace.tokens import do_without_torch

        do_without_torch()  # functions of users run in processes of their own, which may have it
        print_json(asyncio.run(self._score(config, _reader(self.tokenizer_path or "", config))))

    def _start_actor(self, name: str) -> None:
        from headrace.files import read
        from headrace.net.ray_cluster import ActorAddress
        from headrace.rewards.ray import WatchedPool, start_reward_worker

        where = ActorAddress(name, self.ray_namespace, self.ray_address)
        watched = None
        if self.pool is not None and self.tokenizer_path is not None:
            tokenizer = str(Path(self.tokenizer_path).absolute()) if Path(self.tokenizer_path).is_dir() else None
            watched = WatchedPool(
                self.pool, tuple(self.channel), tokenizer or self.tokenizer_path, pool_key(self.key), self.patience_s
            )

        def start() -> Any:
            return start_reward_worker(
                where,
                read(self.reward),
                self.reward.absolute().parent,
                watched=watched,
                placement=self.placement(),
                attached=self.attach,
            )

        def announce() -> None:
            print(f"reward worker ready on {where}", flush=True)
            if self.pool is not None:
                print(f"reward loop ready on {self.pool}", flush=True)

        if self.attach:
            attended(name, start, "state", announce)
        else:
            start()
            announce()

    async def _score(self, config: RewardConfig, reader: SampleReader) -> dict[str, Any]:
        """Runs the loop until it is told to end; what it did."""
        from headrace.pool.connect import connect
        from headrace.rewards.loop import RewardLoop
        from headrace.rewards.worker import LocalRewardWorker

        assert self.pool is not None
        stop = StopHandler()
        pool = connect(self.pool, key=pool_key(self.key), retry_s=RETRY_S)
        worker = LocalRewardWorker(config)
        loop = RewardLoop(
            pool,
            worker,
            reader,
            channels=self.channel,
            on=config.on,
            concurrency=config.concurrency,
            patience_s=self.patience_s,
        )
        try:
            await worker.ready()
            await loop.run(lambda: print(f"reward loop ready on {self.pool}", flush=True))
        except asyncio.CancelledError:
            pass  # it was told to end
        finally:
            stop.calls(lambda: None)
            await worker.aclose()
            await pool.aclose()
        return loop.told()


class RewardStopCommand(CommandModel):
    """End a reward worker that runs as a Ray actor, for good. What it had not scored yet waits in the pool."""

    name: Positional[str] = Field(description="the actor's name")
    ray_address: str = Field("auto", description="the cluster: auto, or its HOST:PORT")
    ray_namespace: str = Field("default", description="the actor's namespace")

    def execute(self) -> None:
        require_for("reward stop")
        from headrace.net.ray_cluster import ActorAddress
        from headrace.rewards.ray import stop_reward_worker

        where = ActorAddress(self.name, self.ray_namespace, self.ray_address)
        if not stop_reward_worker(where):
            raise HeadraceError(f"no actor {self.name!r} runs in namespace {self.ray_namespace!r}")
        print(f"stopped {where}")


class RewardTryCommand(CommandModel):
    """Score what a pool has recorded by a reward, and change nothing: how the scores spread, which groups they tie,
    what fails and what it costs, and in which groups an advantage changes its sign, the worst first, against the
    recorded rewards or those of another reward.

    Of a journal's folder, also one that a process has open, groups that were trained on are read too, as far as the
    journal still has them.
    """

    file: Positional[Path] = Field(description="file (YAML, JSON or TOML) of the reward")
    pool: str = Field(description="a journal's folder, http://HOST:PORT or ray-actor://NAME?namespace=NAMESPACE")
    tokenizer_path: str = Field(description="folder of the tokenizer that agents were served with")
    against: Path | None = Field(None, description="file of a reward to compare with, in place of recorded rewards")
    channel: str = Field(DEFAULT_CHANNEL, description="the channel")
    limit: int = Field(1000, ge=1, description="trajectories to score; the group of the last one is scored whole")
    worst: int = Field(5, ge=0, description="groups to show in which signs change")
    key: Key = Field(None, description=f"the pool's key over HTTP (or set {KEY_VARIABLE})")
    as_json: bool = Field(False, alias="json", description="print JSON")

    def execute(self) -> None:
        require_for("reward try")
        from headrace.rewards.config import RewardConfig

        config = RewardConfig.read(self.file)
        old = None if self.against is None else RewardConfig.read(self.against)
        with self._opened() as pool:
            found, more = _recorded(pool, self.channel, self.limit)
        if not found:
            raise HeadraceError(f"channel {self.channel!r} of {self.pool} holds no complete trajectory to score")
        if more:
            remark(f"there is more in channel {self.channel!r}; --limit {2 * self.limit} scores more of it")
        told = asyncio.run(self._tried(found, config, old))
        if self.as_json:
            print_json(told)
        else:
            _print(told)

    @contextmanager
    def _opened(self) -> Iterator[DataPool | RemotePool]:
        if "://" not in self.pool:
            from headrace.pool.readonly import JournalView

            with JournalView(self.pool, live=True, consumed=True) as view:
                yield view
            return
        from headrace.pool.connect import connect

        with connect(self.pool, key=pool_key(self.key), retry_s=RETRY_S) as pool:
            yield pool

    async def _tried(self, found: list[Trajectory], config: RewardConfig, old: RewardConfig | None) -> dict[str, Any]:
        from headrace.rewards.trial import ComparedTrajectory, report, tried

        reader = _reader(self.tokenizer_path, config)
        with Console(stderr=True).status(f"scoring {len(found)} trajectories"):
            after, cost = await tried(found, config, reader)
            before = [trajectory.reward for trajectory in found]
            if old is not None:
                before = [each.value for each in (await tried(found, old, _reader(self.tokenizer_path, old)))[0]]
        rows = [
            ComparedTrajectory(trajectory.uid, trajectory.prompt_uid, earlier, later)
            for trajectory, earlier, later in zip(found, before, after, strict=True)
        ]
        against = "recorded" if self.against is None else str(self.against)
        return {"reward": str(self.file), "against": against, **report(rows, worst=self.worst), "cost": cost}


def _reader(tokenizer_path: str, config: RewardConfig) -> SampleReader:
    from headrace.rewards.recorded import SampleReader
    from headrace.tokens import load_renderer

    return SampleReader(load_renderer(tokenizer_path), config.ground_truth)


def _recorded(pool: DataPool | RemotePool, channel: str, limit: int) -> tuple[list[Trajectory], bool]:
    """Complete trajectories, oldest first, in whole groups: the first `limit` and what is left of the last one's group;
    and whether there are more."""
    from headrace.pool.errors import NotFound
    from headrace.pool.readonly import JournalView

    found: list[Trajectory] = []

    def full(prompt_uid: str) -> bool:
        return len(found) >= limit and found[-1].prompt_uid != prompt_uid

    for trajectory in pool.consumed(channel) if isinstance(pool, JournalView) else ():
        if full(trajectory.prompt_uid):
            return found, True
        if trajectory.complete:
            found.append(trajectory)
    cursor: str | None = "0"
    while cursor is not None:
        page = pool.list_trajectories(channel, complete=True, cursor=cursor, limit=PAGE_ROWS)
        for row in page["items"]:
            if full(row["prompt_uid"]):
                return found, True
            try:
                found.append(pool.trajectory(row["trajectory_uid"], channel))
            except NotFound:
                pass  # it left the pool meanwhile
        cursor = page["next"]
    return found, False


# -- a trial as tables -------------------------------------------------------------------------------------------------

_SPREAD = ("rewards", "count", "mean", "deviation", "min", "quarter", "median", "three_quarters", "max", "histogram")
_WORST = ("group", "trajectory", "before", "after", "advantage_before", "advantage_after", "changed")


def _print(told: dict[str, Any]) -> None:
    """Prints what a trial found: how rewards spread, then what they come to, then the worst groups."""
    spreads = {str(told["reward"]): told["rewards"], str(told["against"]): told["rewards_before"]}
    spreads |= {f"part {name}": spread for name, spread in told["parts"].items()}
    rows = [
        {"rewards": name, **spread, "histogram": _bars(spread.get("histogram", ()))} for name, spread in spreads.items()
    ]
    print_rows(rows, _SPREAD)
    ties, signs, cost = told["ties"], told["signs"], told["cost"]
    reasons = ", ".join(f"{count} {reason}" for reason, count in told["failed"].items())
    failed = sum(told["failed"].values())
    lines = {
        "scored": f"{told['scored']} of {told['trajectories']} trajectories, in {told['groups']} groups",
        "failed": f"{failed} ({reasons})" if failed else "0",
        "ties": f"{ties['tied']} of {ties['groups']} groups teach nothing; before: {ties['tied_before']}",
        "signs": f"{signs['changed']} of {signs['trajectories']} advantages change their sign, in "
        f"{signs['groups_changed']} of {signs['groups']} groups",
        "cost": ", ".join(f"{name.replace('_', ' ')} {value:.6g}" for name, value in cost.items()),
    }
    for name, line in lines.items():
        print(f"{name}\t{line}")
    for failure in told["failures"]:
        why = f"{failure['source']}: {failure['reason']}: {failure['detail']}"
        print(f"failed\t{visible(failure['trajectory_uid'])}\t{visible(why)}")
    worst = [
        {"group": found["prompt_uid"], "trajectory": row["trajectory_uid"], **row}
        for found in told["worst_groups"]
        for row in found["trajectories"]
    ]
    if worst:
        print_rows(worst, _WORST)


def _bars(counts: Sequence[int]) -> str:
    """A histogram in one line; on a terminal only, as others read numbers."""
    if not on_terminal():
        return " ".join(map(str, counts))
    most = max(counts, default=0) or 1
    return "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in counts)


start_app = command("start", RewardStartCommand)
stop_app = command("stop", RewardStopCommand)
try_app = command("try", RewardTryCommand)
reward_app = group(
    "reward",
    "Score what agents did, beside them: with rules, judges, reward models and functions of your own.",
    {
        "start": ("headrace.cli.reward:start_app", "score a pool's trajectories as they complete"),
        "stop": ("headrace.cli.reward:stop_app", "end a reward worker on Ray"),
        "try": ("headrace.cli.reward:try_app", "score what is recorded, and change nothing"),
    },
)
