"""An agent at work: its example in a folder of its own, a gateway, and a model that says what a test tells it to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.agents.npm import programs
from tests.gateway.kit import Running, tree
from tests.gateway.rollout import Rollout, log_probs_of

EXAMPLES = Path(__file__).parents[2] / "examples"
#: How long an agent may take, on a machine that is busy.
PATIENCE_S = 600


class Place:
    """What one agent works with. `work` is the folder that it is started in, `home` all that it knows of its user."""

    def __init__(self, gateway: Running, rollout: Rollout, folder: Path) -> None:
        self.gateway, self.rollout = gateway, rollout
        self.work, self.home = folder / "work", folder / "home"
        self.work.mkdir()
        self.home.mkdir()

    def run(self, example: str) -> list[str]:
        """The lines that an example printed; it ends well."""
        path = os.pathsep.join([str(programs()), os.environ["PATH"]])
        command = ["sh", str(EXAMPLES / example)]
        if example.endswith(".mjs"):  # node looks for packages beside the file
            (self.work / "node_modules").symlink_to(programs().parent)
            command = ["node", str(shutil.copy(EXAMPLES / example, self.work))]
        done = subprocess.run(
            [*command, self.gateway.address],
            cwd=self.work,
            env={"PATH": path, "HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout.splitlines()

    def holds(self, said: list[str]) -> None:
        """The recorded steps are what the server consumed and sampled, each a continuation of the one before."""
        (row,) = self.gateway.pool.list_trajectories()["items"]
        steps = self.gateway.steps(row["trajectory_uid"])
        sampled = [[*self.rollout.vocabulary.encode(text), self.rollout.end] for text in said]
        assert [step.prompt_ids.tolist() for step in steps] == [order["prompt"] for order in self.rollout.orders]
        assert [step.response_ids.tolist() for step in steps] == sampled
        assert [step.rollout_log_probs.tolist() for step in steps] == [log_probs_of(ids) for ids in sampled]
        assert tree(steps) == [None, *range(len(said) - 1)]
        assert steps[-1].reward == 1.0


def called(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def thought(words: str, then: str) -> str:
    return f"<think>\n{words}\n</think>\n\n{then}"
