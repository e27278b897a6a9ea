"""`headrace demo`: agents that know a `base_url` learn a game before your eyes.

    tasks       the games
    model       the policy, before it has learned anything
    agent       one player: messages in, messages out, a reward at the end
    supply      which games are played next, and when
    agents      the process of all players; `http` its client, `counters` what it has done, `games` what it played
    recipe      the hyper-parameters, and the trainer's configuration
    stack       engine, gateway, trainer and agents, started together
    cluster     the pool on a local Ray cluster
    run         all of it together
    progress    how far a run is; `view` shows it, `chart` draws it, `report` tells of it in the end
    recorded    the tokens of a first and a last game, as the pool has them

Everything but the games and the agents is composed of Headrace's own commands.
"""
