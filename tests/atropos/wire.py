"""What is taken as a number, what comes back, and how it travels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.atropos.calls import Call, get, post
from tests.atropos.groups import full, group, served
from tests.atropos.words import GZIP, NOT_READY, RECEIVED, environment, opening, register, send, status

#: Where a web page comes from that calls.
PAGE = "http://a.page"


def every_field() -> Iterator[Call]:
    said = [[{"role": "user", "content": "?", "name": "x", "reward": 1}], [{"role": "tool", "content": None}]]
    one = group(
        *(1, 2, 0),
        advantages=[[0.5, -0.5, 0.25], [0.0, 1.5, -2.0]],
        ref_logprobs=[[1.0, -0.5, -0.25], [1.0, -1.5, -2.0]],
        inference_logprobs=[[1.0, -0.125, -0.1], [1.0, -0.2, -0.3]],
        messages=said,
        generation_params={"temperature": 0.7, "stop": ["\n", "ü"]},
        overrides=[{"set_advantage_to_zero": True}, {}],
        group_overrides={"group_size": 2},
        images=[None, {"url": "x", "sizes": [1, 2.5, 12345678901234567890123]}],
        distill_token_ids=[[[1, 2], [3, 4], [5, 6]]] * 2,
        distill_logprobs=[[[-0.1, -0.2], [-0.3, -0.4], [-0.5, -0.6]]] * 2,
    )
    yield from opening(2, environment(2))
    yield from send({**one, "unknown": 1, "another": {"a": []}})
    yield get("/latest_example", full(one))
    yield get("/batch", served(one))
    for wrong in ([[{"role": "user"}]], [[{"content": "?"}]], [["?"]], "?"):
        yield post("/scored_data", group(2, 1, 0, messages=wrong), status=422)
    fields: dict[str, Any] = {"generation_params": [], "group_overrides": "x", "overrides": {}, "advantages": [0.5]}
    for key, value in fields.items():
        yield post("/scored_data", group(2, 1, 0, **{key: value}), status=422)


def lenient_numbers() -> Iterator[Call]:
    yield from opening(1, environment(1))
    sent = group(1, 1, tokens=[["12", 1.0, True, " 7 ", "3.0"]], masks=[["-100", -100.0, False, 7, 3]], env_id="0")
    yield from send({**sent, "scores": ["0.5"], "advantages": [[1, "2", True, "-1e-3", 0]]})
    taken = group(1, 1, tokens=[[12, 1, 1, 7, 3]], masks=[[-100, -100, 0, 7, 3]], env_id=0, scores=[0.5])
    yield get("/batch", served({**taken, "advantages": [[1.0, 2.0, 1.0, -0.001, 0.0]]}))
    for wrong in (1.5, "1.5", "", "x", None, [1], "0x10"):
        yield post("/scored_data", group(1, 1, tokens=[[wrong]]), status=422)
    for score in ("", "x", None, [1.0]):
        yield post("/scored_data", group(1, 1, scores=[score]), status=422)


def digits() -> Iterator[Call]:
    values = [
        0.1,
        1 / 3,
        -2.5e-8,
        1e22,
        1.7976931348623157e308,
        5e-324,
        -0.0,
        3,
        123456789012345678,
        0.30000000000000004,
    ]
    yield from opening(1, environment(1))
    yield from send(group(1, 1, 0, inference_logprobs=[values], scores=[-0.6931471805599453], images=values))
    taken = group(1, 1, 0, inference_logprobs=[[float(v) for v in values]], scores=[-0.6931471805599453], images=values)
    yield get("/batch", served(taken))


def large_integers() -> Iterator[Call]:
    ids = [2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1]
    yield from opening(1, environment(1))
    sent = group(1, 1, 0, tokens=[ids], masks=[[-100, *ids[1:]]])
    yield from send(sent)
    yield get("/batch", served(sent))


def unequal_lengths() -> Iterator[Call]:
    yield from opening(2, environment(2))
    yield from send(group(1, 2, 0, masks=[[-100, 1, 2]]))
    yield get("/batch", served(group(1, 2, 0, masks=[[-100, 1, 2]])))
    yield from send(group(2, 2, 0, scores=[1.0]))
    yield from send(group(3, 2, 0, masks=[[1], [1]]))


def not_a_number(text: str) -> Iterator[Call]:
    """Taken; the batch that holds it cannot be written, and is gone."""
    yield from opening(1, environment(1))
    body = b'{"tokens": [[1]], "masks": [[1]], "scores": [%b], "env_id": 0}' % text.encode()
    yield post("/scored_data", body, RECEIVED)
    yield get("/batch", status=500)
    yield get("/batch", NOT_READY)


def gzip_both_ways() -> Iterator[Call]:
    large = group(1, 4, 0, images="x" * 2000)
    yield from opening(4, environment(4))
    yield post("/scored_data", large, RECEIVED, gzipped=True)
    yield get("/latest_example", full(large))
    yield get("/latest_example", full(large), headers=GZIP, encoding="gzip")
    yield get("/status", {"current_step": 0, "queue_size": 1}, headers=GZIP)
    yield get("/batch", served(large), headers=GZIP, encoding="gzip")
    yield post("/scored_data", group(2, 4, 0), RECEIVED, gzipped=True, headers=(("content-encoding", "X-GZIP"),))
    yield post("/scored_data", group(2, 4, 0), gzipped=True, cut=10, status=500)
    yield post("/scored_data", b"not gzip", headers=(("content-encoding", "gzip"),), status=400)
    yield post("/scored_data", b"", headers=(("content-encoding", "gzip"),), status=422)
    yield status(1, 1)


def gzip_from_a_thousand_bytes() -> Iterator[Call]:
    for size, encoding in ((999, None), (1000, "gzip")):
        yield get("/reset_data", "Reset successful")
        name = "x" * (size - len('{"group":"","project":""}'))
        yield register(wandb_group=name, wandb_project="")
        yield get("/wandb_info", {"group": name, "project": ""}, headers=GZIP, encoding=encoding)


def a_page_of_another_origin() -> Iterator[Call]:
    page = (("origin", PAGE),)
    yield get("/status", {"current_step": 0, "queue_size": 0}, headers=page)
    asks = (*page, ("access-control-request-method", "POST"), ("access-control-request-headers", "content-type"))
    yield Call("OPTIONS", "/scored_data", headers=asks, answer="OK")
