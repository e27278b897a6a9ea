"""A channel's tombstones, by the age of what they stand for, in pages that a snapshot can hold on to.

A channel remembers 200,000 of them and more. `freeze` answers at once with all that are there, whatever comes and goes
afterwards: the pages are shared, and one that is written to is copied first.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence

from headrace.pool.groups import Tombstone

#: Tombstones of one page: a copy of one takes as long as a call, and there are few enough of them to be listed.
PAGE_TOMBSTONES = 1024


class Tombstones(Mapping[str, Tombstone]):
    """By trajectory uid, oldest first; one that is replaced keeps its place."""

    __slots__ = ("_newest", "_page_of", "_pages", "_shared")

    def __init__(self) -> None:
        self._page_of: dict[str, int] = {}
        self._pages: dict[int, dict[str, Tombstone]] = {}  # by rising number; none is empty
        self._newest = 0
        self._shared: set[int] = set()  # pages that somebody holds on to

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, uid: object) -> bool:
        return uid in self._page_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._page_of)

    def __getitem__(self, uid: str) -> Tombstone:
        return self._pages[self._page_of[uid]][uid]

    def keys(self) -> KeysView[str]:
        return self._page_of.keys()

    def items(self) -> ItemsView[str, Tombstone]:
        return ItemsView(self)

    def __setitem__(self, uid: str, tombstone: Tombstone) -> None:
        number = self._page_of.get(uid)
        if number is None:
            if len(self._pages.get(self._newest, ())) >= PAGE_TOMBSTONES:
                self._newest += 1
            number = self._page_of[uid] = self._newest
        self._own(number)[uid] = tombstone

    def pop_oldest(self) -> tuple[str, Tombstone]:
        """Takes the oldest out. Raises `StopIteration` where there is none."""
        number = next(iter(self._pages))
        page = self._own(number)
        uid = next(iter(page))
        del self._page_of[uid]
        tombstone = page.pop(uid)
        if not page:
            del self._pages[number]
            self._shared.discard(number)
        return uid, tombstone

    def freeze(self) -> Sequence[Mapping[str, Tombstone]]:
        """All that are there now, page by page; they stay so for whoever holds them."""
        self._shared = set(self._pages)
        return list(self._pages.values())

    def _own(self, number: int) -> dict[str, Tombstone]:
        """A page to write to."""
        if number in self._shared:
            self._shared.discard(number)
            self._pages[number] = dict(self._pages[number])
        return self._pages.setdefault(number, {})
