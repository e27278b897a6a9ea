"""Running the real command, here or in a process of its own, and a journal for it to read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace import DataPool, Step
from headrace.cli import main

COMMAND = [sys.executable, "-m", "headrace"]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, str]]:
        """The lines of a table that was not printed on a terminal, by the names in its first."""
        head, *lines = [line.split("\t") for line in self.out.splitlines()]
        return [dict(zip(head, line, strict=True)) for line in lines if len(line) == len(head)]


class Command:
    """The command in this process: as quick as a call. What it prints and its exit code are those of the real one."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *args: str | Path) -> Done:
        self._capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        said = self._capture.readouterr()
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0, said.out, said.err)


def spawn(*args: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> Done:
    """The command in a process of its own."""
    done = subprocess.run(
        [*COMMAND, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )
    return Done(done.returncode, done.stdout, done.stderr)


class Served:
    """A `headrace pool serve` in a process of its own, on a free port."""

    def __init__(self, *args: str | Path, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "pool", "serve", "--port", "0", *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"pool ready on (http://\S+:\d+)\n", line)
        if found is None:
            raise AssertionError(f"no ready line but {line!r}: {self.end().err}")
        self.address = found[1]

    @property
    def port(self) -> str:
        return self.address.rpartition(":")[2]

    def end(self, how: signal.Signals = signal.SIGTERM) -> Done:
        if self.process.poll() is None:
            self.process.send_signal(how)
        out, err = self.process.communicate(timeout=240)
        return Done(self.process.returncode, out, err)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.end(signal.SIGKILL)


def steps(group: str, rollout: int, turns: int = 2) -> list[Step]:
    """A conversation whose every prompt extends the last; the last turn is rewarded with the rollout's number."""
    found, prompt = [], [1, 2, 3]
    for turn in range(turns):
        response = [10 + rollout, 20 + turn]
        last = turn == turns - 1
        found.append(
            Step(
                prompt_ids=prompt,
                response_ids=response,
                rollout_log_probs=[-0.5, -0.25],
                trajectory_uid=f"{group}-{rollout}",
                prompt_uid=group,
                step_index=turn,
                policy_version=7,
                is_last=last,
                reward=float(rollout) if last else None,
                finish_reason="stop",
            )
        )
        prompt = [*prompt, *response, 4]
    return found


def fill(pool: DataPool) -> None:
    """Three groups of two (a, b, c) whose second turn is curated in one, and a fourth (d) that waits for its second.

    Trajectory a-0 also has a branch: step 2 continues step 0, not step 1.
    """
    pool.configure("train", n_rollouts=2)
    branch = Step(
        prompt_ids=[1, 2, 3, 10, 20, 9, 9],
        response_ids=[5],
        rollout_log_probs=[-1.0],
        trajectory_uid="a-0",
        prompt_uid="a",
        step_index=2,
        policy_version=7,
        is_last=True,
        reward=0.5,
    )
    first = steps("a", 0)
    pool.submit_steps([first[0], branch, *steps("a", 1)])
    pool.submit_step(Step(**{name: getattr(first[1], name) for name in Step.__struct_fields__ if name != "is_last"}))
    for group in "bc":
        pool.submit_steps([*steps(group, 0), *steps(group, 1)])
    pool.submit_steps(steps("d", 0))
    pool.submit_step(Step(prompt_ids=[1], response_ids=[2], trajectory_uid="other", is_last=True), channel="eval")
    pool.curate("b-1", 1, trainable=False, tags=["odd"], note="cut short")
