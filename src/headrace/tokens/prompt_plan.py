"""Which ids a request's prompt has, and which earlier call it continues: the one place that decides.

`bridge` (the default): a request that continues a node gets the node's own ids and, behind them, only what is new; the
template is overridden where it would strip or move what was sent. `template`: every prompt is rendered as the template
would, and a branch begins where that is not what was sampled. In both, a prompt with a parent begins bit for bit with
the parent's prompt and response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from headrace.data.step import IntArray
from headrace.tokens.history import Cause, History, Match, Node, Request
from headrace.tokens.images import PlacedImage
from headrace.tokens.messages import Message, Unrenderable
from headrace.tokens.renderer import Renderer
from headrace.tokens.vision import images_of

HistoryMode = Literal["bridge", "template"]


class PromptPlan(msgspec.Struct, frozen=True, eq=False):
    """A prompt's ids, the node that it continues, and why. `bridged`: nothing old was rendered again. `images` are
    all of the prompt's, and where in the ids they stand."""

    ids: IntArray
    cause: Cause
    parent: Node | None = None
    kept: int = 0  # how many of the ids are the parent's
    bridged: bool = False
    images: tuple[PlacedImage, ...] = ()


def plan_prompt(
    renderer: Renderer,
    history: History,
    request: Request,
    mode: HistoryMode = "bridge",
    match: Match | None = None,
) -> PromptPlan:
    """The prompt for a request. Raises Unrenderable where the model's format cannot hold its messages.

    `match` is `history.match(request)`, where a caller has asked already.
    """
    renderer = renderer.with_options(request.options)
    images = images_of(request.messages)
    if images and isinstance(renderer.vision, str):
        raise Unrenderable(f"the messages hold an image, and this model takes none: {renderer.vision}")
    plan = _planned(renderer, request, mode, match or history.match(request))
    if isinstance(renderer.vision, str):
        return plan
    return msgspec.structs.replace(plan, images=renderer.vision.placed(plan.ids, images))


def _planned(renderer: Renderer, request: Request, mode: HistoryMode, match: Match) -> PromptPlan:
    if match.node is None:
        return PromptPlan(_render(renderer, request), match.cause)
    if mode == "bridge":
        plan = _bridge(renderer, match, match.node)
        if plan is not None:
            return plan
    ids = _render(renderer, request)
    before = match.node.whole()
    if len(ids) > len(before) and np.array_equal(ids[: len(before)], before):
        return PromptPlan(ids, Cause.EXTENDED, match.node, len(before))
    return PromptPlan(ids, Cause.BRIDGE_REFUSED if mode == "bridge" else Cause.TEMPLATE_DIFFERS)


def _bridge(renderer: Renderer, match: Match, node: Node) -> PromptPlan | None:
    ext = renderer.bridge(
        node.prompt_tail(renderer.looks_back or node.n_prompt).tolist(), node.response.tolist(), node.calls, match.new
    )
    if not ext:
        return None
    before = node.whole()
    ids = np.concatenate([before, _unfolded(renderer, ext, match.new)])
    return PromptPlan(ids, Cause.EXTENDED, node, len(before), True)


def _render(renderer: Renderer, request: Request) -> IntArray:
    return _unfolded(renderer, renderer.render(request.messages, request.tools), request.messages)


def _unfolded(renderer: Renderer, ids: Sequence[int], messages: Sequence[Message]) -> IntArray:
    if isinstance(renderer.vision, str):
        return np.asarray(ids, np.int32)
    return renderer.vision.unfolded(ids, images_of(messages))
