"""A deterministic simulation of the pool: its real code on simulated time, network and disk, one thread at a time, by
one seed; with the storm's log and the storm's checker.

    scheduler    the clock, threads of which one runs at a time, locks, and the event loop
    hooks        the pool's code on that clock and those threads
    disk         what a power failure leaves of what was not synced; full, slow and failing disks
    machine      the pool's process: started, killed, ended, and started again
    network      calls that are lost, late, doubled and broken off
    streams      connections within the machine, which carry frames in pieces
    clients      how everyone calls the pool, and the log
    agents       trajectories: steps, rewards, failures
    consumers    trainers with leases and without
    faults       what happens, and when
    simulation   one seed, played and checked
    seeds        many of them
"""

from headrace.storm.simulation.seeds import Summary, play_seeds
from headrace.storm.simulation.simulation import OPERATIONS, Played, play

__all__ = ["OPERATIONS", "Played", "Summary", "play", "play_seeds"]
