"""Runs on a cluster of several nodes: of every kind of agent, tried, evaluated, killed; and one of the nodes goes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
import yaml
from tests.run.runs import RUN_S, headrace, ledger, metrics, processes_of, result, started, until_step

from headrace.run.new import Kind

# Not beside other tests of Ray: while it lasts, `auto` is its cluster.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3 * RUN_S)]

GROUPS, ROLLOUTS = 8, 8
#: Rollouts of one evaluation of a project: four rows, four times each.
HELD_OUT = 16
#: How often a node is begun that does not begin in time.
TRIES = 5
#: Prints the actors of a cluster that live. In a process of its own: this one may have joined another cluster.
LIVING = """
import sys
from ray._private.state import actors
from headrace.net.ray_cluster import join_cluster
join_cluster(sys.argv[1], "default")
print([actor["ActorClassName"] for actor in actors().values() if actor["State"] != "DEAD"])
"""


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

    def actors(self) -> list[str]:
        """The actors that live."""
        told = subprocess.run([sys.executable, "-c", LIVING, self.address], capture_output=True, text=True, check=True)
        return list(json.loads(told.stdout.splitlines()[-1].replace("'", '"')))

    def end(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """The cluster of this file, with one node that has what is called `spare`."""
    from ray._private.utils import read_ray_address, write_ray_address

    before = read_ray_address()
    found = Nodes()
    found.add(resources={"spare": 8.0})
    yield found
    found.end()
    if before is not None:
        write_ray_address(before)  # `auto` is again the cluster of the other tests


def place_on(nodes: Nodes, folder: Path, resource: str) -> None:
    """Puts all actors of a project's runs on nodes that have a resource."""
    place = {"num_cpus": 0.1, "resources": {resource: 1}}
    where = {"ray": nodes.address, "host": "127.0.0.1", "shared_folder": True}
    where |= {"pool": place, "reward": place, "rollout": {"workers": 2, **place}}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "where": where}))


def assert_all_was_learned_from_once(folder: Path, steps: int) -> None:
    """A rollout of a project is one call of one token: what was learned from is what was consumed, to the token."""
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    learned = steps * GROUPS * ROLLOUTS
    assert [row["trajectories"] for row in rows] == [GROUPS * ROLLOUTS] * steps
    assert sum(row["tokens"] for row in rows) == ledger(folder, "train")["consumed"] == learned


@pytest.mark.parametrize("kind", get_args(Kind))
def test_each_kind_of_agent_runs_on_a_cluster(project: Callable[[Kind], Path], nodes: Nodes, kind: Kind) -> None:
    folder, steps = project(kind), 3
    place_on(nodes, folder, "spare")
    with started(folder, "--set", f"train.steps={steps}") as process:
        told = result(process)
    assert (told["steps"], told["restarts"]) == (steps, 0)
    assert_all_was_learned_from_once(folder, steps)
    if kind != "environment":  # it has items of its own
        results = [json.loads(path.read_text()) for path in (folder / "RUN" / "evaluations").iterdir()]
        assert sorted(one["step"] for one in results) == [0, steps]
        assert all((one["rollouts"], one["failed"]) == (HELD_OUT, 0) for one in results)
        assert ledger(folder, "val")["consumed"] == 2 * HELD_OUT
    assert processes_of(folder) == []
    assert nodes.actors() == []


def test_a_dry_run_and_an_evaluation_are_played_on_a_cluster(project: Callable[[Kind], Path], nodes: Nodes) -> None:
    folder = project("agent")
    place_on(nodes, folder, "spare")
    with headrace("run", str(folder / "run.yaml"), "--dry-run") as process:
        out, err = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, (out, err)
    assert "pool start --attach" in out
    assert "  reward   " in out.splitlines()[-2]
    with headrace("run", str(folder / "run.yaml"), "--evaluate") as process:
        told = result(process)
    assert (told["rollouts"], told["failed"]) == (HELD_OUT, 0)
    assert told["mean"] is not None
    assert nodes.actors() == []


def test_a_run_whose_runner_is_killed_goes_on(project: Callable[[Kind], Path], nodes: Nodes) -> None:
    folder, steps = project("agent"), 8
    place_on(nodes, folder, "spare")
    changes = ("--set", f"train.steps={steps}", "--set", "data.val=null", "--set", "train.checkpoint.every=3")
    with started(folder, *changes) as process:
        until_step(process, folder, 4)
        assert len(orphans := processes_of(folder)) >= 6
        process.kill()
        process.communicate()
    with started(folder, *changes, "--resume") as process:  # at once: the actors of the run before may still live
        told = result(process)
    assert psutil.wait_procs(orphans, timeout=300)[1] == []
    assert told["steps"] == steps
    assert_all_was_learned_from_once(folder, steps)
    assert processes_of(folder) == []
    assert nodes.actors() == []


def test_a_run_completes_when_the_node_of_pool_reward_and_rollout_workers_goes(
    project: Callable[[Kind], Path], nodes: Nodes
) -> None:
    folder, steps = project("agent"), 10
    place_on(nodes, folder, "mortal")
    first = nodes.add(resources={"mortal": 8.0})
    changes = ("--set", f"train.steps={steps}", "--set", "data.val=null", "--set", "train.checkpoint.every=3")
    with started(folder, *changes) as process:
        until_step(process, folder, 3)
        nodes.add(resources={"mortal": 8.0})
        nodes.lose(first)
        told = result(process)
    assert_all_was_learned_from_once(folder, steps)
    assert told["restarts"] == 0, "Ray began the actors again, and no process of the run noticed more than a pause"
    # Some of these were complete: the gateway, who is asked, knows it, and they count once.
    assert "worker_lost" in (folder / "RUN" / "logs" / "rollouter.log").read_text(), "rollouts were under way there"
    assert processes_of(folder) == []


def test_the_trainer_of_a_run_is_workers_that_share_the_model(project: Callable[[Kind], Path], nodes: Nodes) -> None:
    folder, steps = project("agent"), 3
    place_on(nodes, folder, "spare")
    workers = json.dumps({"workers": 2, "num_cpus": 0.1})
    changes = ("--set", f"train.steps={steps}", "--set", "data.val=null", "--set", f"where.train={workers}")
    with started(folder, *changes) as process:
        told = result(process)
    assert (told["steps"], told["restarts"]) == (steps, 0)
    assert_all_was_learned_from_once(folder, steps)
    (*_, last) = sorted((folder / "RUN" / "trainer" / "checkpoints").iterdir())
    assert len(list((last / "shards").glob("*.distcp"))) == 2
    assert processes_of(folder) == []
