"""`headrace api`: what is refused before anything starts."""

from __future__ import annotations

import pytest
from tests.cli.command import Command


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--pool", "http://127.0.0.1:1", "--journal", "x"), "--journal is for a pool in this process"),
        (("--pool", "somewhere"), "is no pool's address"),
        (("--max-body-mb", "0"), "--max-body-mb"),
        (("--host", "256.0.0.1"), "cannot listen on 256.0.0.1"),
    ],
)
def test_what_could_not_work_is_said(headrace: Command, args: tuple[str, ...], said: str) -> None:
    done = headrace("api", "--port", "0", *args)
    assert done.code != 0
    assert said in done.err
    assert "Traceback" not in done.err
