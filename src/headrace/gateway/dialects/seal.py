"""Reasoning as something opaque that agents keep and send back, where they are not shown it or might lose it."""

from __future__ import annotations

import base64

#: What begins reasoning that was sealed here.
SEAL = "headrace1."


def seal(reasoning: str) -> str:
    return SEAL + base64.urlsafe_b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def unseal(sealed: str) -> str | None:
    """The reasoning; None for what was sealed elsewhere, or is broken."""
    if not sealed.startswith(SEAL):
        return None
    try:
        return base64.b64decode(sealed[len(SEAL) :], b"-_", validate=True).decode("utf-8", "surrogatepass")
    except ValueError:
        return None
