"""Rollout servers (vLLM's wire): where the Gateway's requests are sampled.

upstream = Upstream(["http://host1:8001", "http://host2:8001"], UpstreamOptions(balance="sticky"))
await upstream.start(vocabulary)                    # verifies them; upstream.trouble says what does not match
answer = await upstream.sample(UpstreamRequest(ids, {"max_tokens": 64, "temperature": 1.0}))
await upstream.stream(request, take)                # take(piece) as they come; cancelling it aborts upstream
await upstream.pause("abort-resume"); upstream.set_version(7); await upstream.resume()
"""

from headrace.gateway.upstream.errors import CannotPause, NoRolloutServer, RolloutServerFailed, UpstreamRefused
from headrace.gateway.upstream.options import Balancing, UpstreamOptions
from headrace.gateway.upstream.pause import PAUSE_MODES
from headrace.gateway.upstream.types import SampledAnswer, SampledChoice, UpstreamRequest
from headrace.gateway.upstream.upstream import Upstream

__all__ = [
    "Upstream",
    "UpstreamOptions",
    "Balancing",
    "PAUSE_MODES",
    "UpstreamRequest",
    "SampledChoice",
    "SampledAnswer",
    "UpstreamRefused",
    "NoRolloutServer",
    "RolloutServerFailed",
    "CannotPause",
]
