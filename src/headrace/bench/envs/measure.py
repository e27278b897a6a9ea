"""`headrace bench envs`: an environment's machinery, held against the same rollouts with nothing around them."""

from __future__ import annotations

from dataclasses import asdict

from headrace.bench.envs import load as loads
from headrace.bench.envs.sides import gathered, processed, served
from headrace.bench.gateway.child import Child
from headrace.bench.report import Bar, Part, Report
from headrace.bench.timing import in_turn, median

BARS = {
    "overhead_vs_gather": Bar(
        "rollouts of 20 ms, 32 at a time, through serve to the last acknowledgement, over a bare semaphore", at_most=1.3
    ),
    "process_parallel": Bar("the same through process, to the last line of its file", at_most=1.3),
}


def measure(quick: bool = False) -> Report:
    return measure_load(loads.QUICK if quick else loads.FULL)


def measure_load(load: loads.Load) -> Report:
    report = Report("envs", BARS, details={"load": asdict(load)})
    with Child("headrace.bench.envs.stub") as api:
        address = api.address
        serve, bare = map(median, in_turn(lambda: served(load, address), lambda: gathered(load), load.rounds))
    report.add(
        Part(
            {"overhead_vs_gather": serve / bare},
            {"serve_rollouts_s": load.rollouts / serve, "gather_rollouts_s": load.rollouts / bare},
        )
    )
    process, bare = map(median, in_turn(lambda: processed(load), lambda: gathered(load), load.rounds))
    report.add(Part({"process_parallel": process / bare}, {"process_rollouts_s": load.rollouts / process}))
    return report
