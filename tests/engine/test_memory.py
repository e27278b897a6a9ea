"""What the engine says that it holds is what it holds."""

from __future__ import annotations

import ctypes
import mmap
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.engine.kit import Client, serving

from headrace.engine.cache import BLOCK_TOKENS, INDEX_BYTES, PrefixCache

#: Linux' number for "no huge pages in this process", which would take 2 MB where 4 kB are written.
PR_SET_THP_DISABLE = 41
libc = ctypes.CDLL(None, use_errno=True)


def _range(tensor: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_size_t, int]:
    """The pages of a tensor: where they begin, how long they are, and how many."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    return ctypes.c_void_p(start), ctypes.c_size_t(length), -(-length // mmap.PAGESIZE)


def resident(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that the system has given memory to."""
    start, length, pages = _range(tensor)
    found = (ctypes.c_ubyte * pages)()
    assert libc.mincore(start, length, found) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in found)


def prefix_cache(shape: tuple[int, int, int, int], size: int) -> PrefixCache:
    return PrefixCache(shape, size=size, dtype=torch.float32, device=torch.device("cpu"))


def keep(cache: PrefixCache, tokens: list[int], shape: tuple[int, int, int, int]) -> None:
    layers, two, heads, width = shape
    blocks = list(cache.place(tokens))
    cache.put(blocks, torch.ones(len(blocks), layers, two, heads, BLOCK_TOKENS, width))


@pytest.fixture
def small_pages() -> Iterator[None]:
    """On some processors torch asks for huge pages by itself."""
    assert libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    yield
    assert libc.prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are there")
@pytest.mark.usefixtures("small_pages")
def test_the_prefix_cache_counts_the_memory_that_its_blocks_take() -> None:
    shape = (2, 2, 4, 24)
    # More than an allocator keeps for itself (32 MB with glibc): what is let go of goes back to the system.
    cache = prefix_cache(shape, 64_000_000)
    before = cache.held_bytes
    assert resident(cache._blocks) <= mmap.PAGESIZE
    for first in range(0, 1200, 400):
        keep(cache, list(range(first, first + 400)), shape)
        index = len(cache) * INDEX_BYTES
        assert cache.held_bytes - before - index <= resident(cache._blocks) <= cache.held_bytes + 2 * mmap.PAGESIZE
    assert len(cache) == 300
    cache.clear()
    assert cache.held_bytes == before
    assert resident(cache._blocks) <= mmap.PAGESIZE


def test_the_prefix_cache_counts_its_index_and_stays_within_its_size() -> None:
    shape, size = (1, 2, 1, 4), 1_000_000  # blocks so small that finding them costs more than holding them
    cache = prefix_cache(shape, size)
    empty, largest = cache.held_bytes, 0
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for first in range(0, 20_000, 500):
            cache.place(list(range(first, first + 500)))
            largest = max(largest, cache.held_bytes)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    blocks = len(cache) * 128
    assert cache.held_bytes - empty == pytest.approx(taken + blocks, rel=0.05)
    assert 0.75 * size < largest <= size


@pytest.fixture
def small(folder: Path) -> Iterator[Client]:
    with serving(model=str(folder), served_model_name="tiny", prefix_cache_mb=0.2) as client:
        yield client


def test_the_engine_says_what_it_holds(small: Client) -> None:
    begun = small.get("/memory")
    assert begun["prefix_cache_limit"] == 200_000
    assert begun["prefix_cache_tokens"] == 0
    assert begun["weights"] == small.engine.size * 4
    held = []
    for first in range(4):
        small.complete([first + 5] * 60, max_tokens=1)
        found = small.get("/memory")
        assert found["prefix_cache"] <= found["prefix_cache_limit"]
        held.append(found["prefix_cache_tokens"])
    assert held[0] == 60
    assert held == sorted(held)
    assert held[2] == held[3] > 100, "full"
    small.post("/reset_prefix_cache")
    assert small.get("/memory")["prefix_cache_tokens"] == 0
    assert small.get("/memory")["prefix_cache"] == begun["prefix_cache"]
