"""The Trajectory API: Atropos' wire on the pool. Environments post scored groups, trainers take exact batches."""

from headrace.api.app import Api, create_app
from headrace.api.settings import Settings

__all__ = ["Api", "Settings", "create_app"]
