"""What was consumed and sampled in a session, as the sequences that a trainer learns from.

A sequence holds ids as a server consumed and sampled them. A call whose prompt begins, id for id, with a sequence
continues it; any other call begins one. Sampled ids are labelled with themselves and carry their log-probs; all else is
masked, with -100 and 1.0.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, PrivateAttr

MASKED = -100
NO_LOG_PROB = 1.0


class SequenceNode(BaseModel):
    """One sequence, ready to be scored; `metadata` holds at least its finish_reason.

    `full_text` is the last prompt as it was written, special tokens and all, and the answer as it reads: without the
    special tokens that were sampled, which `tokens` hold. So what looks at the end of a text sees what was said.
    """

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any] | None = None
    #: The text of all tokens, which a prompt that continues this begins with.
    _written: str = PrivateAttr("")

    @property
    def written(self) -> str:
        return self._written


class Sampled(msgspec.Struct, frozen=True):
    """One answer: its ids and log-probs, the text that it says, and that text with special tokens (`written`)."""

    ids: list[int]
    log_probs: list[float]
    text: str
    written: str
    metadata: dict[str, Any]


class Sequences:
    """The sequences of one session. With `keep_all`, those that were continued stay beside their continuations."""

    def __init__(self, *, keep_all: bool = False) -> None:
        self.nodes: list[SequenceNode] = []
        self._keep_all = keep_all

    def continued_by(self, prompt: list[int]) -> SequenceNode | None:
        """The longest sequence that a prompt begins with."""
        fits = [node for node in self.nodes if prompt[: len(node.tokens)] == node.tokens]
        return max(fits, key=lambda node: len(node.tokens), default=None)

    def add(self, prompt: list[int], answers: list[Sampled], written: str) -> list[SequenceNode]:
        """The sequences of the answers to one prompt; `written` is the prompt's text, from its first token on."""
        before = self.continued_by(prompt)
        made = [_node(before, prompt, answer, written) for answer in answers]
        at = next((i for i, node in enumerate(self.nodes) if node is before), None)
        if at is not None and not self._keep_all:
            self.nodes[at : at + 1] = made[:1]
            self.nodes += made[1:]
        else:
            self.nodes += made
        return made

    def clear(self) -> None:
        self.nodes.clear()


def _node(before: SequenceNode | None, prompt: list[int], answer: Sampled, written: str) -> SequenceNode:
    known = 0 if before is None else len(before.tokens)
    new = len(prompt) - known
    node = SequenceNode.model_construct(
        full_text=written + answer.text,
        tokens=prompt + answer.ids,
        masked_tokens=([] if before is None else before.masked_tokens) + [MASKED] * new + answer.ids,
        logprobs=([] if before is None else before.logprobs) + [NO_LOG_PROB] * new + answer.log_probs,
        metadata=answer.metadata,
    )
    node._written = written + answer.written
    return node
