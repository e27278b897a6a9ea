"""What an author's tests inherit from: `class TestMine(EnvConformance): env_cls = MyEnv`, and pytest does the rest.

Only `EnvConformance` needs pytest, and imports it when it is asked for: `probe` uses the other parts without.
"""

from typing import TYPE_CHECKING, Any

from headrace.envs.testing.fakes import FakeModel, FakeModelServer, FakeTrainer, byte_tokenizer

if TYPE_CHECKING:
    from headrace.envs.testing.conformance import EnvConformance

__all__ = ["EnvConformance", "FakeModel", "FakeModelServer", "FakeTrainer", "byte_tokenizer"]


def __getattr__(name: str) -> Any:
    if name != "EnvConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headrace.envs.testing.conformance import EnvConformance

    return EnvConformance
