"""What `headrace bench run` measures, part by part, and the bars that the figures are held against."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from headrace.bench.gateway.load import GatewaySizes
from headrace.bench.gateway.servers import ready, start_gateway, start_stub
from headrace.bench.report import Bar, BenchReport, Figures, measure_parts
from headrace.bench.run.load import FULL, QUICK, RolloutAgents, RunSizes, compute, samples
from headrace.bench.timing import in_turn, median
from headrace.flows.black_box import BlackBoxAgentFlow, CoroutineAgent
from headrace.flows.gateway_client import GatewayClient
from headrace.flows.rollout_state import RolloutStateFile
from headrace.flows.rollouter import AsyncRollouter
from headrace.flows.schedule import RolloutSchedule
from headrace.flows.schedule_state import TRAIN, RolloutRules
from headrace.processes import READY_S, Processes
from headrace.rewards.config import RewardConfig
from headrace.rewards.sample import Sample, Score
from headrace.rewards.worker import LocalRewardWorker
from headrace.run.new import create

BARS = {
    "vs_gather": Bar(
        "wall of 256 rollouts of 5 calls, each answered after 1 s, through rollouter and gateway, recorded, over the "
        "same agents under a bare asyncio.gather",
        at_most=1.5,
    ),
    "vs_gather_at_once": Bar("the same where the rollout server answers at once: nothing but CPU"),
    "reward_flat": Bar("wall a sample of 10,000 samples scored by a rule of 1 ms, over 1,000", at_most=1.1),
    "run_start_s": Bar("seconds from `headrace run` to its first rollout, all processes started"),
}

#: Seconds that the gateway may take to connect to the stub: hundreds of agents begin at once, on cores that may be busy
#: with other things, and a rollout server that is taken to be down fails the round.
CONNECT_S = 60


def measure(quick: bool = False) -> BenchReport:
    """All figures of runs; with `quick` in fewer rounds."""
    return measure_sizes(QUICK if quick else FULL)


def measure_sizes(sizes: RunSizes, base: Path | None = None) -> BenchReport:
    """Measures every part in turn, each in a folder below `base`."""
    report = BenchReport(f"headrace bench run ({sizes.name})", BARS, details={"sizes": asdict(sizes)})
    return measure_parts(report, PARTS, sizes, base)


def gather(sizes: RunSizes, folder: Path) -> Figures:
    """`vs_gather`: rollouts through the whole of the product against the agents alone, where a call takes its time.

    On the one side the rollouter plays 32 rows eight times each, all at once, by a `BlackBoxAgentFlow` through a
    gateway with a journal, and keeps its place in a file: from the start of `AsyncRollouter.run` until it returns, when
    every trajectory is complete in the pool. On the other the same coroutines call the stub's chat route straight,
    under `asyncio.gather`, and nothing is kept.
    """
    through_s, bare_s = _both(sizes, folder, sizes.delay_ms)
    return Figures(
        {"vs_gather": through_s / bare_s},
        {"rollouter_s": through_s, "gather_s": bare_s, "delay_ms": float(sizes.delay_ms)},
    )


def gather_at_once(sizes: RunSizes, folder: Path) -> Figures:
    """`vs_gather_at_once`: the same with a stub that answers at once, so that every bit of CPU is seen; no rollout
    server is like that."""
    through_s, bare_s = _both(sizes, folder, 0)
    return Figures(
        {"vs_gather_at_once": through_s / bare_s},
        {"rollouter_s_at_once": through_s, "gather_s_at_once": bare_s},
    )


def _both(sizes: RunSizes, folder: Path, delay_ms: float) -> tuple[float, float]:
    """Median seconds of all rollouts through the rollouter, and straight. Raises where a call was not recorded."""
    rounds = sizes.gather_rounds
    with (
        start_stub(folder, GatewaySizes("stub", sampled=sizes.sampled), first_token_ms=delay_ms) as stub,
        start_gateway(stub, folder, "--journal", folder / "journal", "--connect-s", CONNECT_S) as gateway,
    ):
        ready(gateway)
        through_s, bare_s = in_turn(
            lambda: asyncio.run(_rolled_out(sizes, gateway.address, folder)),
            lambda: asyncio.run(_gathered(sizes, stub.address)),
            rounds,
        )
        asyncio.run(_check_recorded(sizes, gateway.address, rounds + 1))
    return median(through_s), median(bare_s)


async def _rolled_out(sizes: RunSizes, gateway: str, folder: Path) -> float:
    rules = RolloutRules(
        rows=sizes.rows, n_rollouts=sizes.n_rollouts, batch_size=sizes.rows, concurrency=sizes.rollouts
    )
    agents, client = RolloutAgents(sizes), GatewayClient(gateway)
    flow = BlackBoxAgentFlow(client, CoroutineAgent(agents.solve))
    state = folder / "rollout.json"
    state.unlink(missing_ok=True)  # every round is a run of its own
    try:
        with RolloutStateFile(state) as file:
            schedule = RolloutSchedule(rules, file.load(rules.rows))
            rollouter = AsyncRollouter(schedule, flow, {TRAIN: agents.data()}, client, file)
            began = time.perf_counter()
            summary = await rollouter.run()
            took = time.perf_counter() - began
    finally:
        await flow.aclose()
        await client.aclose()
        await agents.aclose()
    if summary.rollouts != sizes.rollouts or summary.failed:
        raise RuntimeError(f"{summary.rollouts} of {sizes.rollouts} rollouts came through; failed: {summary.failed}")
    return took


async def _gathered(sizes: RunSizes, stub: str) -> float:
    agents = RolloutAgents(sizes)
    rows = [row for row in agents.data() for _ in range(sizes.n_rollouts)]
    try:
        began = time.perf_counter()
        await asyncio.gather(*(agents.solve(row, stub) for row in rows))
        return time.perf_counter() - began
    finally:
        await agents.aclose()


async def _check_recorded(sizes: RunSizes, gateway: str, rounds: int) -> None:
    client = GatewayClient(gateway)
    try:
        found = await client.trajectories(TRAIN)
    finally:
        await client.aclose()
    steps, expected = sum(row["steps"] for row in found), rounds * sizes.rollouts * sizes.calls
    if steps < expected:  # a call that was tried again may have two
        raise RuntimeError(f"{expected} calls were answered and {steps} steps recorded")


def rewards(sizes: RunSizes, folder: Path) -> Figures:
    """`reward_flat`: what a sample's score takes where many are scored in one call, against as many in calls of few.

    The rule is a function that computes for 1 ms, and runs as users' functions and blocking rules do: in processes of
    their own, through a `LocalRewardWorker`.
    """
    return asyncio.run(_rewards(sizes))


async def _rewards(sizes: RunSizes) -> Figures:
    worker = LocalRewardWorker(RewardConfig.model_validate({"functions": [f"{compute.__module__}:compute"]}))
    few, many = samples(sizes.few_samples), samples(sizes.many_samples)

    async def sample_s(given: Sequence[Sample], calls: int) -> float:
        began = time.perf_counter()
        found = [outcome for _ in range(calls) for outcome in await worker.score(given)]
        took = time.perf_counter() - began
        if any(not isinstance(one, Score) or one.value != 1.0 for one in found):
            raise RuntimeError(f"a sample was not scored as it should be: {worker.counters}")
        return took / len(found)

    many_s: list[float] = []
    few_s: list[float] = []
    try:
        await worker.ready()
        await sample_s(few, 1)  # warms up
        for _ in range(sizes.reward_rounds):
            many_s.append(await sample_s(many, 1))
            few_s.append(await sample_s(few, sizes.many_samples // sizes.few_samples))
    finally:
        await worker.aclose()
    return Figures(
        {"reward_flat": median(many_s) / median(few_s)},
        {"score_ms": median(many_s) * 1e3, "score_ms_few": median(few_s) * 1e3},
    )


#: What is added to a project's agent: its first call notes the time, by the clock that all processes share.
NOTES_THE_TIME = '''

_play = solve


async def solve(task: dict, base_url: str) -> None:
    """Notes when the first rollout begins, and plays it."""
    import time

    try:
        with open(@NOTE@, "x") as note:
            note.write(f"{time.monotonic()}\\n")
    except FileExistsError:
        pass
    await _play(task, base_url)
'''


def start(sizes: RunSizes, folder: Path) -> Figures:
    """`run_start_s`: how long a user waits for the first rollout of `headrace run`.

    The project is the one that `headrace new --kind agent` writes: a rollout server with a tiny model, the gateway with
    its journalled pool, the reward loop, the trainer and the rollouter, each a process that is started and becomes
    ready. The run is ended once its agent was called.
    """
    found = [_first_rollout(folder / str(at)) for at in range(sizes.start_rounds)]
    return Figures({"run_start_s": median(found)}, {})


def _first_rollout(folder: Path) -> float:
    project, note = folder / "project", folder / "note"
    create(project, "agent")
    with (project / "agent.py").open("a") as agent:
        agent.write(NOTES_THE_TIME.replace("@NOTE@", repr(str(note))))
    with Processes(folder) as processes:
        began = time.monotonic()
        run = processes.start("run", "headrace", "run", project / "run.yaml")
        while time.monotonic() < began + READY_S:
            if note.exists() and (noted := note.read_text()).endswith("\n"):
                return float(noted) - began
            run.check()
            time.sleep(0.05)
    raise RuntimeError(f"headrace run had no rollout within {READY_S:g} s; it said: {run.said()[-2000:]}")


#: The parts by the names that a run tells, in its order.
PARTS = {"gather": gather, "gather at once": gather_at_once, "rewards": rewards, "start": start}
