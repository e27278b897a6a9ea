"""`headrace simulate`: see `headrace.simulate`."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
import yaml
from pydantic import Field, field_validator

from headrace.cli.common import print_rows, remark
from headrace.commands import CommandModel, Positional, Usage, command
from headrace.files import check_place

if TYPE_CHECKING:
    from headrace.simulate import Outcome, Rates, RecordedRun

#: Runs of one command: every combination of what is varied.
MOST_RUNS = 100
#: The figures of a run that the table shows.
SHOWN = ("rollouts_s", "sampled_tokens_s", "steps_h", "trainer_waiting", "staleness_mean")
COLUMNS = ("run", *SHOWN, "dropped", "longest_tenth_trained", "length_ratio", "busy", "limit")


class SimulateCommand(CommandModel):
    """Say what a run would do with other agents, servers, batches or bounds, without running it: a discrete-event model
    on the pool's own core. TARGET is the folder of a run that was recorded, or a file that describes one; without it
    the defaults are played.

    With a recorded run, its own rates stand beside those of its simulation first.
    """

    target: Positional[Path | None] = Field(
        None, description="a run's folder, or a scenario as YAML, JSON or TOML (docs/simulate.md has every field)"
    )
    vary: list[str] = Field(
        [], alias="set", description="FIELD=VALUE or FIELD=VALUE,VALUE,...: such as agents=100,1000; may be repeated"
    )
    hours: float | None = Field(None, gt=0, description="simulated time (default: the scenario's)")
    channel: str = Field("train", description="the channel of a recorded run")
    json_path: Path | None = Field(None, alias="json", description="write all figures to this file as JSON")

    @field_validator("vary")
    @classmethod
    def _assigned(cls, given: list[str]) -> list[str]:
        for each in given:
            name, equals, values = each.partition("=")
            if not (name and equals and values):
                raise ValueError(f"{each!r} should be FIELD=VALUE, such as servers.count=8,16")
        return given

    def execute(self) -> None:
        from headrace.simulate import Scenario, read_scenario, recorded, simulate

        if self.json_path is not None:
            check_place(self.json_path)
        run: RecordedRun | None = None
        if self.target is None:
            scenario = Scenario()
        elif self.target.is_dir():
            run = recorded(self.target, self.channel)
            scenario = run.scenario
        else:
            scenario = read_scenario(self.target)
        if self.hours is not None:
            scenario = scenario.changed("hours", self.hours)
        rows: list[dict[str, Any]] = []
        found: list[dict[str, Any]] = []

        def take(changes: dict[str, Any], outcome: Outcome) -> None:
            rows.append({"run": _words(changes), **_rates(outcome), **_fate(outcome)})
            figures: dict[str, Any] = msgspec.to_builtins(outcome)
            found.append({"run": "simulated", "changed": changes, **figures, "limit": outcome.limit})

        if run is not None:
            rows.append({"run": "recorded", **_rates(run.rates)})
            found.append({"run": "recorded", **msgspec.to_builtins(run.rates)})
        if run is not None or not self.vary:
            take({}, simulate(scenario))
        for changes in self._variants():
            changed = scenario
            for name, value in changes.items():
                changed = changed.changed(name, value)
            remark(f"simulating {_words(changes)}")
            take(changes, simulate(changed))
        print_rows(rows, COLUMNS)
        if self.json_path is not None:
            self.json_path.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))

    def _variants(self) -> list[dict[str, Any]]:
        """Every combination of what is varied."""
        names: list[str] = []
        values: list[list[Any]] = []
        for each in self.vary:
            name, _, given = each.partition("=")
            if name in names:
                raise Usage(f"--set {name} is given twice; put its values into one, separated by commas")
            names.append(name)
            values.append([_value(name, value) for value in given.split(",")])
        found = [dict(zip(names, chosen, strict=True)) for chosen in product(*values)] if names else []
        if len(found) > MOST_RUNS:
            raise Usage(f"{len(found)} combinations of --set; at most {MOST_RUNS} are simulated at once")
        return found


def _value(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # the latter for a date that is none
        raise Usage(
            f"--set {name}: {text!r} is no value; several are separated by commas alone, as in agents=100,200"
        ) from None


def _words(changes: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items()) or "simulated"


def _rates(run: Outcome | Rates) -> dict[str, float]:
    return {name: getattr(run, name) for name in SHOWN}


def _fate(outcome: Outcome) -> dict[str, Any]:
    return {
        "dropped": sum(outcome.dropped.values()),
        "longest_tenth_trained": outcome.survivors.longest,
        "length_ratio": outcome.survivors.length_ratio,
        "busy": {part: round(share, 3) for part, share in outcome.busy.items()},
        "limit": outcome.limit,
    }


simulate_app = command("simulate", SimulateCommand)
