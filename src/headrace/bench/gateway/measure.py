"""What `headrace bench gateway` measures, part by part, and the bars that the figures are held against."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from headrace.bench.gateway.chat import chat
from headrace.bench.gateway.dashboard_page import dashboard_page
from headrace.bench.gateway.live_streams import live_streams
from headrace.bench.gateway.load import (
    FULL,
    QUICK,
    AgentDialect,
    BenchAgent,
    ChatAgentDialect,
    GatewayLoad,
    GatewaySizes,
    LoadTarget,
    MessagesAgentDialect,
    ResponsesAgentDialect,
)
from headrace.bench.gateway.overload import MEMORY_MB, overload
from headrace.bench.gateway.servers import ready, start_gateway, start_proxy, start_stub
from headrace.bench.gateway.workers import workers
from headrace.bench.report import Bar, BenchReport, Figures, measure_parts
from headrace.bench.server_process import ServerProcess
from headrace.bench.timing import in_own_process, in_turn, median

BARS = {
    "vs_passthrough": Bar("req/s of 64 callers, four turns to about 1,000 tokens, over a bare proxy's", at_least=0.4),
    "chat_vs_passthrough": Bar("CPU of a bare proxy's call over that of a chat call, four turns", at_least=0.4),
    "chat20_vs_passthrough": Bar("the same of 20 turns, to about 4,000 tokens", at_least=0.4),
    "trajectory_vs_passthrough": Bar("the same of four turns, with what begins and ends a trajectory"),
    "trajectory20_vs_passthrough": Bar("the same of 20 turns, with what begins and ends a trajectory"),
    "added_p50_ms_vs_passthrough": Bar("latency of a lone caller's call, less the bare proxy's"),
    "responses_vs_chat": Bar("CPU of a call in OpenAI's Responses over one in chat completions", at_most=1.3),
    "messages_vs_chat": Bar("CPU of a call in Anthropic's Messages over one in chat completions", at_most=1.3),
    "history_flat": Bar("CPU of a call at a history of 32,000 tokens over one of 1,000", at_most=4),
    "bridge_vs_full": Bar("CPU of a call at 32,000 tokens, bridged over rendered in full", at_most=0.25),
    "ray_vs_embedded": Bar("req/s with the pool as a Ray actor over embedded", at_least=0.8),
    "stream_vs_direct": Bar("time to the first token, less 2 ms, over the rollout server's own", at_most=1.3),
    "stream_us_token": Bar("CPU of the gateway's process for a token of 100 live streams, in microseconds"),
    "stream_vs_proxy": Bar("that over a bare streaming proxy's, flushed every 50 ms", at_most=1),
    "stream250_vs_proxy": Bar("the same flushed every 250 ms", at_most=0.4),
    "streams_held": Bar(
        "of 1,000 live streams at 30 tokens/s, those that one process holds at their pace", at_least=1000
    ),
    "workers2_cpu": Bar("CPU of a call with two workers, their parent included, over one process's", at_most=1.15),
    "overload_finished": Bar("of calls taken at three times as many as are taken at once, those that end", at_least=1),
    "overload_refused": Bar("the share that is refused meanwhile"),
    "overload_refusal_p99_ms": Bar("how long a refused call waits for its 503"),
    "overload_health_p99_ms": Bar("how long /health takes meanwhile, on a connection of its own", at_most=1000),
    "overload_rss_mb": Bar("what the gateway's process grows by meanwhile, of --memory-mb 64", at_most=MEMORY_MB),
    "dashboard_throughput": Bar("req/s of 16 callers with a dashboard page open over without", at_least=0.95),
    "dashboard_loop_ms_max": Bar("how long the gateway's event loop is held at most meanwhile", at_most=20),
    "req_s": Bar("chat calls a second of 16 callers, the pool included"),
    "cpu_ms": Bar("CPU of the gateway's process for one of those calls, the pool included"),
}


def measure(quick: bool = False) -> BenchReport:
    """All figures of the gateway; with `quick` at smaller sizes."""
    return measure_sizes(QUICK if quick else FULL)


def measure_sizes(sizes: GatewaySizes, base: Path | None = None) -> BenchReport:
    """Measures every part in turn, each in a folder below `base`."""
    import headrace.bench.pool.ray  # noqa: F401 - needs the extra: said before anything is measured

    report = BenchReport(f"headrace bench gateway ({sizes.name})", BARS, details={"sizes": asdict(sizes)})
    return measure_parts(report, PARTS, sizes, base)


def passthrough(sizes: GatewaySizes, folder: Path) -> Figures:
    """`vs_passthrough`, `added_p50_ms_vs_passthrough`, `req_s` and `cpu_ms`: the gateway against the bare proxy.

    Four turns grow from 512 tokens to about 1,000, with 128 sampled ones each. 64 agents at once call the one and then
    the other; a lone agent finds what a call takes when nothing stands in line. The proxy passes the agents' bodies on
    to the stub's chat route. Then 16 agents, and the CPU that the gateway's process, in which the pool lives, takes for
    a call.
    """
    with start_stub(folder, sizes) as stub, start_gateway(stub, folder) as gateway, start_proxy(stub) as proxy:
        ready(gateway)
        through, bare = LoadTarget(gateway.address), LoadTarget(proxy.address, trajectories=False)
        with GatewayLoad(sizes) as load:
            many = sizes.many_callers
            gateway_rate, proxy_rate = map(
                median,
                in_turn(
                    lambda: load.round(through, many, many * sizes.trajectories_a_caller).rate,
                    lambda: load.round(bare, many, many * sizes.trajectories_a_caller).rate,
                    sizes.throughput_rounds,
                ),
            )
            gateway_p50, proxy_p50 = map(
                median,
                in_turn(
                    lambda: load.round(through, 1, sizes.lone_trajectories).p50,
                    lambda: load.round(bare, 1, sizes.lone_trajectories).p50,
                    sizes.lone_rounds,
                ),
            )
            rates, cpu = [], []
            some = sizes.some_callers
            for _ in range(sizes.throughput_rounds):
                found = load.round(through, some, some * sizes.trajectories_a_caller, gateway.cpu_s)
                rates.append(found.rate)
                cpu.append(found.metered / len(found.latencies))
    return Figures(
        {
            "vs_passthrough": gateway_rate / proxy_rate,
            "added_p50_ms_vs_passthrough": (gateway_p50 - proxy_p50) * 1e3,
            "req_s": median(rates),
            "cpu_ms": median(cpu) * 1e3,
        },
        {
            f"req_s_{many}_callers": gateway_rate,
            f"proxy_req_s_{many}_callers": proxy_rate,
            "p50_ms": gateway_p50 * 1e3,
            "proxy_p50_ms": proxy_p50 * 1e3,
        },
    )


def dialects(sizes: GatewaySizes, folder: Path) -> Figures:
    """`responses_vs_chat` and `messages_vs_chat`: what a call costs the gateway in another dialect.

    The same conversations as everywhere, held by 16 agents in chat completions and then in the other dialect, on one
    gateway, round by round. What is measured is the CPU of the gateway's process for a call, the pool included.
    """
    wires: dict[str, AgentDialect] = {"responses": ResponsesAgentDialect(), "messages": MessagesAgentDialect()}
    ratios: dict[str, float] = {}
    absolute: dict[str, float] = {}
    with start_stub(folder, sizes) as stub, start_gateway(stub, folder) as gateway, GatewayLoad(sizes) as load:
        ready(gateway)
        for name, wire in wires.items():
            other_s, chat_s = map(
                median,
                in_turn(
                    partial(_cpu_s, load, gateway, wire),
                    partial(_cpu_s, load, gateway, ChatAgentDialect()),
                    sizes.throughput_rounds,
                ),
            )
            ratios[f"{name}_vs_chat"] = other_s / chat_s
            absolute |= {f"{name}_cpu_ms": other_s * 1e3, f"{name}_cpu_ms_chat": chat_s * 1e3}
    return Figures(ratios, absolute)


def _cpu_s(load: GatewayLoad, gateway: ServerProcess, wire: AgentDialect) -> float:
    """The gateway's CPU seconds for each call."""
    some = load.sizes.some_callers
    target = LoadTarget(gateway.address, wire=wire)
    found = load.round(target, some, some * load.sizes.trajectories_a_caller, gateway.cpu_s)
    return found.metered / len(found.latencies)


