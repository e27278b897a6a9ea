"""`headrace run`: one file with a dataset, an agent and a reward, to a trained model.

Every part of a run is a process that knows the others by address only; what is here plans them, starts them, watches
them, shows what happens and ends them.
"""
