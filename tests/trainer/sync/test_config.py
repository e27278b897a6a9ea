"""A sync's configuration that could not work is refused when it is given."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.trainer.sync import SyncConfig


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "neither gateway nor servers"),
        ({"gateway": "127.0.0.1:8100"}, "is no address"),
        ({"gateway": "http://host:port"}, "[Pp]ort"),
        ({"servers": ["http://"]}, "is no address"),
        ({"servers": ["http://host"], "model": "small"}, "no gateway is given"),
        ({"gateway": "http://host", "mode": "wait"}, "abort-resume"),
        ({"gateway": "http://host", "tolerance": 0}, "greater than 0"),
        ({"gateway": "http://host", "timeout_s": 0}, "greater than 0"),
        ({"gateway": "http://host", "folders": "x"}, "Extra inputs"),
    ],
    ids=str,
)
def test_what_could_not_work_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SyncConfig(**given)


def test_addresses_are_those_that_a_gateway_would_name() -> None:
    assert SyncConfig(servers=["http://a:1/v1/", "http://b:2/"]).servers == ["http://a:1", "http://b:2"]