def history(sizes: GatewaySizes, folder: Path) -> Figures:
    """`history_flat` and `bridge_vs_full`: a call at the end of a long history against one at a short one's, and
    against rendering the whole history again.

    The long conversation reached 32,000 tokens in turns of 640, each of them a call; the calls that are measured go on
    from there with a few words a turn. The short one has 1,000 tokens. The full rendering is the gateway with
    `--history template`, which writes every prompt anew from its messages, on a conversation of the same length. What
    is measured is the CPU of the gateway's process, one call at a time.
    """
    with (
        start_stub(folder, sizes) as stub,
        start_gateway(stub, folder, "--history", "bridge") as bridge,
        start_gateway(stub, folder, "--history", "template") as template,
        GatewayLoad(sizes) as load,
    ):
        ready(bridge, template)
        long, full = _Long(load, bridge), _Long(load, template)
        short_s: list[float] = []
        long_s: list[float] = []
        full_s: list[float] = []
        for at in range(sizes.history_rounds + 1):
            found = (load.run(_short(load, bridge)), load.run(long.calls()), load.run(full.calls()))
            if at:  # the first round warms up
                for seconds, some in zip((short_s, long_s, full_s), found, strict=True):
                    seconds.append(some)
        tokens = long.tokens
        load.run(long.agent.end())
        load.run(full.agent.end())
    return Figures(
        {
            "history_flat": median(long_s) / median(short_s),
            "bridge_vs_full": median(long_s) / median(full_s),
        },
        {
            "cpu_ms_short_history": median(short_s) * 1e3,
            "cpu_ms_long_history": median(long_s) * 1e3,
            "cpu_ms_long_history_rendered": median(full_s) * 1e3,
            "long_history_tokens": float(tokens),
        },
    )


