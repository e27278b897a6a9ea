"""`headrace bench pool`: what the pool costs, against what it could cost at best and against plain ways to do the same.

A step here has 1,024 prompt ids, 256 response ids and 256 log-probs, as numpy arrays; 64 of them go in a submit. Each
is a trajectory, and a group, of its own, unless a part says otherwise. Nothing of the product is switched off: CRCs,
checks, the garbage collector and, wherever there is a journal, fsync are on. Steps are built before the clock starts:
a producer builds them whatever it does with them.

`quick` takes fewer rounds. The sizes that give the keys their meaning (queues of 10,000 and 100,000 groups, 200
trajectories of 50 turns, a journal of 100,000 steps) are the same, but for the million steps of `pool_million_gib`: it
queues 100,000, and takes what they cost ten times.
"""
