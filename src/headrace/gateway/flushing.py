"""How often a stream is written: the first token at once, then what has come within a time that its channel names."""

from __future__ import annotations

from headrace.data.errors import InvalidInput

#: Milliseconds after which nobody takes a stream for a live one any more.
MAX_FLUSH_MS = 10_000.0


class FlushTimes:
    """What `--stream-flush-ms` says: milliseconds for all channels, then those of some, as in `50,rollouts:250`."""

    def __init__(self, spec: str) -> None:
        """Raises `InvalidInput`, quoting the part, where it is no such thing."""
        default, *others = [part.strip() for part in spec.split(",")]
        self._default_s = _seconds(default, spec)
        self._by_channel: dict[str, float] = {}
        for part in others:
            channel, _, value = part.rpartition(":")
            if not channel:
                raise InvalidInput(f"{spec!r}: {part!r} should be CHANNEL:MS, as in 50,rollouts:250")
            if channel in self._by_channel:
                raise InvalidInput(f"{spec!r} names channel {channel!r} twice")
            self._by_channel[channel] = _seconds(value, spec)

    def seconds(self, channel: str) -> float:
        """Seconds in which a channel's streams gather what is written at once; 0: every token goes by itself."""
        return self._by_channel.get(channel, self._default_s)


def _seconds(value: str, spec: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if not 0 <= found <= MAX_FLUSH_MS:
        raise InvalidInput(
            f"{spec!r}: {value!r} must be milliseconds from 0 to {MAX_FLUSH_MS:g}, as in 50,rollouts:250"
        )
    return found / 1e3
