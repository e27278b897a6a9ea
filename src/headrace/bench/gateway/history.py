"""`history_flat` and `bridge_vs_full`: a call at the end of a long history against one at a short one's, and against
rendering the whole history again.

The long conversation reached 32,000 tokens in turns of 640, each of them a call; the calls that are measured go on from
there with a few words a turn. The short one has 1,000 tokens. The full rendering is the gateway with `--history
template`, which writes every prompt anew from its messages, on a conversation of the same length. What is measured is
the CPU of the gateway's process, one call at a time.
"""

from __future__ import annotations

from pathlib import Path

from headrace.bench.gateway.child import Child
from headrace.bench.gateway.load import Agent, Load, Target
from headrace.bench.gateway.servers import ready, start_gateway, start_stub
from headrace.bench.gateway.sizes import Sizes
from headrace.bench.report import Part
from headrace.bench.timing import median


def measure(sizes: Sizes, folder: Path) -> Part:
    with (
        start_stub(folder, sizes) as stub,
        start_gateway(stub, folder, "--history", "bridge") as bridge,
        start_gateway(stub, folder, "--history", "template") as template,
        Load(sizes) as load,
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
    return Part(
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
    """A conversation that is long already, and goes on."""

    def __init__(self, load: Load, gateway: Child) -> None:
        self.agent = Agent(load, Target(gateway.address))
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
        """Seconds of CPU for a call."""
        sizes = self._load.sizes
        before = self._gateway.cpu_s()
        for _ in range(sizes.history_calls):
            await self.agent.ask(sizes.more_words)
        return (self._gateway.cpu_s() - before) / sizes.history_calls


async def _short(load: Load, gateway: Child) -> float:
    """Seconds of CPU for a call about 1,000 tokens into a conversation, the first of which is not counted."""
    sizes = load.sizes
    seconds = 0.0
    for _ in range(sizes.history_calls):
        agent = Agent(load, Target(gateway.address))
        await agent.begin()
        await agent.ask(sizes.short_words)
        before = gateway.cpu_s()
        for _ in range(sizes.history_calls):
            await agent.ask(sizes.more_words)
        seconds += gateway.cpu_s() - before
        await agent.end()
    return seconds / sizes.history_calls**2
