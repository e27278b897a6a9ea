"""An answer that was cut, and the rest of it: what is still to be sampled, and the two joined into one."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from headrace.gateway.upstream import versions
from headrace.gateway.upstream.types import Order, Sampled

#: What begins anew with every request, so that an answer under it cannot be continued in the middle: a grammar, and
#: penalties for what was sampled before.
ANEW = (
    *("structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("presence_penalty", "frequency_penalty"),
)


def begins_anew(order: Order) -> bool:
    return any(order.sampling.get(name) or order.extra.get(name) for name in ANEW)


def rest_of(order: Order, index: int, ids: list[int]) -> Order | None:
    """What is left to sample of one choice after these tokens; None where it has all that it may have."""
    sampling: dict[str, Any] = {**order.sampling, "n": 1}
    most = sampling.get("max_tokens")
    if isinstance(most, int):
        if most <= len(ids):
            return None
        sampling["max_tokens"] = most - len(ids)
    if isinstance(least := sampling.get("min_tokens"), int):
        sampling["min_tokens"] = max(0, least - len(ids))
    if isinstance(seed := sampling.get("seed"), int):
        # The same seed would draw the same numbers again; vLLM gives choice i the seed + i.
        sampling["seed"] = (seed + index + len(ids)) % 2**63
    prompt = np.concatenate([order.prompt, np.array(ids, np.int32)]) if ids else order.prompt
    call_id = f"{order.call_id}.{index}.{len(ids)}" if order.call_id else ""
    return msgspec.structs.replace(order, prompt=prompt, sampling=sampling, call_id=call_id)


def continues(piece: Sampled, before: Sampled, rest: Order) -> None:
    """Makes a piece of the rest of an answer one of the answer, of which `before` is the beginning."""
    piece.index = before.index
    piece.spans = versions.joined(before.spans, len(before.ids), piece.spans)
    if not before.ids:
        return
    if piece.consumed is rest.prompt:
        piece.consumed = None  # the answer's own prompt was told with its beginning
    piece.text = None  # a character may lie across the cut: the two texts do not add up to that of all ids


def joined(cut: Sampled, rest: Order, more: Sampled) -> Sampled:
    """One answer out of its beginning and what the rest of its order brought."""
    if not cut.ids:
        return msgspec.structs.replace(more, index=cut.index)
    # A prompt that is not what was sent: whoever compares it will see that.
    changed = more.consumed is not None and more.consumed is not rest.prompt
    return Sampled(
        cut.index,
        cut.ids + more.ids,
        None if cut.log_probs is None or more.log_probs is None else cut.log_probs + more.log_probs,
        None,  # a character may lie across the cut: the two texts do not add up to that of all ids
        more.finish_reason,
        more.stop_reason,
        more.consumed if changed else cut.consumed,
        versions.joined(cut.spans, len(cut.ids), more.spans),
        None if cut.tokens is None or more.tokens is None else cut.tokens + more.tokens,
        None if cut.top is None or more.top is None else cut.top + more.top,
        more.routed_experts,  # of the prompt as well, and so of the beginning
        more.server,
    )
