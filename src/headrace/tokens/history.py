"""A trajectory's calls as a tree of conversations: which earlier call a new one continues, and which ids it has.

A node's key stands for the messages it was called with and the answer it gave. A conversation continues the node whose
key is that of the longest beginning of its messages: one digest a message, then a look-up; no old message is compared,
parsed or kept. An answer of which a client sends back the tool calls alone is known by their ids. A node keeps only the
ids that its parent does not hold, and its record fits into a step's metadata, so that another process can rebuild the
tree from the pool.

A prompt with a parent begins bit for bit with the parent's prompt and response: `plan_prompt` is the one place that
decides. `bridge` (the default): a conversation that continues a node gets the node's own ids and, behind them, only
what is new; the template is overridden where it would strip or move what was sent. `template`: every prompt is rendered
as the template would, and a branch begins where that is not what was sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Literal

import msgspec
import numpy as np

from headrace.data.step import IntArray, Step
from headrace.tokens.conversation import ROOT, Conversation, Schemas, digest_of, strict
from headrace.tokens.images import PlacedImage
from headrace.tokens.messages import Message, ToolCall, Unrenderable, images_of
from headrace.tokens.renderer import Renderer

#: Where a step's metadata holds its node's record.
RECORD = "history"
#: The quarantine of a step whose model is kept and not trained: nothing is wrong with it.
RECORD_ONLY = "record_only"


class Cause(StrEnum):
    """Why a prompt is what it is: the continuation of a node, or the beginning of a branch."""

    EXTENDED = "extended"  # begins, bit for bit, with its parent's prompt and response
    FIRST = "first"  # nothing was there yet
    REPEATED = "repeated"  # the same conversation from its beginning, asked again
    NEW_CONVERSATION = "new_conversation"  # no answer in it: a sub-agent, or a compaction into one message
    SYSTEM_CHANGED = "system_changed"  # continues a node but for its system message
    TOOLS_CHANGED = "tools_changed"
    OPTIONS_CHANGED = "options_changed"  # template options, such as thinking on or off
    HISTORY_REWRITTEN = "history_rewritten"  # holds an answer, or a turn before one, that was never sampled so
    BRIDGE_REFUSED = "bridge_refused"  # continues a node, but what to append could not be proven
    TEMPLATE_DIFFERS = "template_differs"  # rendered as the template would, which is not what was sampled


class NodeRecord(msgspec.Struct, frozen=True, gc=False):
    """What identifies a node: digests of its conversation. Small enough for a step's metadata."""

    key: bytes  # the messages and the answer
    body: bytes  # the same without the opening system messages
    messages: int  # how many they are
    prompt_key: bytes  # the messages alone
    strict: bytes
    tools: bytes
    options: bytes
    parent: bytes
    calls: tuple[tuple[str, str], ...] = ()
    named: bytes = b""  # the messages and the answer's calls by their ids; empty where it has none

    @classmethod
    def opaque(cls, name: str, parent: Node | None) -> NodeRecord:
        """The record of a call whose prompt was no conversation: no conversation continues it."""
        key = digest_of(["opaque", name])
        before = ROOT if parent is None else parent.record.key
        return cls(key, key, 0, key, key, ROOT, ROOT, before)

    def to_metadata(self) -> dict[str, Any]:
        """The record as it stands in a step's metadata under `RECORD`."""
        about = {name: getattr(self, name).hex() for name in DIGESTS}
        if self.named:
            about["named"] = self.named.hex()
        return {**about, "messages": self.messages, "calls": [list(call) for call in self.calls]}

    @classmethod
    def from_metadata(cls, given: Any) -> NodeRecord | None:
        """The record in a step's metadata; None for anything else, since a flow may use that name for its own."""
        try:
            digests: dict[str, Any] = {name: bytes.fromhex(given[name]) for name in DIGESTS}
            calls = tuple((str(call_id), str(name)) for call_id, name in given["calls"])
            named = bytes.fromhex(given.get("named", ""))
            return cls(**digests, messages=int(given["messages"]), calls=calls, named=named)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None


DIGESTS = ("key", "body", "prompt_key", "strict", "tools", "options", "parent")


class Node(msgspec.Struct, eq=False):
    """One call: its record, and the ids that its parent does not hold."""

    record: NodeRecord
    parent: Node | None
    own: IntArray
    n_response: int
    step: int | str | None = None  # the step's index, or the call's id while it has none
    before: int = 0  # how many ids the parent holds
    call: str = ""  # the call's id

    @property
    def total(self) -> int:
        """How many ids prompt and response have."""
        return self.before + len(self.own)

    @property
    def n_prompt(self) -> int:
        """How many of them are the prompt's."""
        return self.total - self.n_response

    @property
    def response(self) -> IntArray:
        """The sampled ids."""
        return self.own[len(self.own) - self.n_response :]

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The answer's tool calls, without their arguments."""
        return tuple(ToolCall(name, {}, call_id) for call_id, name in self.record.calls)

    def whole(self) -> IntArray:
        """Prompt and response."""
        parts: list[IntArray] = []
        node: Node | None = self
        while node is not None:
            parts.append(node.own)
            node = node.parent
        return np.concatenate(parts[::-1]) if len(parts) > 1 else parts[0]

    def prompt_tail(self, most: int) -> IntArray:
        """The last ids of the prompt, without building the whole of it."""
        tail = self.own[: len(self.own) - self.n_response]
        node = self.parent
        while node is not None and len(tail) < most:
            tail = np.concatenate([node.own[max(0, len(node.own) - (most - len(tail))) :], tail])
            node = node.parent
        return tail[max(0, len(tail) - most) :]


