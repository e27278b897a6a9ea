"""The system under the storm: rollout servers, a gateway with workers, a pool of any kind, a reward loop, consumers and
a Trajectory API, each a process, with a link between any two.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson

from headrace.pool import KEY_VARIABLE
from headrace.storm.agents import Tenant
from headrace.storm.log import EventLog
from headrace.storm.model_server import build_tokenizer
from headrace.storm.network import Link
from headrace.storm.plan import PoolKind, Sizes
from headrace.storm.services import Service

ADMIN_KEY = "storm-admin"
TENANTS = (Tenant("acme", "storm-acme"), Tenant("beta", "storm-beta"))
#: Rewards of the first come from agents, those of the second from the reward loop.
CHANNELS = ("train", "scored")
#: The reward of the loop: what the trajectory was begun with.
REWARD_FUNCTION = "def score(sample):\n    return sample.metadata['worth']\n"


class System:
    """What runs, by name, and where it is reached."""

    def __init__(self, folder: Path, pool: PoolKind) -> None:
        self.journal, self.outbox = folder / "journal", folder / "outbox"
        self.links: dict[str, Link] = {}
        self.services: dict[str, Service] = {}
        self.tenants: Sequence[Tenant] = TENANTS
        self.channels: Sequence[str] = CHANNELS
        self.admin = {"authorization": f"Bearer {ADMIN_KEY}"}
        self.pool_key = ADMIN_KEY
        self.journal_owner = "gateway" if pool == "embedded" else "pool"
        self._picks = 0

    @property
    def gateway(self) -> Service:
        return self.services["gateway"]

    @property
    def agents_address(self) -> str:
        return self.links["agents"].address

    @property
    def pool_address(self) -> str:
        """The pool without a link between: for looking in."""
        return self.services[self.journal_owner].address

    @property
    def targets(self) -> list[str]:
        """What may be killed or frozen: every process, and `worker`, any of the gateway's."""
        return [*self.services, "worker"]

    @property
    def links_at_risk(self) -> list[str]:
        return list(self.links)

    def find(self, target: str, seed: int) -> tuple[Service, int | None]:
        """The service of a name; for `worker` the gateway, and one of its workers where it has any."""
        if target != "worker":
            return self.services[target], None
        self._picks += 1
        workers = self.gateway.children
        return self.gateway, random.Random(f"{seed}-{self._picks}").choice(workers) if workers else None

    def heal(self) -> None:
        """Ends every network fault."""
        for link in self.links.values():
            link.heal()


@asynccontextmanager
async def build_system(folder: Path, log: EventLog, sizes: Sizes, pool: PoolKind, seed: int) -> AsyncIterator[System]:
    """Starts a whole system in a folder, and ends it: the last process first."""
    system = System(folder, pool)
    tokenizer = folder / "tokenizer"
    await asyncio.to_thread(build_tokenizer, tokenizer)
    _write_files(folder)
    logs = folder / "logs"
    logs.mkdir()
    async with AsyncExitStack() as stack:

        async def link(name: str) -> Link:
            made = Link(name)
            await made.start()
            stack.push_async_callback(made.close)
            system.links[name] = made
            return made

        def service(
            name: str, words: str, *arguments: object, links: Sequence[Link] = (), listens: bool = False
        ) -> None:
            made = Service(
                name,
                arguments,
                words,
                logs=logs,
                log=log,
                env={KEY_VARIABLE: ADMIN_KEY, "HEADRACE_ADMIN_KEY": ADMIN_KEY, "OMP_NUM_THREADS": "1"},
                links=links,
                listens=listens,
                patience_s=sizes.patience_s,
            )
            system.services[name] = made
            stack.push_async_callback(made.end)

        to_servers = [await link(f"to-server-{n}") for n in range(sizes.servers)]
        for n, to_server in enumerate(to_servers):
            arguments = ("headrace.storm.model_server", tokenizer, folder, f"s{n}", seed)
            service(f"server-{n}", "model server", *arguments, links=[to_server])
        agents, rewards = await link("agents"), await link("rewards")
        consumers = {channel: await link(f"consumer-{channel}") for channel in CHANNELS}
        of_pool = [rewards, *consumers.values()]
        options = [word for channel in CHANNELS for word in ("--channel", f"{channel}:require_reward=true")]
        gateway: list[object] = ["headrace.gateway", "--vllm-addresses", ",".join(one.address for one in to_servers)]
        gateway += ["--tokenizer-path", tokenizer, "--renderer", "template", "--response-length", 128]
        gateway += [
            "--tenants",
            folder / "tenants.json",
            "--host",
            "127.0.0.1",
            "--port",
            0,
            "--workers",
            sizes.workers,
        ]
        if pool == "embedded":
            gateway += ["--journal", system.journal, *options]
        else:
            to_pool = await link("to-pool")
            of_pool.append(to_pool)
            command = ("headrace", "pool", "serve", "--port", 0, "--journal", system.journal, *options)
            service("pool", "pool", *command, links=of_pool)
            gateway += ["--pool-address", to_pool.address, "--journal", system.outbox]
        command = ("headrace", "api", "--host", "127.0.0.1", "--port", 0, "--journal", folder / "api-journal")
        service("api", "api", *command, links=[await link("environments")])
        links = [agents, *of_pool] if pool == "embedded" else [agents]
        service("gateway", "gateway", *gateway, links=links, listens=True)
        for channel, to_pool in consumers.items():
            command = ("headrace.storm.consumer", to_pool.address, folder, channel)
            service(f"consumer-{channel}", "consumer", *command, links=())
        command = ("headrace", "reward", "start", "--reward", folder / "reward.json", "--pool", rewards.address)
        service("reward", "reward loop", *command, "--channel", CHANNELS[1], "--tokenizer-path", tokenizer)
        first = [made for name, made in system.services.items() if name.startswith(("server", "pool", "api"))]
        await asyncio.gather(*(made.start() for made in first))
        await system.gateway.start()
        await asyncio.gather(*(made.start() for made in system.services.values() if made.pid is None))
        yield system


def _write_files(folder: Path) -> None:
    tenants = {one.name: {"keys": [one.key], "channels": list(CHANNELS)} for one in TENANTS}
    (folder / "tenants.json").write_bytes(orjson.dumps({"tenants": tenants}))
    (folder / "storm_reward.py").write_text(REWARD_FUNCTION)
    (folder / "reward.json").write_bytes(orjson.dumps({"functions": ["storm_reward.py:score"]}))
