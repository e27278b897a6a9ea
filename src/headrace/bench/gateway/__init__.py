"""`headrace bench gateway`: what the gateway costs an agent's call, against a bare proxy and other ways to do the same.

Everything is measured from outside, over HTTP on loopback: the rollout server (a stub that answers at once), the proxy
and the gateway are processes of their own, started as a user would start them, and this process is the agents. An agent
opens a trajectory, calls with a history that grows by what it was answered and something new, and completes it. Nothing
of the product is switched off: steps are checked and handed to the pool before an answer ends.

Only calls to the model are counted, though a gateway also answers an agent's init and complete in the same
time; a proxy has nothing of that kind to do.

`quick` takes fewer rounds. The sizes that give the keys their meaning (callers, turns, tokens) are the same.
"""
