"""A run on a cluster of several nodes: one of them goes under load, with all that was on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.run.runs import RUN_S, ledger, metrics, processes_of, result, started, until_step

from headrace.run.new import Kind

# Not beside other tests of Ray: while it lasts, `auto` is its cluster.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

STEPS, GROUPS, ROLLOUTS = 10, 8, 8
#: After which step the node goes.
LOST_AFTER = 3
#: How often a node is begun that does not begin in time.
TRIES = 5
#: What the nodes have that actors are placed on; the first node, where the run's processes are, has none of it.
SPARE = {"spare": 8.0}


class Nodes:
    """A cluster of several raylets on this machine, one of which starts with it and has no room for actors."""

    def __init__(self) -> None:
        from ray._private.authentication import authentication_token_setup as tokens
        from ray.cluster_utils import Cluster

        tokens.enable_token_auth_by_default()  # as ray.init and ray start do; the nodes inherit it
        tokens.ensure_token_if_auth_enabled()
        self._cluster = Cluster()
        self.add(num_cpus=0, include_dashboard=False)
        self.address: str = self._cluster.address

    def add(self, **options: Any) -> Any:
        """A node that has joined. Ray gives one half a minute to begin, which a busy machine may not have for it."""
        for _ in range(TRIES):
            try:
                return self._cluster.add_node(**{"num_cpus": 2, **options})
            except Exception as error:
                failed = error
        raise failed

    def lose(self, node: Any) -> None:
        """kill -9 for a node, and with it for all that runs on it."""
        self._cluster.remove_node(node, allow_graceful=False)

    def end(self) -> None:
        self._cluster.shutdown()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    from ray._private.utils import read_ray_address, write_ray_address

    before = read_ray_address()
    found = Nodes()
    yield found
    found.end()
    if before is not None:
        write_ray_address(before)  # `auto` is again the cluster of the other tests


@pytest.mark.timeout(2 * RUN_S)
def test_a_run_completes_when_the_node_of_pool_reward_and_rollout_workers_goes(
    project: Callable[[Kind], Path], nodes: Nodes
) -> None:
    folder = project("agent")
    place = {"num_cpus": 0.1, "resources": {"spare": 1}}
    where = {"ray": nodes.address, "host": "127.0.0.1", "shared_folder": True}
    where |= {"pool": place, "reward": place, "rollout": {"workers": 2, **place}}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "where": where}))
    first = nodes.add(resources=SPARE)
    changes = ("--set", f"train.steps={STEPS}", "--set", "data.val=null", "--set", "train.checkpoint.every=3")
    with started(folder, *changes) as process:
        until_step(process, folder, LOST_AFTER)
        nodes.add(resources=SPARE)
        nodes.lose(first)
        told = result(process)
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # A rollout is one call of one token: what was learned from is what was consumed, to the token: nothing twice.
    assert sum(row["tokens"] for row in rows) == ledger(folder, "train")["consumed"] == STEPS * GROUPS * ROLLOUTS
    assert told["restarts"] == 0, "Ray began the actors again, and no process of the run noticed more than a pause"
    # Some of these were complete: the gateway, who is asked, knows it, and they count once.
    assert "worker_lost" in (folder / "RUN" / "logs" / "rollouter.log").read_text(), "rollouts were under way there"
    assert processes_of(folder) == []
