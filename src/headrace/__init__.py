"""Headrace: the middleware of agentic reinforcement learning."""

from typing import TYPE_CHECKING, Any

from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.data import Group, HeadraceError, Sequence, Step, Trajectory
    from headrace.pool.config import ChannelConfig
    from headrace.pool.connect import connect
    from headrace.pool.embedded import DataPool

__all__ = [
    "ChannelConfig",
    "DataPool",
    "Group",
    "HeadraceError",
    "Sequence",
    "Step",
    "Trajectory",
    "__version__",
    "connect",
]

_HOME = {
    "ChannelConfig": "headrace.pool.config",
    "DataPool": "headrace.pool.embedded",
    "connect": "headrace.pool.connect",
}


def __getattr__(name: str) -> Any:
    """Names are loaded when they are used: `import headrace` itself costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME.get(name, "headrace.data")), name)
