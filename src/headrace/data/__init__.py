"""What flows: Step, Trajectory, Group, Sequence, and the frame that carries them. Imports nothing else of Headrace."""

from headrace.data.errors import FrameError, HeadraceError, InvalidInput
from headrace.data.sequence import Sequence, Span
from headrace.data.step import Step
from headrace.data.trajectory import Group, Trajectory
from headrace.data.tree import TokenTree

__all__ = [
    "FrameError",
    "Group",
    "HeadraceError",
    "InvalidInput",
    "Sequence",
    "Span",
    "Step",
    "TokenTree",
    "Trajectory",
]
