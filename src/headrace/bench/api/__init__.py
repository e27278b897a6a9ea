"""`headrace bench api`: the Trajectory API and the original's, side by side.

Servers are processes of their own, started as a user starts them, ours with a journal; the load comes from this one.
Where the original is not installed, ours is measured alone: what is a ratio to it is then left out, and said to be.
"""
