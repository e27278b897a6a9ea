"""The Trajectory API: Atropos' wire on the pool. Environments post scored groups, trainers take exact batches."""

from headrace.api.app import TrajectoryApi, create_app
from headrace.api.settings import TrajectoryApiSettings

__all__ = ["TrajectoryApi", "TrajectoryApiSettings", "create_app"]
