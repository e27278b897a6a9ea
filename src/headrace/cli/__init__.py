"""The `headrace` command. A file for each command, named after it: its flags as a model, and what it does.

What a command needs is imported when it is asked for: see `headrace.commands`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headrace.commands import OPTIONS, exit_code, group
from headrace.commands import run as run_command  # `run` is the module of that command
from headrace.version import __version__

__all__ = ["main", "run_api"]

headrace_app = group(
    "headrace",
    "Headrace: the bridge between agents that run and the trainer that learns from them.",
    {
        "gateway": ("headrace.cli.gateway:gateway_app", "forward agents' calls and record them"),
        "serve": ("headrace.cli.gateway:serve_app", "gateway and pool in one process"),
        "api": ("headrace.cli.api:api_app", "Atropos' Trajectory API: environments post, trainers take"),
        "dashboard": (
            "headrace.cli.dashboard:dashboard_command",
            "a page on what a pool holds: figures, trajectories, groups",
        ),
        "why": ("headrace.cli.why:why_command", "what became of a call, a trajectory or a batch, from the journal"),
        "replay": (
            "headrace.cli.replay:replay_command",
            "serve recorded trajectories as a model that repeats them",
        ),
        "pool": ("headrace.cli.pool:pool_app", "start, read and look after a pool"),
        "env": ("headrace.cli.env:env_app", "run an environment: serve, process, evaluate, probe"),
        "bench": ("headrace.cli.bench:bench_app", "measure, against named limits and peers"),
        "engine": ("headrace.cli.engine:engine_app", "serve a small model as vLLM would"),
        "check-gateway": (
            "headrace.cli.check_gateway:check_gateway_app",
            "can what a server samples be trained on?",
        ),
        "check-model": (
            "headrace.cli.check_model:check_model_app",
            "are a model's turns continued exactly, its calls and reasoning read?",
        ),
        "rollout": ("headrace.cli.rollout:rollout_app", "play a dataset with an agent, through a gateway"),
        "reward": ("headrace.cli.reward:reward_app", "score what agents did: start, stop, try"),
        "train": ("headrace.cli.train:train_app", "train a model from a pool"),
        "simulate": ("headrace.cli.simulate:simulate_app", "what a run would do with other agents, servers or bounds"),
        "storm": ("headrace.cli.storm:storm_app", "kill, freeze and cut off a whole system; is anything lost?"),
        "run": ("headrace.cli.run:run_app", "from a dataset, an agent and a reward to a trained model"),
        "new": ("headrace.cli.new:new_app", "write a small project that runs as it is, to begin from"),
        "demo": ("headrace.cli.demo:demo_app", "watch an agent learn a game from scratch"),
        "doctor": ("headrace.cli.doctor:doctor_app", "look at this machine: what works here, and what is missing"),
    },
    version=f"headrace {__version__}",
    version_flags=("--version",),
)
headrace_app.register_install_completion_command(
    help="let the shell complete commands and flags: bash, zsh or fish", group=OPTIONS, help_formatter="plain"
)


def main(args: Sequence[str] | None = None) -> None:
    """Runs a command line and exits with its code."""
    given = list(sys.argv[1:] if args is None else args)
    if given[:1] == ["env"]:
        from headrace.cli.env import run as run_env

        run_env(given[1:])  # what follows is the environment's command line
    sys.exit(exit_code("headrace", lambda: run_command(headrace_app, given)))


def run_api() -> None:
    """`run-api`, the command's name in Atropos: `headrace api`."""
    main(["api", *sys.argv[1:]])
