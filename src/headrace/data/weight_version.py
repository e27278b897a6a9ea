"""What a rollout server says of its weights in `/weight_info`: a number, which their trainer gives once it has verified
them, or a word."""

from __future__ import annotations

#: The word for weights that a trainer has loaded and not verified, or that failed it. No number, so that no gateway
#: takes it for a version.
UNVERIFIED = "unverified"
