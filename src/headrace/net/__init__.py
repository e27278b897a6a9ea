"""What every server and client of Headrace stands on: sockets and requests, long-lived tasks, pages and metrics.

Nothing here imports the pool, the gateway or an environment.
"""