class Match(msgspec.Struct, frozen=True):
    """The node that a conversation continues and the messages that are new, or why it begins a branch."""

    cause: Cause
    node: Node | None = None
    new: tuple[Message, ...] = ()


class History:
    """The nodes of one trajectory."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._by_key: dict[bytes, list[Node]] = {}
        self._bodies: set[bytes] = set()
        self._prompts: set[bytes] = set()

    def match(self, conversation: Conversation, call: str | None = None) -> Match:
        """The longest node that a conversation continues. Of several that look alike, the one whose call id is `call`,
        else the one with the same tool call ids or the very same answer, else the newest."""
        if not self.nodes:
            return Match(Cause.FIRST)
        chain, messages = conversation.chain, conversation.messages
        for n in range(len(messages), 0, -1):
            if messages[n - 1].role != "assistant":
                continue
            found = self._by_key.get(chain.named.get(n, b"")) or self._by_key.get(chain.keys[n])
            if not found:
                continue
            new = messages[n:]
            if any(message.role == "assistant" for message in new):
                return Match(Cause.HISTORY_REWRITTEN)
            fits = [node for node in found if node.record.tools == conversation.tools_key]
            if not fits:
                return Match(Cause.TOOLS_CHANGED)
            fits = [node for node in fits if node.record.options == conversation.options_key]
            if not fits:
                return Match(Cause.OPTIONS_CHANGED)
            node = _meant(fits, messages[n - 1], conversation.chain.schemas, call)
            return Match(Cause.EXTENDED, node, _named(new, messages[n - 1], node))
        return Match(self._cause_of_branch(conversation))

    def _cause_of_branch(self, conversation: Conversation) -> Cause:
        if conversation.chain.whole in self._prompts:
            return Cause.REPEATED
        answers = [n for n, message in enumerate(conversation.messages, 1) if message.role == "assistant"]
        if not answers:
            return Cause.NEW_CONVERSATION
        if conversation.chain.body(answers[-1]) in self._bodies:
            return Cause.SYSTEM_CHANGED
        return Cause.HISTORY_REWRITTEN

    def record(self, conversation: Conversation, answer: Message, parent: Node | None) -> NodeRecord:
        """The record of the call that got this answer."""
        start = 0 if parent is None else parent.record.messages
        before = ROOT if parent is None else parent.record.body
        return NodeRecord(
            key=conversation.chain.extended(answer),
            body=conversation.chain.body(len(conversation.messages), start, before, answer),
            messages=len(conversation.messages) + 1,
            prompt_key=conversation.chain.whole,
            strict=strict(answer, conversation.chain.schemas),
            tools=conversation.tools_key,
            options=conversation.options_key,
            parent=ROOT if parent is None else parent.record.key,
            calls=tuple((call.id, call.name) for call in answer.tool_calls),
            named=conversation.chain.naming(answer),
        )

    def add(
        self,
        record: NodeRecord,
        prompt: IntArray,
        response: IntArray,
        parent: Node | None = None,
        step: int | str | None = None,
        call: str = "",
    ) -> Node:
        """Adds a call that was answered. The prompt must begin with the parent's ids; the step's check sees to that."""
        before = 0 if parent is None else parent.total
        own = np.concatenate([prompt[before:], response]).astype(np.int32, copy=False)
        return self.adopt(Node(record, parent, own, len(response), step, before, call))

    def adopt(self, node: Node) -> Node:
        """Adds a node that is made already."""
        record = node.record
        self.nodes.append(node)
        for key in filter(None, (record.key, record.named)):
            self._by_key.setdefault(key, []).append(node)
        self._bodies.add(record.body)
        self._prompts.add(record.prompt_key)
        return node

    @classmethod
    def from_steps(cls, steps: Iterable[Step]) -> History:
        """The tree as another process left it in the pool; steps without a record, or quarantined for a fault, are
        passed over."""
        history = cls()
        for step in steps:
            record = NodeRecord.from_metadata(step.metadata.get(RECORD))
            if record is None or step.quarantined not in (None, RECORD_ONLY):
                continue
            parent = next(
                (node for node in reversed(history._by_key.get(record.parent, ())) if _begins(step.prompt_ids, node)),
                None,
            )
            history.add(record, step.prompt_ids, step.response_ids, parent, step.step_index, step.call_id or "")
        return history


def _begins(prompt: IntArray, node: Node) -> bool:
    return len(prompt) >= node.total and np.array_equal(prompt[: node.total], node.whole())


def _meant(nodes: Sequence[Node], answer: Message, schemas: Schemas, call: str | None) -> Node:
    """Of several answers that look alike, the one that is named, by itself or by the ids of its tool calls, or the same
    in everything, else the newest."""
    if len(nodes) > 1:
        for node in nodes:
            if node.call == call:
                return node
        shown = [made.id for made in answer.tool_calls]
        nodes = [node for node in nodes if shown == [call_id for call_id, _ in node.record.calls]] or nodes
        exact = strict(answer, schemas)
        for node in reversed(nodes):
            if node.record.strict == exact:
                return node
    return nodes[-1]


def _named(new: tuple[Message, ...], answer: Message, node: Node) -> tuple[Message, ...]:
    """New tool results with the ids that the model's calls had, where the client renamed them."""
    ids = [call_id for call_id, _ in node.record.calls]
    shown = [call.id for call in answer.tool_calls]
    if shown == ids or len(shown) != len(ids):
        renamed = {}
    else:
        renamed = dict(zip(shown, ids, strict=True)) if len(set(shown)) == len(shown) else {}
    out = []
    for message in new:
        if message.role == "tool":
            call_id = renamed.get(message.tool_call_id or "", message.tool_call_id)
            if call_id not in ids and len(ids) == 1:
                call_id = ids[0]
            if call_id != message.tool_call_id:
                message = msgspec.structs.replace(message, tool_call_id=call_id)
        out.append(message)
    return tuple(out)


