"""`atroposlib.envs.server_handling.managed_server`."""

from headrace.envs.server import DummyManagedServer, ManagedServer, ManagedServerAdapter, SequenceNode

__all__ = ["DummyManagedServer", "ManagedServer", "ManagedServerAdapter", "SequenceNode"]
