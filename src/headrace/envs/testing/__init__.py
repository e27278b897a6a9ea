"""What an author's tests inherit from: `class TestMine(EnvConformance): env_cls = MyEnv`, and pytest does the rest."""

from headrace.envs.testing.conformance import EnvConformance
from headrace.envs.testing.model import Model, ModelServer
from headrace.envs.testing.tokenizer import byte_tokenizer
from headrace.envs.testing.trainer import Trainer

__all__ = ["EnvConformance", "Model", "ModelServer", "Trainer", "byte_tokenizer"]
