"""Whatever is sent: a 4xx that says what is wrong, nothing taken, and a server that answers the next call."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from tests.api.kit import Api, api_on, connected
from tests.atropos.groups import group
from tests.atropos.words import environment, registration

from headrace import DataPool

GROUP = json.dumps(group(1, 4, 0)).encode()
DEEP = b'{"tokens": [[1]], "masks": [[1]], "scores": [0.5], "images": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
MAX_MB = 2.0


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with DataPool() as pool, api_on(pool, max_body_mb=MAX_MB) as found:
        found.opened(8, 4)
        yield found


def bomb(size: int) -> bytes:
    """Zeros by the megabyte, as gzip."""
    packed = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(packed.compress(bytes(1_000_000)) for _ in range(size // 1_000_000)) + packed.flush()


GZIP = {"content-encoding": "gzip"}


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (DEEP, {}, 422, "nested more than 100 deep"),
        (gzip.compress(DEEP, mtime=0), GZIP, 422, "nested more than 100 deep"),
        (b'{"scores": [], "masks": [], "tokens": [[' + b"9" * 100_000 + b"]]}", {}, 422, "tokens cannot be read"),
        (GROUP.replace(b"0.25", b"NaN"), {}, 422, "scores[1]"),
        (GROUP.replace(b"0.25", b"-Infinity"), {}, 422, "scores[1]"),
        (GROUP.replace(b"0.25", b"1e400"), {}, 422, "scores[1]"),
        (GROUP.replace(b"0.25,", b""), {}, 422, "scores has 3 entries for 4 sequences"),
        (GROUP.replace(b"[-100,", b"["), {}, 422, "masks[0] has 2 entries for 3 tokens"),
        (b"", {}, 422, "is not JSON"),
        (b"\xff\xfe", {}, 422, "is not JSON"),
        (GROUP[:-10], {}, 422, "is not JSON"),
        (b"this is not gzip", GZIP, 400, "is no gzip"),
        (gzip.compress(GROUP, mtime=0)[:-10], GZIP, 400, "ends too early"),
        (gzip.compress(GROUP, mtime=0)[:20], GZIP, 400, "ends too early"),
        (gzip.compress(GROUP, mtime=0) + b"and something more", GZIP, 400, "is no gzip"),
        (bytes(3_000_000), {}, 413, "larger than 2 MB"),
        (bomb(100_000_000), GZIP, 413, "larger than 2 MB"),
    ],
)
def test_a_bad_group_is_refused(api: Api, body: bytes, headers: dict[str, str], status: int, words: str) -> None:
    answer = api.client.post("/scored_data", content=body, headers={"content-type": "application/json", **headers})
    assert answer.status_code == status
    assert words in answer.json()["detail"]
    assert api.get("/status") == {"current_step": 0, "queue_size": 0}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/register", registration(batch_size=2**62), "batch_size"),
        ("/register", registration(batch_size=0), "batch_size"),
        ("/register", registration(batch_size="many"), "batch_size must be an integer, not 'many'"),
        ("/register", registration(wandb_group=5), "wandb_group"),
        ("/register", registration(checkpoint_dir="x" * 20_000), "checkpoint_dir"),
        ("/register", registration(resume="yes"), "resume must be true or false"),
        ("/register", [], "must be an object"),
        ("/register-env", environment(2**62), "group_size"),
        ("/register-env", environment(-1), "group_size"),
        ("/register-env", environment(4, weight=1e300), "weight"),
        ("/register-env", environment(4, weight="inf"), "weight is NaN or infinite"),
        ("/register-env", environment(4, max_token_length=2**70), "max_token_length"),
        ("/disconnect-env", {"env_id": None}, "env_id must be an integer"),
        ("/disconnect-env", {}, "env_id is missing"),
        ("/scored_data", group(1, 4, 2**64), "env_id"),
    ],
)
def test_a_bad_registration_is_refused(api: Api, path: str, body: Any, words: str) -> None:
    answer = api.client.post(path, json=body)
    assert answer.status_code == 422
    assert words in answer.json()["detail"]


def test_a_body_that_never_says_how_long_it_is_stops_at_the_limit(api: Api) -> None:
    connection = connected(api.address)
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        while sent < 200_000_000:
            sent += 100_000
            yield bytes(100_000)

    try:
        connection.request("POST", "/scored_data", parts(), encode_chunked=True)
        assert connection.getresponse().status == 413
    except OSError:
        pass  # the server hung up in the middle: as good
    finally:
        connection.close()
    assert api.queued() == 0


def test_memory_stays_bounded(api: Api) -> None:
    """Bombs of a gigabyte in all, and texts that would take twenty times their size as values."""
    peak = _peak()
    bombs = bomb(100_000_000)
    for _ in range(10):
        assert api.client.post("/scored_data", content=bombs, headers=GZIP).status_code == 413
    lists = b'{"scores": [], "masks": [], "tokens": [' + b"[]," * 600_000 + b"[]]}"
    texts = b'{"scores": [], "masks": [], "tokens": [[' + b'"1",' * 400_000 + b'"x"]]}'
    for body in (lists, texts) * 3:
        assert api.client.post("/scored_data", content=body).status_code == 422
    assert _peak() - peak < 300_000_000


def _peak() -> int:
    with open(f"/proc/{os.getpid()}/status") as status:
        (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_a_path_or_a_method_that_is_not_there(api: Api) -> None:
    assert api.client.get("/nowhere").status_code == 404
    for method, path in (("GET", "/register"), ("POST", "/batch"), ("DELETE", "/reset_data"), ("GET", "/scored_data")):
        assert api.client.request(method, path).status_code == 405
