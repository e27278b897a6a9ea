"""Agents that run: tasks of a dataset, flows that play them through a gateway, and the rollouter that keeps them going.

Flows reach the gateway and the pool behind it over HTTP alone.
"""
