"""Converters of batches for trainers: packed tensors, padded ones, or verl's `DataProto`."""

from headrace.trainer.backends.tensors import Packed, PackedBackend, Padded, PaddedBackend, TrainingBackend
from headrace.trainer.backends.verl import VerlBackend, keep_given_advantages

__all__ = [
    "TrainingBackend",
    "Packed",
    "PackedBackend",
    "Padded",
    "PaddedBackend",
    "VerlBackend",
    "keep_given_advantages",
]
