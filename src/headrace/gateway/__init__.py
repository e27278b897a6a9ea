"""The Gateway: forwards agents' LLM calls to rollout servers and records every call as one step.

app = create_app(pool, Settings(vllm_addresses="http://127.0.0.1:8001", tokenizer_path="/path/to/model"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from headrace.gateway.app import create_app

__all__ = ["create_app", "GatewaySettings", "Settings"]

#: The name that users of `create_app` write.
Settings = GatewaySettings


def __getattr__(name: str) -> Any:
    """The application is loaded when it is asked for: commands that only need `Settings` start at once."""
    if name == "create_app":
        from headrace.gateway.app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