class _Long:
    """A conversation that is already long, and continues."""

    def __init__(self, load: GatewayLoad, gateway: ServerProcess) -> None:
        self.agent = BenchAgent(load, LoadTarget(gateway.address))
        self._load = load
        self._gateway = gateway
        load.run(self._grow())

    @property
    def tokens(self) -> int:
        return self.agent.prompt_tokens

    async def _grow(self) -> None:
        sizes = self._load.sizes
        await self.agent.begin()
        while self.tokens < sizes.long_history:
            await self.agent.ask(sizes.long_turn_words)

    async def calls(self) -> float:
        """The gateway's CPU seconds for each of its next calls."""
        sizes = self._load.sizes
        before = self._gateway.cpu_s()
        for _ in range(sizes.history_calls):
            await self.agent.ask(sizes.more_words)
        return (self._gateway.cpu_s() - before) / sizes.history_calls


async def _short(load: GatewayLoad, gateway: ServerProcess) -> float:
    """The gateway's CPU seconds for each call at about 1,000 tokens; the first is not counted."""
    sizes = load.sizes
    seconds = 0.0
    for _ in range(sizes.history_calls):
        agent = BenchAgent(load, LoadTarget(gateway.address))
        await agent.begin()
        await agent.ask(sizes.short_words)
        before = gateway.cpu_s()
        for _ in range(sizes.history_calls):
            await agent.ask(sizes.more_words)
        seconds += gateway.cpu_s() - before
        await agent.end()
    return seconds / sizes.history_calls**2