# -- prompts ---------------------------------------------------------------------------------------------------------

HistoryMode = Literal["bridge", "template"]


class PromptPlan(msgspec.Struct, frozen=True, eq=False):
    """A prompt's ids, the node that it continues, and why. `bridged`: nothing old was rendered again. `images` are
    all of the prompt's, and where in the ids they stand. `parent_ids`: the parent's, where they were put together."""

    ids: IntArray
    cause: Cause
    parent: Node | None = None
    kept: int = 0  # how many of the ids are the parent's
    bridged: bool = False
    images: tuple[PlacedImage, ...] = ()
    parent_ids: IntArray | None = None


def plan_prompt(
    renderer: Renderer,
    history: History,
    conversation: Conversation,
    mode: HistoryMode = "bridge",
    match: Match | None = None,
) -> PromptPlan:
    """The prompt of a conversation; raises `Unrenderable` where the model's format cannot hold its messages.

    `match` is `history.match(conversation)`, where a caller has asked already.
    """
    renderer = renderer.with_options(conversation.options)
    images = images_of(conversation.messages)
    if images and isinstance(renderer.vision, str):
        raise Unrenderable(f"the messages hold an image, and this model takes none: {renderer.vision}")
    plan = _planned(renderer, conversation, mode, match or history.match(conversation))
    if isinstance(renderer.vision, str):
        return plan
    return msgspec.structs.replace(plan, images=renderer.vision.placed(plan.ids, images))


def _planned(renderer: Renderer, conversation: Conversation, mode: HistoryMode, match: Match) -> PromptPlan:
    if match.node is None:
        return PromptPlan(_render(renderer, conversation), match.cause)
    if mode == "bridge":
        plan = _bridge(renderer, conversation, match, match.node)
        if plan is not None:
            return plan
    ids = _render(renderer, conversation)
    before = match.node.whole()
    if len(ids) > len(before) and np.array_equal(ids[: len(before)], before):
        return PromptPlan(ids, Cause.EXTENDED, match.node, len(before))
    return PromptPlan(ids, Cause.BRIDGE_REFUSED if mode == "bridge" else Cause.TEMPLATE_DIFFERS)


def _bridge(renderer: Renderer, conversation: Conversation, match: Match, node: Node) -> PromptPlan | None:
    ext = renderer.bridge(
        node.prompt_tail(renderer.looks_back or node.n_prompt).tolist(),
        node.response.tolist(),
        node.calls,
        match.new,
        conversation.messages[: len(conversation.messages) - len(match.new) - 1],
        tools=bool(conversation.tools),
    )
    if not ext:
        return None
    before = node.whole()
    ids = np.concatenate([before, _unfolded(renderer, ext, match.new)])
    return PromptPlan(ids, Cause.EXTENDED, node, len(before), True, parent_ids=before)


def _render(renderer: Renderer, conversation: Conversation) -> IntArray:
    return _unfolded(renderer, renderer.render(conversation.messages, conversation.tools), conversation.messages)


def _unfolded(renderer: Renderer, ids: Sequence[int], messages: Sequence[Message]) -> IntArray:
    if isinstance(renderer.vision, str):
        return np.asarray(ids, np.int32)
    return renderer.vision.unfolded(ids, images_of(messages))
