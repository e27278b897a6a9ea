"""The names of LoRA adapters on rollout servers: a trainer gives them, and a gateway recognises them.

Every publish has a name of its own, with its policy version, so that nothing cached under one is used for another.
"""

from __future__ import annotations

import re
import uuid

ADAPTER_NAME = re.compile(r"headrace-adapter-([0-9]{1,10})-[0-9a-f]{32}")


def new_adapter_name(version: int) -> str:
    """A name that no adapter had before."""
    return f"headrace-adapter-{version}-{uuid.uuid4().hex}"


def adapter_version(name: str) -> int | None:
    """The policy version of an adapter of this name; None where it is none of ours."""
    found = ADAPTER_NAME.fullmatch(name)
    return None if found is None else int(found[1])
