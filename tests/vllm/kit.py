"""The same requests to vLLM and to Headrace's engine, and what it means that two answers agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tests.engine.kit import Client, Json

#: Of log-probs, between two implementations of the same arithmetic.
TOLERANCE = 1e-3
#: What is another with every call or server.
OWN = ("id", "request_id", "created", "system_fingerprint")

#: How often an answer is asked for until a test sees it while it is sampled: a busy machine may come too late, and one
#: that always does sees none.
TRIES = 5

#: A turn of `user` that has begun, as ids of `tiny`.
PROMPT = [1, 272, 201]


class Reached(Client):
    """A server of another process."""

    def __init__(self, address: str) -> None:
        self.host = address.removeprefix("http://")
        self.pool = ThreadPoolExecutor(16)


@contextmanager
def reach(address: str) -> Iterator[Client]:
    client = Reached(address)
    try:
        yield client
    finally:
        client.pool.shutdown()


def agree(ours: Any, theirs: Any, path: str = "") -> None:
    """The same keys in the same order and the same values; numbers with a fraction within the tolerance."""
    if isinstance(theirs, dict):
        assert isinstance(ours, dict), f"{path}: {ours!r} against {theirs!r}"
        assert list(ours) == list(theirs), path
        for key in theirs:
            if key in OWN:
                assert type(ours[key]) is type(theirs[key]), f"{path}.{key}"
            else:
                agree(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, list):
        assert isinstance(ours, list), f"{path}: {ours!r} against {theirs!r}"
        assert len(ours) == len(theirs), f"{path}: {ours!r} against {theirs!r}"
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            agree(one, other, f"{path}[{at}]")
    elif isinstance(theirs, float):
        assert isinstance(ours, float), f"{path}: {ours!r} against {theirs!r}"
        assert abs(ours - theirs) <= TOLERANCE, f"{path}: {ours!r} against {theirs!r}"
    else:
        assert (type(ours), ours) == (type(theirs), theirs), f"{path}: {ours!r} against {theirs!r}"


def both(ours: Client, theirs: Client, path: str, body: Json) -> Json:
    """Asks both, holds them to each other, and gives what vLLM said."""
    expected = theirs.send("POST", path, body)
    agree(list(ours.send("POST", path, body)), list(expected))
    found: Json = expected[1]
    return found


def told(chunks: Iterable[Json], text: str = "text") -> dict[int, list[tuple[int, str]]]:
    """Of each choice, how much text had been told after how many tokens."""
    found: dict[int, list[tuple[int, str]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            so_far = found.setdefault(choice["index"], [(0, "")])
            count, said = so_far[-1]
            part = choice["delta"].get("content") if text == "content" else choice[text]
            so_far.append((count + len(choice.get("token_ids") or ()), said + (part or "")))
    return found


def tell_alike(ours: list[Json], theirs: list[Json], text: str = "text") -> None:
    """Two streams are one, however their tokens fell into chunks: the same text after as many tokens."""
    mine, other = told(ours, text), told(theirs, text)
    assert set(mine) == set(other)
    for index in other:
        assert mine[index][-1] == other[index][-1]
        after = dict(mine[index])
        shared = [(count, said) for count, said in dict(other[index]).items() if count in after]
        assert [(count, after[count]) for count, _ in shared] == shared


def stream_alike(ours: Client, theirs: Client, path: str, body: Json) -> None:
    """Two streams have the same kinds of chunks in the same order. A server that was kept from sending puts all that it
    sampled meanwhile into one chunk: then both are asked again."""
    for left in reversed(range(TRIES)):
        mine, other = (shapes(server.chunks(path, body)) for server in (ours, theirs))
        if mine == other or not left:
            break
    assert mine == other


def shapes(chunks: Iterable[Json]) -> list[tuple[Any, ...]]:
    """What kinds of chunks a stream has, in the order in which they first come: their keys, all the way down."""
    return list(dict.fromkeys(shape(chunk) for chunk in chunks))


def shape(value: Any) -> Any:
    """Keys in their order; a list of objects by its first; the rest by its type."""
    if isinstance(value, dict):
        return tuple((key, "by token" if key == "top_logprobs" else shape(item)) for key, item in value.items())
    if isinstance(value, list):
        return ("list", shape(value[0])) if value and isinstance(value[0], dict) else "list"
    return type(value).__name__
