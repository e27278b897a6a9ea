"""Where models are computed: what cannot be is refused, by its name and with what can."""

from __future__ import annotations

import pytest
import torch

from headrace.data.errors import InvalidInput
from headrace.engine.device import device_of
from headrace.engine.engine import Engine, EngineSettings


def test_by_itself_it_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, found in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert device_of("auto") == found
    assert device_of("cpu") == "cpu"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nonsense", r"device is 'nonsense'; it is auto, cpu, cuda, or one GPU, as in cuda:1"),
        ("", r"device is ''; it is auto, cpu"),
        ("cuda:99", r"device is 'cuda:99', which torch cannot use here \(.+\); set one of auto, cpu"),
    ],
)
def test_what_is_no_device_here_is_refused_with_what_is(name: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        device_of(name)
    with pytest.raises(InvalidInput, match=said):
        Engine(EngineSettings(device=name))
