"""`headrace run --dry-run`: what would be started, and one rollout from its row to its reward. Nothing is learned."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from headrace.data.errors import HeadraceError
from headrace.run.config import RunConfig
from headrace.run.evaluate import played
from headrace.run.plan import plan
from headrace.run.services import RunPorts
from headrace.run.stack import StartLog

#: Ports that stand in a plan which is only shown.
SHOWN_SERVER_PORT, SHOWN_GATEWAY_PORT = 8001, 8100


def dry_run(file: Path, config: RunConfig, console: Console | None = None) -> None:
    """Prints the plan of a file that was checked, plays one rollout of its first row and prints what it came to. Raises
    `HeadraceError` where that rollout fails."""
    log = StartLog(console or Console())
    base = file.absolute().parent
    for line in told_plan(config, base):
        log.say(line)
    if config.data is None:
        log.say("The environment plays by itself; try it alone with: headrace env FILE process --env.total_steps 1")
        return
    log.say("One rollout, from its row to its reward:")
    only = config.data.model_copy(update={"val": config.data.train})
    result = played(config.model_copy(update={"data": only}), base, log, rows=1, rollouts=1)
    (rollout,) = result.played
    if rollout.reward is None:
        raise HeadraceError(f"the rollout failed: {rollout.failure}")
    rows = only.train_rows(base)
    assert rows is not None
    log.say(f"  row      {rows[0]}")
    log.say(f"  calls    {rollout.calls}")
    log.say(f"  answer   {rollout.text!r}")
    parts = ", ".join(f"{name} {value:g}" for name, value in rollout.parts.items() if isinstance(value, int | float))
    log.say(f"  reward   {rollout.reward:g}" + (f" ({parts})" if parts else ""))
    log.say(f"All is well. Learn with: headrace run {file}")


def told_plan(config: RunConfig, base: Path) -> list[str]:
    """What a run would start, a line each, and what it would do; ports are made up."""
    count = config.servers.started
    ports = RunPorts(tuple(SHOWN_SERVER_PORT + n for n in range(count)), SHOWN_GATEWAY_PORT)
    planned = plan(config, base, Path("RUN"), ports)
    found = ["Would start, with free ports in place of these:"]
    found += [f"  {service.name:<12} {service.line()}" for service in planned.services]
    given = config.train
    found.append(
        f"Then {given.steps} steps of {given.batch_size} groups"
        + (f" of {config.n_rollouts} rollouts" if config.n_rollouts is not None else "")
    )
    return found
