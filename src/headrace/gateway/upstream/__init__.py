"""Rollout servers (vLLM's wire): where the Gateway's orders are sampled.

upstream = Upstream(["http://host1:8001", "http://host2:8001"], Options(balance="sticky"))
await upstream.start(vocabulary)                    # verifies them; upstream.trouble says what does not match
answer = await upstream.sample(Order(ids, {"max_tokens": 64, "temperature": 1.0}))
async for piece in upstream.stream(order): ...      # closing it aborts upstream
await upstream.pause("abort-resume"); upstream.set_version(7); await upstream.resume()
"""

from headrace.gateway.upstream.control import PAUSES
from headrace.gateway.upstream.errors import CannotPause, Failed, NoServer, Refused
from headrace.gateway.upstream.options import Balancing, Options
from headrace.gateway.upstream.types import Answer, Order, Sampled
from headrace.gateway.upstream.upstream import Upstream

__all__ = [
    "Upstream",
    "Options",
    "Balancing",
    "PAUSES",
    "Order",
    "Sampled",
    "Answer",
    "Refused",
    "NoServer",
    "Failed",
    "CannotPause",
]
