"""What a run would do with more agents, servers or staleness: a discrete-event model on the pool's own core.

    scenario = read_scenario(Path("scenario.yaml"))          # or recorded(Path("runs/demo-1")).scenario
    outcome = simulate(scenario)
    print(outcome.trainer_waiting, outcome.survivors)

Rollouts, servers, gateways and the trainer are modelled; what is handed out, dropped, or too stale is decided by a real
`DataPool`, and what may begin by the rollouter's own schedule, both on simulated time. Nothing here waits.
"""

from headrace.simulate.outcome import Outcome, Survivors
from headrace.simulate.recorded import Rates, RecordedRun, recorded
from headrace.simulate.scenario import Scenario, Spread, read_scenario
from headrace.simulate.simulation import simulate

__all__ = [
    "Scenario",
    "Spread",
    "read_scenario",
    "RecordedRun",
    "Rates",
    "recorded",
    "simulate",
    "Outcome",
    "Survivors",
]
