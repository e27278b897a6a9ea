"""Keys as they are configured: by a flag, a file or an environment variable.

Servers strip what callers present, and a header carries printable ASCII alone: a key that is not so would open nothing,
to anybody. No message holds a key.
"""

from __future__ import annotations

import os

from headrace.data.errors import InvalidInput


class UnusableKey(InvalidInput):
    """A key that no request can carry. The message tells where it was given, and not the key."""

    code = "unusable_key"


def usable_key(given: str | None, *, name: str = "") -> str | None:
    """A key without the whitespace around it, such as the end of a file's line; what is empty stays so. Raises
    `UnusableKey`, which begins with `name`, for one that is whitespace alone or not printable ASCII."""
    if not given:
        return given
    key = given.strip()
    where = f"{name}: " if name else ""
    if not key:
        raise UnusableKey(f"{where}the key is whitespace alone; leave it out where there is none")
    if not (key.isascii() and key.isprintable()):
        raise UnusableKey(f"{where}a key is printable ASCII on one line, and this one has other characters")
    return key


def configured_key(given: str | None, *variables: str) -> str | None:
    """The key that was given, else that of the first of these environment variables that holds one; None where none
    does. Raises `UnusableKey`, which names the variable."""
    if given:
        return usable_key(given, name="the key")
    found = ((name, os.environ.get(name)) for name in variables)
    return next((usable_key(value, name=name) for name, value in found if value), None)