def ray_pool(sizes: GatewaySizes, folder: Path) -> Figures:
    """`ray_vs_embedded`: a gateway whose pool is a Ray actor against one whose pool is its own.

    16 agents call the one and then the other, over the conversations of `passthrough`. The actor, which keeps its steps
    in memory as the embedded pool does, lives in a local cluster that a child process starts and ends.
    """
    return in_own_process(in_own_cluster, sizes, folder)


def in_own_cluster(sizes: GatewaySizes, folder: Path) -> Figures:
    """`ray_pool` inside of the child process that has the cluster."""
    from headrace.bench.pool.ray import NAME, NAMESPACE, local_cluster_pool

    with local_cluster_pool() as cluster:
        return _ray_vs_embedded(
            sizes, folder, ("--data-pool-name", NAME, "--ray-address", cluster, "--ray-namespace", NAMESPACE)
        )


def _ray_vs_embedded(sizes: GatewaySizes, folder: Path, pool: tuple[str, ...]) -> Figures:
    lengths = ("--prompt-length", 4096, "--response-length", 1024)
    with (
        start_stub(folder, sizes) as stub,
        start_gateway(stub, folder, *pool, *lengths) as on_ray,
        start_gateway(stub, folder) as embedded,
        GatewayLoad(sizes) as load,
    ):
        ready(on_ray, embedded)
        some = sizes.some_callers
        ray_rate, embedded_rate = map(
            median,
            in_turn(
                lambda: load.round(LoadTarget(on_ray.address), some, some * sizes.trajectories_a_caller).rate,
                lambda: load.round(LoadTarget(embedded.address), some, some * sizes.trajectories_a_caller).rate,
                sizes.ray_rounds,
            ),
        )
    return Figures(
        {"ray_vs_embedded": ray_rate / embedded_rate},
        {"ray_req_s": ray_rate, "embedded_req_s": embedded_rate},
    )


#: What the gateway may add to the time of a first token, whatever the server takes.
GRANTED_S = 0.002


def stream(sizes: GatewaySizes, folder: Path) -> Figures:
    """`stream_vs_direct`: how long an agent waits for the first token, through the gateway and from the rollout server.

    The rollout server takes 20 ms until its first token and sends the rest at once. A lone agent streams four turns
    from the stub's own chat route, and then through the gateway. The gateway is granted 2 ms, whatever the server
    takes.
    """
    with (
        start_stub(folder, sizes, first_token_ms=sizes.first_token_ms) as stub,
        start_gateway(stub, folder) as gateway,
        GatewayLoad(sizes) as load,
    ):
        ready(gateway)
        through, direct = LoadTarget(gateway.address), LoadTarget(stub.address, trajectories=False)
        gateway_s, direct_s = map(
            median,
            in_turn(
                lambda: load.run(_first_token(load, through)),
                lambda: load.run(_first_token(load, direct)),
                sizes.stream_rounds,
            ),
        )
    return Figures(
        {"stream_vs_direct": (gateway_s - GRANTED_S) / direct_s},
        {"first_token_ms": gateway_s * 1e3, "first_token_ms_direct": direct_s * 1e3},
    )


async def _first_token(load: GatewayLoad, target: LoadTarget) -> float:
    """Median seconds until a call's first text."""
    sizes = load.sizes
    seconds = []
    for _ in range(sizes.streams):
        agent = BenchAgent(load, target)
        await agent.begin()
        for turn in range(sizes.turns):
            seconds.append(await agent.ask_streamed(sizes.more_words if turn else sizes.first_words))
        await agent.end()
    return median(seconds)


#: The parts by the names that a run tells, in its order.
PARTS = {
    "passthrough": passthrough,
    "chat": chat,
    "dialects": dialects,
    "history": history,
    "ray": ray_pool,
    "stream": stream,
    "live_streams": live_streams,
    "workers": workers,
    "overload": overload,
    "dashboard": dashboard_page,
}
