"""Server-sent events out of bytes, however they were cut on the way: any chunking gives the same events.

Only `data` matters here; comments (keep-alives) and other fields are passed over.
"""

from __future__ import annotations


class Events:
    """Feed it bytes; it gives the data of the events that have become whole."""

    __slots__ = ("_data", "_held")

    def __init__(self) -> None:
        #: Pieces of a line whose end has not come.
        self._held: list[bytes] = []
        #: Lines of an event whose end has not come.
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        last = chunk.rfind(b"\n") + 1
        if not last:
            self._held.append(chunk)
            return []
        whole = chunk[:last]
        if self._held:
            self._held.append(whole)
            whole = b"".join(self._held)
            self._held = []
        if last < len(chunk):
            self._held.append(chunk[last:])
        found, data = [], self._data
        for line in whole[:-1].split(b"\n"):
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and data:
                found.append(data[0] if len(data) == 1 else b"\n".join(data))
                data.clear()
        return found
