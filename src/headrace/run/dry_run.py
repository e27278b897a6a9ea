"""`headrace run --dry-run`: what would be started, and one rollout from its row to its reward. Nothing is learned."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from headrace.data.errors import HeadraceError, shown
from headrace.flows.config import DataConfig
from headrace.run.config import RunConfig
from headrace.run.evaluate import played, played_group
from headrace.run.plan import plan
from headrace.run.services import RunPorts
from headrace.run.stack import StartLog

#: Ports that stand in a plan which is only shown.
SHOWN_SERVER_PORT, SHOWN_GATEWAY_PORT = 8001, 8100
#: Characters of a message that are shown.
TEXT_CHARS = 300


def dry_run(file: Path, config: RunConfig, console: Console | None = None) -> None:
    """Prints the plan of a file that was checked, plays one rollout of its first row, or one group of its environment,
    and prints what it came to. Raises `HeadraceError` where that fails."""
    log = StartLog(console or Console())
    base = file.absolute().parent
    for line in told_plan(config, base):
        log.say(line)
    for line in told_rollout(config, config.data, base, log) if config.data else told_group(config, base, log):
        log.say(line)
    log.say(f"All is well. Learn with: headrace run {file}")


def told_rollout(config: RunConfig, data: DataConfig, base: Path, log: StartLog) -> list[str]:
    """One rollout of the first row, from its row to its reward. Raises `HeadraceError` where it has none."""
    log.say("One rollout, from its row to its reward:")
    only = data.model_copy(update={"val": data.train})
    result = played(config.model_copy(update={"data": only}), base, log, rows=1, rollouts=1)
    (rollout,) = result.played
    if rollout.reward is None:
        raise HeadraceError(f"the rollout counts as failed: {rollout.failure}")
    rows = only.train_rows(base)
    assert rows is not None
    parts = ", ".join(f"{name} {value:g}" for name, value in rollout.parts.items() if isinstance(value, int | float))
    return [
        f"  row      {rows[0]}",
        f"  calls    {rollout.calls}",
        f"  answer   {rollout.text!r}",
        f"  reward   {rollout.reward:g}" + (f" ({parts})" if parts else ""),
    ]


def told_group(config: RunConfig, base: Path, log: StartLog) -> list[str]:
    """One group of the environment, which has its own items and scores. Raises `HeadraceError` where it makes none."""
    log.say("One group of the environment, from its item to its rewards:")
    group = played_group(config, base, log)
    texts = [shown(message.get("content"), TEXT_CHARS) for message in group.messages]
    return [
        *(f"  asked    {text}" for text in texts[:-1]),
        *(f"  answer   {text}" for text in texts[-1:]),
        f"  tokens   {group.sampled} sampled",
        f"  reward   {group.scores[0]:g}",
        f"  rewards  {', '.join(f'{score:g}' for score in group.scores)} of all {len(group.scores)} rollouts",
    ]


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
