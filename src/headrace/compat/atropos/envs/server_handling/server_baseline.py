"""`atroposlib.envs.server_handling.server_baseline`."""

from __future__ import annotations

from typing import get_args

from headrace.compat.atropos.lenient import Lenient
from headrace.envs.server import APIServer, ReasoningConfig, config
from headrace.envs.types import Effort

__all__ = ["VALID_REASONING_EFFORTS", "APIServer", "APIServerConfig", "ReasoningConfig", "ServerBaseline"]

VALID_REASONING_EFFORTS = set(get_args(Effort))


class ServerBaseline(Lenient, config.ServerBaseline):
    """Headrace's, but it ignores unknown fields, with a warning."""


class APIServerConfig(ServerBaseline, config.APIServerConfig):
    """Headrace's, but it ignores unknown fields, with a warning."""
