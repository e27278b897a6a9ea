"""The system under the storm: rollout servers, a gateway with workers, a pool of any kind, a reward loop, consumers and
a Trajectory API, each a process, with a link between any two.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson

from headrace.pool import KEY_VARIABLE
from headrace.storm.agents import StormTenant
from headrace.storm.learner import build_model
from headrace.storm.log import EventLog
from headrace.storm.model_server import build_tokenizer
from headrace.storm.network import Link
from headrace.storm.plan import OF_GATEWAY, PoolKind, Sizes
from headrace.storm.services import StormProcess

ADMIN_KEY = "storm-admin"
TENANTS = (StormTenant("acme", "storm-acme"), StormTenant("beta", "storm-beta"))
#: Rewards of the second come from the reward loop, those of the others from agents.
CHANNELS = ("train", "scored")
#: What the trainer of a real model learns from, where there is one.
LEARNER_CHANNEL = "learned"
#: The processes of a Ray cluster: its head, and the node that the pool is on.
CLUSTER, NODE = "cluster", "node"
#: How Ray calls the process of a pool that is an actor.
ACTOR_PROCESS = "ray::PoolActor"
#: Who takes from the pool, each through a link of that name: consumers, the reward loop, and a trainer.
TAKERS = (*(f"consumer-{channel}" for channel in CHANNELS), "rewards", "to-learner")
#: The reward of the loop: what the trajectory was begun with.
REWARD_FUNCTION = "def score(sample):\n    return sample.metadata['worth']\n"


class System:
    """What runs, by name, and where it is reached."""

    def __init__(self, folder: Path, pool: PoolKind, sizes: Sizes) -> None:
        self.journal, self.outbox = folder / "journal", folder / "outbox"
        self.links: dict[str, Link] = {}
        self.services: dict[str, StormProcess] = {}
        self.tenants: Sequence[StormTenant] = TENANTS
        self.channels: Sequence[str] = (*CHANNELS, LEARNER_CHANNEL) if sizes.learner else CHANNELS
        self.admin = {"authorization": f"Bearer {ADMIN_KEY}"}
        self.pool_key = ADMIN_KEY
        self._kind, self._workers = pool, sizes.workers
        #: Whose files the journal's are, and where that is an actor, the node that it is on.
        self.journal_owner = "gateway" if pool == "embedded" else "pool"
        self.actor_address: str | None = None
        self._picks = 0

    @property
    def gateway(self) -> StormProcess:
        return self.services["gateway"]

    @property
    def agents_address(self) -> str:
        return self.links["agents"].address

    @property
    def pool_address(self) -> str:
        """The pool without a link between: for looking in."""
        return self.actor_address or self.services[self.journal_owner].address

    @property
    def targets(self) -> list[str]:
        """What may be killed or frozen: every process but a cluster's head, `worker`, any of the gateway's,
        `fork_server`, which it forks them from, and `pool`, which may be an actor."""
        below = OF_GATEWAY if self._workers > 1 else ("worker",)
        return sorted({*self.services, *below, self.journal_owner} - {CLUSTER})

    @property
    def links_at_risk(self) -> list[str]:
        return list(self.links)

    def process_of(self, target: str) -> StormProcess:
        """The process of a name; the gateway for those below it, for a pool that is an actor its node."""
        if target == "pool" and self._kind == "ray":
            return self.services[NODE]
        return self.services["gateway" if target in OF_GATEWAY else target]

    def find(self, target: str, seed: int) -> tuple[StormProcess, int | None]:
        """The process of a name; for `worker` and `fork_server` with that one of the gateway's where it has any, for a
        pool that is an actor with the actor."""
        process = self.process_of(target)
        if target in self.services:
            return process, None
        if target == "pool":
            return process, process.descendant(ACTOR_PROCESS)
        self._picks += 1
        workers = process.leaves
        found = process.parents or workers if target == "fork_server" else workers  # one is started when it is needed
        return process, random.Random(f"{seed}-{self._picks}").choice(found) if found else None

    def is_replaced(self, target: str) -> bool:
        """Whether a target that is not there now is started by another process, not by the storm."""
        return (target == "pool" and self._kind == "ray") or (target in OF_GATEWAY and self._workers > 1)

    def brings_pool(self, name: str) -> bool:
        """Whether the pool is back where this process is."""
        return name in (self.journal_owner, NODE)

    def heal(self) -> None:
        """Ends every network fault."""
        for link in self.links.values():
            link.heal()


@asynccontextmanager
async def build_system(
    folder: Path,
    log: EventLog,
    sizes: Sizes,
    pool: PoolKind,
    seed: int,
    pythons: Sequence[str],
    rules: Mapping[str, object],
) -> AsyncIterator[System]:
    """Starts a whole system in a folder, and ends it: the last process first. `rules` are those of each channel of the
    pool, beside that what it hands out has a reward. `pythons`: see `StormProcess`."""
    system = System(folder, pool, sizes)
    _write_files(folder, system.channels)
    await asyncio.to_thread(build_tokenizer, folder / "tokenizer")
    async with AsyncExitStack() as stack:
        builder = _Builder(system, folder, log, sizes, pythons, stack)
        await builder.start_servers(seed)
        pool_flags, pool_address = await builder.start_pool(pool, {"require_reward": True, **rules})
        await builder.start_gateway(pool_flags)
        await builder.start_consumers(pool_address)
        yield system


class _Builder:
    """Starts the parts of a system, each where it is reached through a link of its own; what it starts ends with its
    stack."""

    def __init__(
        self,
        system: System,
        folder: Path,
        log: EventLog,
        sizes: Sizes,
        pythons: Sequence[str],
        stack: AsyncExitStack,
    ) -> None:
        self._system, self._folder, self._log, self._sizes, self._stack = system, folder, log, sizes, stack
        self._pythons = pythons
        self._tokenizer = folder / "tokenizer"
        self._servers: list[str] = []
        #: Links that lead to the pool: the gateway's own process, or the pool's.
        self._to_pool: list[Link] = []

    async def start_servers(self, seed: int) -> None:
        """The rollout servers, and the Trajectory API, which has a pool of its own."""
        starting = []
        for n in range(self._sizes.servers):
            link = await self._link(f"to-server-{n}")
            self._servers.append(link.address)
            words = ("headrace.storm.model_server", self._tokenizer, self._folder, f"s{n}", seed)
            starting.append(self._process(f"server-{n}", "model server", *words, links=[link]).start())
        api = ("headrace", "api", "--host", "127.0.0.1", "--port", 0, "--journal", self._folder / "api-journal")
        starting.append(self._process("api", "api", *api, links=[await self._link("environments")]).start())
        await asyncio.gather(*starting)

    async def start_pool(self, kind: PoolKind, rules: Mapping[str, object]) -> tuple[list[object], str | None]:
        """The pool, where it has a process of its own: the gateway's flags, and the address that consumers connect to
        where no link can stand before it."""
        journal, channels = self._system.journal, self._system.channels
        said = ",".join(f"{name}={orjson.dumps(value).decode()}" for name, value in rules.items())
        flags: list[object] = [word for channel in channels for word in ("--channel", f"{channel}:{said}")]
        if kind != "ray":
            takers = TAKERS if self._sizes.learner else TAKERS[:-1]
            self._to_pool = [await self._link(name) for name in takers]
        if kind == "embedded":
            return ["--journal", journal, *flags], None
        outbox = self._system.outbox
        if kind == "http":
            link = await self._link("to-pool")
            words = ("headrace", "pool", "serve", "--port", 0, "--journal", journal, *flags)
            await self._process("pool", "pool", *words, links=[link, *self._to_pool]).start()
            self._to_pool = []
            return ["--pool-address", link.address, "--journal", outbox], None
        from headrace.storm.ray_cluster import NAME, NAMESPACE, place_pool  # with Ray, which the other kinds do without

        module = "headrace.storm.ray_cluster"
        head = self._process(CLUSTER, CLUSTER, module, "head")
        await head.start()
        await self._process(NODE, NODE, module, "node", head.address, is_machine=True).start()
        address = await asyncio.to_thread(place_pool, head.address, journal, {name: dict(rules) for name in channels})
        self._system.actor_address = address
        flags = ["--data-pool-name", NAME, "--ray-namespace", NAMESPACE, "--ray-address", head.address]
        return [*flags, "--prompt-length", 4096, "--journal", outbox], address

    async def start_gateway(self, pool_flags: list[object]) -> None:
        links = [await self._link("agents"), *self._to_pool]
        words: list[object] = ["headrace.gateway", "--vllm-addresses", ",".join(self._servers)]
        words += ["--tokenizer-path", self._tokenizer, "--renderer", "template", "--response-length", 128]
        words += ["--tenants", self._folder / "tenants.json", "--workers", self._sizes.workers]
        words += ["--host", "127.0.0.1", "--port", 0, *pool_flags]
        await self._process("gateway", "gateway", *words, links=links, listens=True).start()

    async def start_consumers(self, pool_address: str | None) -> None:
        """Those who take from the pool: a consumer for each channel, the reward loop, and a trainer of a real model."""
        starting = []
        for channel in CHANNELS:
            where = pool_address or self._system.links[f"consumer-{channel}"].address
            words = ("headrace.storm.consumer", where, self._folder, channel)
            starting.append(self._process(f"consumer-{channel}", "consumer", *words).start())
        where = pool_address or self._system.links["rewards"].address
        loop = ("headrace", "reward", "start", "--reward", self._folder / "reward.json", "--pool", where)
        flags = ("--channel", CHANNELS[1], "--tokenizer-path", self._tokenizer)
        starting.append(self._process("reward", "reward loop", *loop, *flags).start())
        if self._sizes.learner:
            await asyncio.to_thread(build_model, self._folder, self._tokenizer)
            where = pool_address or self._system.links["to-learner"].address
            words = ("headrace.storm.learner", where, self._folder, LEARNER_CHANNEL)
            starting.append(self._process("learner", "learner", *words).start())
        await asyncio.gather(*starting)

    async def _link(self, name: str) -> Link:
        made = Link(name)
        await made.start()
        self._stack.push_async_callback(made.close)
        self._system.links[name] = made
        return made

    def _process(
        self,
        name: str,
        words: str,
        *arguments: object,
        links: Sequence[Link] = (),
        listens: bool = False,
        is_machine: bool = False,
    ) -> StormProcess:
        made = StormProcess(
            name,
            arguments,
            words,
            logs=self._folder / "logs",
            log=self._log,
            env={KEY_VARIABLE: ADMIN_KEY, "HEADRACE_ADMIN_KEY": ADMIN_KEY, "OMP_NUM_THREADS": "1"},
            links=links,
            listens=listens,
            patience_s=self._sizes.patience_s,
            pythons=self._pythons,
            is_machine=is_machine,
        )
        self._system.services[name] = made
        self._stack.push_async_callback(made.end)
        return made


def _write_files(folder: Path, channels: Sequence[str]) -> None:
    (folder / "logs").mkdir()
    tenants = {one.name: {"keys": [one.key], "channels": list(channels)} for one in TENANTS}
    (folder / "tenants.json").write_bytes(orjson.dumps({"tenants": tenants}))
    (folder / "storm_reward.py").write_text(REWARD_FUNCTION)
    (folder / "reward.json").write_bytes(orjson.dumps({"functions": ["storm_reward.py:score"]}))
