"""The errors of Headrace: each names what was wrong, the value, and what would be right.

Every class has a stable `code`, so that an error raised in a pool behind Ray or HTTP is raised again, as the same
class, in the caller's process.
"""

from __future__ import annotations

from typing import Any, ClassVar


class HeadraceError(Exception):
    """Root of all errors raised on purpose."""

    code: ClassVar[str] = "error"
    registry: ClassVar[dict[str, type[HeadraceError]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in vars(cls):  # else it is another's, such as of what Ray makes of an actor's error
            HeadraceError.registry[cls.code] = cls

    @classmethod
    def from_wire(cls, code: Any, message: str) -> HeadraceError:
        """The error of the class that has this code; a `HeadraceError` where none has, or it is no code at all."""
        return cls.registry.get(code if isinstance(code, str) else "", HeadraceError)(message)


class InvalidInput(HeadraceError, ValueError):
    """A value that may not enter: the message names the field and what would be right."""

    code = "invalid_input"


class FrameError(HeadraceError, ValueError):
    """Bytes that are not a frame, or a damaged one, or one of another format version."""

    code = "bad_frame"


class ForeignFrame(FrameError):
    """An undamaged frame of another release: of another format version, or with content that this one does not know."""

    code = "foreign_frame"


def shown(value: Any, limit: int = 80) -> str:
    """A value as it may stand in an error message: short, on one line."""
    try:
        text = repr(value).replace("\n", " ")
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deep to be shown"
    return text if len(text) <= limit else text[: limit - 3] + "..."
