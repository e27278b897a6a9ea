"""Scored groups, as environments post and trainers take them: JSON that is read once, kept as deflate, and spliced.

A group is validated when it is read and written down as one `Piece`; whatever answers are made of it later are made of
those bytes. Nothing here does I/O.
"""

from headrace.data.scored.piece import Piece, ScoredGroup, decode, deflate, gzip_piece, inflate, join, join_gzip, store
from headrace.data.scored.read import KEYS, MakePiece, read_group, read_groups
from headrace.data.scored.steps import from_sequences, to_steps

__all__ = [
    "KEYS",
    "Piece",
    "MakePiece",
    "ScoredGroup",
    "deflate",
    "store",
    "read_group",
    "read_groups",
    "join",
    "join_gzip",
    "gzip_piece",
    "decode",
    "inflate",
    "to_steps",
    "from_sequences",
]
