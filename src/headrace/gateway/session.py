"""`Session`: what a gateway knows of one running trajectory. It is a cache: the pool can always be asked again.

A session rebuilt from the pool's steps continues a conversation with the same exact tokens as the one that was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from headrace.data.errors import InvalidInput
from headrace.data.step import IntArray, Step
from headrace.data.trajectory import Trajectory
from headrace.gateway.ask import checked_sampling
from headrace.gateway.kept import KEPT, Conversations, Kept
from headrace.gateway.text_key import DIGEST
from headrace.gateway.tries import Tries
from headrace.tokens import History, Node
from headrace.tokens.images import image_files

#: Where a trajectory's metadata says which parameters its calls are sampled with, whatever they ask for.
SAMPLING = "forced_sampling"
#: Where a step's metadata says which request it answers, and what text its prompt and answer are.
REQUEST, TEXT = "request", "text"


def digest_of(data: bytes) -> str:
    return blake2b(data, digest_size=DIGEST).hexdigest()


def forced_by(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that a trajectory's metadata forces; what is none, a flow's own of that name, forces nothing."""
    given = metadata.get(SAMPLING)
    try:
        return checked_sampling(given) if isinstance(given, dict) else {}
    except InvalidInput:
        return {}


class TextNode(msgspec.Struct, frozen=True, eq=False):
    """A text completion: the text of its prompt and answer, by length and digest, and its node."""

    length: int
    digest: str
    node: Node


class Session:
    """One trajectory: its place, the tree of its calls, and the calls under way."""

    def __init__(self, uid: str, prompt_uid: str, channel: str, sampling: Mapping[str, Any] | None = None) -> None:
        """`sampling`: parameters that it forces on its calls."""
        self.uid = uid
        self.sampling = dict(sampling or {})
        self.prompt_uid = prompt_uid
        self.channel = channel
        self.history = History()
        self.texts: list[TextNode] = []
        self.kept = Conversations()
        self.complete = False
        self.steps = 0
        self.tokens = 0
        self.tries = Tries()
        self.busy = 0

    @classmethod
    def of(cls, trajectory: Trajectory) -> Session:
        """The session of a trajectory as the pool holds it."""
        session = cls(trajectory.uid, trajectory.prompt_uid, trajectory.channel, forced_by(trajectory.metadata))
        session.read(trajectory.steps)
        session.complete = trajectory.complete
        return session

    def read(self, steps: Iterable[Step]) -> None:
        """Takes in what the pool has, beside what is not there yet."""
        steps = list(steps)
        there = {step.step_index for step in steps}
        before, self.history = self.history, History.from_steps(steps)
        by_index = {node.step: node for node in self.history.nodes}
        for known in before.nodes:
            if known.step not in there:
                self.history.adopt(known)
        self.texts = [text for text in self.texts if text.node.step not in there]
        self.steps = len(steps)
        self.tokens = sum(len(node.own) for node in self.history.nodes)
        for step in steps:
            node, about = by_index.get(step.step_index), step.metadata.get(TEXT)
            if node is not None and about is not None:
                self.texts.append(TextNode(int(about["length"]), str(about["digest"]), node))
            if step.call_id is not None and step.call_id not in self.kept:
                files = image_files(step.multi_modal_data)
                self.kept.add(step.call_id, Kept.from_metadata(step.metadata.get(KEPT), files))

    def continued_text(self, prompt: str) -> tuple[Node, str] | None:
        """The longest earlier completion that a text begins with, and what is new behind it."""
        for known in sorted(self.texts, key=lambda known: -known.length):
            if known.length <= len(prompt) and digest_of(prompt[: known.length].encode()) == known.digest:
                return known.node, prompt[known.length :]
        return None

    def continued_ids(self, prompt: IntArray) -> Node | None:
        """The longest earlier call whose ids a prompt begins with."""
        best: Node | None = None
        for node in self.history.nodes:
            longer = node.total <= len(prompt) and (best is None or node.total > best.total)
            if longer and (prompt[: node.total] == node.whole()).all():
                best = node
        return best
