"""`headrace demo`: agents that know a `base_url` learn a game before your eyes.

    tasks       the games
    model       the policy, before it has learned anything
    agents      the process of all players: an agent, its connection, and which games are played next
    games       the files that the agents write: games that were played, and counters
    recipe      the hyper-parameters, and the trainer's configuration
    stack       engine, gateway, trainer and agents, started together; the pool on a local Ray cluster
    run         all of it together
    progress    how far a run is, and the tokens of a first and a last game; `view` shows it, `report` tells of it

Everything but the games and the agents is composed of Headrace's own commands.
"""
