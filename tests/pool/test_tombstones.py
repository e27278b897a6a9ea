"""Tombstones behave as an ordered dict, and what was frozen of them stays as it was."""

from __future__ import annotations

from collections import OrderedDict

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.pool import tombstones
from headrace.pool.groups import Tombstone
from headrace.pool.tombstones import Tombstones

changes = st.lists(st.sampled_from(["put", "put", "put", "replace", "pop", "freeze"]), max_size=60)


@given(changes=changes, numbers=st.lists(st.integers(0, 9), min_size=60, max_size=60))
def test_what_was_frozen_stays_whatever_comes_and_goes(changes: list[str], numbers: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tombstones, "PAGE_TOMBSTONES", 3)
        there, model = Tombstones(), OrderedDict[str, Tombstone]()
        frozen = []
        for made, (change, number) in enumerate(zip(changes, numbers, strict=False)):
            if change == "pop":
                if model:
                    assert there.pop_oldest() == model.popitem(last=False)
            elif change == "freeze":
                frozen.append((there.freeze(), list(model.items())))
            else:
                uid = f"t{number}" if change == "replace" else f"t{made + 10}"
                there[uid] = model[uid] = Tombstone("consumed", "p", bytes([made]))
            assert list(there.items()) == list(model.items())
            assert len(there) == len(model)
            assert all(uid in there and there[uid] is model[uid] for uid in model)
        for pages, then in frozen:
            assert [item for page in pages for item in page.items()] == then


def test_none_are_left_where_none_are() -> None:
    there = Tombstones()
    assert not there
    assert there.get("t") is None
    assert there.keys().isdisjoint(["t"])
    with pytest.raises(StopIteration):
        there.pop_oldest()
