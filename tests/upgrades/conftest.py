from tests.envs.conftest import api

__all__ = ["api"]
